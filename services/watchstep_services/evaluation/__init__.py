"""Evaluations of runs: claim, collect, judge, commit."""
