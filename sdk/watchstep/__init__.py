"""Watchstep watches training jobs from the inside."""

__version__ = "0.1.0"
