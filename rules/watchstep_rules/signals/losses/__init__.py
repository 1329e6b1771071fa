"""Signals from losses and learning rates."""
