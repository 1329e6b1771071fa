"""Stores as the service reaches them: each project's by its own role, and nothing outside of its prefix."""
