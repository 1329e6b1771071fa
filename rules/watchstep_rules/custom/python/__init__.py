"""Rules that are Python classes."""
