"""Outputs and inputs of modules and functions: which passes are recorded, hooks, and measurements."""
