"""Activations of Flax and Equinox modules."""
