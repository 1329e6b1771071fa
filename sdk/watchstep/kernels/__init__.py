"""Kernels: one pass over many tensors that gives their statistics. All behind `Kernel`, all to the same figures."""
