"""Values that a program records itself with `hook.record`: tensors of any framework, and anything that NumPy converts to an array."""
