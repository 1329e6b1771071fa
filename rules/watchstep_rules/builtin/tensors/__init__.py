"""Rules over any tensor."""
