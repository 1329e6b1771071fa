"""Saved tensors of a run."""
