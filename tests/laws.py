"""How many examples a Hypothesis law has, by tier of tests."""

from __future__ import annotations

from hypothesis import settings

_USUAL = 40
"""Of laws that do not say so, without a tier (`tests/conftest.py`)."""


def examples(number: int) -> int:
    """Return how many examples a law has that needs another number than others: fewer at a commit, more before a release."""
    return max(5, number * settings().max_examples // _USUAL)
