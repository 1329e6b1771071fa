"""Rows that arrive become findings and alerts: one evaluation, whoever asks for it."""
