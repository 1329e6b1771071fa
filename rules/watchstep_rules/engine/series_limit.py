"""The limit of series that one alert follows.

A series is a tensor on a worker in a mode. If every tensor of a job with many workers becomes NaN, each of them is a series with findings,
and the alert would store a streak for each: 250,000 series take 65 MB as JSON and seconds to evaluate. The first `MOST_SERIES` are
enough to fire, to name the cause, and to tell when the alert is resolved.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from watchstep_rules.engine.streaks import named_series
from watchstep_rules.rule import Finding, taken

MOST_SERIES = 20_000
"""Limit of series that an alert follows, about 5 MB as JSON: 200 layers with 100 tensors each. Beyond it, findings of further series are
counted, and do not affect the alert until it follows fewer."""


def limited(
    findings: Sequence[Finding], followed: Collection[str], most: int = MOST_SERIES
) -> Sequence[Finding]:
    """The findings of the series that an alert can follow: those that it follows already, and the first of the others.

    Args:
        findings: findings in the order of the judged rows.
        followed: names of the series that the alert follows.
        most: limit of followed series.
    """
    if len(findings) + len(followed) <= most:
        return findings
    names, series = named_series(findings)
    if len(names) + len(followed) <= most:
        return findings
    chosen = np.array([name in followed for name in names], np.bool_)
    free = max(0, most - len(followed))
    chosen[np.flatnonzero(~chosen)[:free]] = True
    if chosen.all():
        return findings
    return taken(findings, np.flatnonzero(chosen[series]))
