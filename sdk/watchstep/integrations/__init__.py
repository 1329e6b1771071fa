"""Integrations: recording with other frameworks, and pruning bad trials of sweeps. Each module is imported by its users only."""
