"""Stops: reading the control document, and agreeing on a step to stop at."""
