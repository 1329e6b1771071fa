"""Figures of the process and the machine: sampled during training, recorded with its steps."""
