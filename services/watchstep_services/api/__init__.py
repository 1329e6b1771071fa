"""The HTTP API under ``/v1``."""
