"""Faults that begin in the middle of a run: ``PROGRAMS``."""

from benchmarks.detection.mid_run import collapses, data, mixer_and_pairs, updates
from benchmarks.detection.witnessed import MID_RUN as PROGRAMS

__all__ = ["PROGRAMS", "collapses", "data", "mixer_and_pairs", "updates"]
