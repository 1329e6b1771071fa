"""Signals from weights and what optimizers do to them."""
