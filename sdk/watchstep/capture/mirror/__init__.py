"""Mirroring of alerts and selected series into the program's own run of W&B, MLflow, Trackio or TensorBoard."""
