"""Probes: values beyond the statistics, computed where the tensors are."""
