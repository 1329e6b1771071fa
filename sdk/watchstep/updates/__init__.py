"""Recording of a program's updates, for adapters of frameworks other than PyTorch."""
