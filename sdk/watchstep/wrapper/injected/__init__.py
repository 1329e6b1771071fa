"""Injected."""
