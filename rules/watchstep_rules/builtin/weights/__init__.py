"""Rules over weights, updates and the optimizer."""
