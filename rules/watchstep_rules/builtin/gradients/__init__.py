"""Rules over gradients, and over non-finite values."""
