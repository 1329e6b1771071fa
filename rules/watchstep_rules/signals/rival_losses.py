"""Two losses with a backward pass each, of which one is won, and the other one is not learned: a generator against its discriminator."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep_rules.signals.loss_progress import Courses

_WON = 1e-3
_UNNAMED = re.compile(r"loss(_\d+)?")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_WINNERS = {"d", "disc", "discriminator", "critic"}
_LOSERS = {"g", "gen", "generator"}


class Rivals(NamedTuple):
    """The rivalry of losses, over the steps of a block.

    Attributes:
        since: the step since which one loss is won and the other one is not learned; -1 if that is not so, int64 of shape (steps,).
        won, lost: the names of both, by step.
        with_loser: whether the rival of a loss, by name, has a value at the step.
    """

    since: NDArray[np.int64]
    won: list[str]
    lost: list[str]
    with_loser: dict[str, NDArray[np.bool_]]


def rivals(before: int, steps: NDArray[np.int64], courses: Courses) -> Rivals | None:
    """Find steps at which a loss is at a thousandth of its first values, and its rival has not fallen. None without rivals.

    Rivals are losses that the program does not name, so that a backward pass began at each (``loss``, ``loss_2``), and losses with the
    words of a GAN in their names (``d_loss`` and ``g_loss``, ``loss/discriminator`` and ``loss/generator``). A loss that has had both
    signs, as that of a policy, is not learned by falling, and is no rival.

    Args:
        before: the step since which it has been so before the block; -1 for not.
        steps: the steps of the block, ascending.
        courses: the losses at these steps.
    """
    is_so, won, lost = np.zeros(len(steps), np.bool_), [""] * len(steps), [""] * len(steps)
    with_loser: dict[str, NDArray[np.bool_]] = {}
    for winner, loser in _pairs(courses.names):
        name = courses.names[winner]
        with_loser[name] = with_loser.get(name, np.zeros(len(steps), np.bool_)) | courses.present[loser]
        first = courses.first[winner]
        here = (first > 0) & (courses.low[winner] <= _WON * first) & courses.risen[loser]
        for step in np.flatnonzero(here & ~is_so).tolist():
            won[step], lost[step] = name, courses.names[loser]
        is_so |= here
    if not with_loser:
        return None
    since = np.empty(len(steps), np.int64)
    for place, step in enumerate(steps.tolist()):
        before = (step if before < 0 else before) if is_so[place] else -1
        since[place] = before
    return Rivals(since, won, lost, with_loser)


def _pairs(names: list[str]) -> Iterator[tuple[int, int]]:
    for one, other in itertools.permutations(range(len(names)), 2):
        if names[one] == names[other]:
            continue  # of another worker
        words = [{word.lower() for word in _WORD.findall(names[place])} for place in (one, other)]
        is_named = words[0] & _WINNERS and words[1] & _LOSERS
        if is_named or all(_UNNAMED.fullmatch(names[place]) for place in (one, other)):
            yield one, other
