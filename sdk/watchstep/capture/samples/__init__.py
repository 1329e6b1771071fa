"""Samples of training steps: attribution of batches to steps, the ring on this machine, and its upload."""
