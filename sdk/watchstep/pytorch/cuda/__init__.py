"""Measuring and looking at tensors on CUDA devices, without a wait on the training's stream."""
