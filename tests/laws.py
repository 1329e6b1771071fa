"""How many examples a Hypothesis law has, by tier of tests."""

from __future__ import annotations

from hypothesis import settings

_OF_CI = 40


def examples(in_ci: int) -> int:
    """Return how many examples a law has that needs another number than others: fewer at a commit, more before a release."""
    return max(5, in_ci * settings().max_examples // _OF_CI)
