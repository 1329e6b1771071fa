"""Weights, gradients, updates and the optimizer."""
