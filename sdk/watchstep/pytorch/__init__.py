"""PyTorch: what a model holds, and when it steps. Nothing here changes training."""
