"""Measurements and finite checks of tensors on CUDA devices, without waiting on the training stream."""
