"""Probes: figures that statistics alone do not give, computed where the tensors are."""
