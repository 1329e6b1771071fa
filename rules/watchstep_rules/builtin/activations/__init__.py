"""Rules over the outputs of layers."""
