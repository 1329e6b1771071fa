"""Rules over training and validation losses."""
