"""Kernels: compute statistics of many tensors in one pass. All implement `Kernel` with the same results."""
