"""Rules over the process and its machine."""
