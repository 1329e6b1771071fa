"""Replay of a step of a JAX program, operation by operation, on the machine of the user. Nothing here is imported when a run is recorded."""
