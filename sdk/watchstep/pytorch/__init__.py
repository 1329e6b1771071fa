"""Observation of PyTorch models and their updates. Nothing here changes training."""
