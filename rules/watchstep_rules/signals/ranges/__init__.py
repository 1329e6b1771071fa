"""Ranges of statistics, and distances from them."""
