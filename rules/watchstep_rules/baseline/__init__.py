"""Ranges of a program's earlier sound runs, pinned to an attempt."""
