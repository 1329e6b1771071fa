"""Runs and attempts: registration, discovery, claims, lifecycle and stop requests."""
