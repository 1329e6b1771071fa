"""Findings about rows of a block in columns: each is built when it is asked for.

A segment may hold hundreds of thousands of bad rows. An alert needs the findings at which it begins and those that it names, and the
service stores the first thousand: the others are counted, and are never objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep.format.tensors import MODES
from watchstep_rules.rule import Finding, Likelihood, cause_rank, finding_at, likelihood


@dataclass(frozen=True)
class Hits:
    """Rows with a finding, in columns of shape (n,).

    Attributes:
        rows: places in the block, ascending.
        values: what was seen in each.
        thresholds: what it was held against.
        is_first: findings that come before all others of their phase as data flows; None for none.
    """

    rows: NDArray[np.intp]
    values: Floats
    thresholds: Floats
    is_first: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, places: NDArray[np.intp]) -> Hits:
        """Some of them, in that order."""
        is_first = None if self.is_first is None else self.is_first[places]
        return Hits(self.rows[places], self.values[places], self.thresholds[places], is_first)


class FindingRows(Sequence[Finding]):
    """n findings, one for each of some rows of a block; equal to any sequence of the same findings."""

    def __init__(
        self,
        rule: str,
        block: Block,
        hits: Hits,
        words: Callable[[int, float, float], str],
        finish: Callable[[Finding, int], Finding] | None = None,
    ) -> None:
        """Take columns; nothing is built yet.

        Args:
            rule: the rule's name.
            block: the judged rows.
            hits: those with a finding.
            words: the message, by row of the block, value and threshold.
            finish: what more is said of a finding, by its row of the block; it leaves ``cause_rank`` as it is.
        """
        self._rule, self._block, self._hits = rule, block, hits
        self._words, self._finish = words, finish

    @property
    def steps(self) -> NDArray[np.int64]:
        """The step of each, shape (n,)."""
        steps: NDArray[np.int64] = self._block.step[self._hits.rows]
        return steps

    def series(self) -> tuple[list[tuple[str, int, str]], NDArray[np.int64]]:
        """Tensor, worker and mode of each series, in the order in which they come first; and of each finding which it is, shape (n,)."""
        block, rows = self._block, self._hits.rows
        key = block.series_key()[rows]
        _, first, which = np.unique(key, return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        named = [
            (block.info(row).name, int(block.worker[row]), MODES[block.mode[row]])
            for row in rows[first[order]].tolist()
        ]
        return named, place[which]

    def likelihood(self, place: int) -> Likelihood:
        """That of one finding, as `watchstep_rules.rule.likelihood` gives it; the finding is not built."""
        row = int(self._hits.rows[place])
        return int(self._block.step[row]), self._rank(place), int(self._block.worker[row])

    def take(self, places: NDArray[np.intp]) -> FindingRows:
        """Some of them, in that order."""
        return FindingRows(self._rule, self._block, self._hits.take(places), self._words, self._finish)

    def __len__(self) -> int:
        return len(self._hits)

    @overload
    def __getitem__(self, place: int) -> Finding: ...

    @overload
    def __getitem__(self, place: slice) -> FindingRows: ...

    def __getitem__(self, place: int | slice) -> Finding | FindingRows:
        if isinstance(place, slice):
            return self.take(np.arange(len(self))[place])
        hits = self._hits
        row, value, threshold = (
            int(hits.rows[place]),
            float(hits.values[place]),
            float(hits.thresholds[place]),
        )
        message = self._words(row, value, threshold)
        finding = finding_at(self._rule, self._block, row, value=value, threshold=threshold, message=message)
        if self._is_first(place):
            finding = finding.model_copy(update={"cause_rank": self._rank(place)})
        return finding if self._finish is None else self._finish(finding, row)

    def __iter__(self) -> Iterator[Finding]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __repr__(self) -> str:
        return f"FindingRows({self._rule!r}, {len(self)} findings)"

    def _rank(self, place: int) -> tuple[int, int]:
        phase, order = cause_rank(self._block.info(int(self._hits.rows[place])))
        return phase, -1 if self._is_first(place) else order

    def _is_first(self, place: int) -> bool:
        return self._hits.is_first is not None and bool(self._hits.is_first[place])


def steps_of(findings: Sequence[Finding]) -> NDArray[np.int64]:
    """The step of each finding, int64 of shape (n,)."""
    if isinstance(findings, FindingRows):
        return findings.steps
    return np.array([finding.step for finding in findings], np.int64)


def likelihood_of(findings: Sequence[Finding], place: int) -> Likelihood:
    """The likelihood of one of some findings."""
    return findings.likelihood(place) if isinstance(findings, FindingRows) else likelihood(findings[place])


def taken(findings: Sequence[Finding], places: NDArray[np.intp]) -> Sequence[Finding]:
    """Some findings, in that order."""
    if isinstance(findings, FindingRows):
        return findings.take(places)
    return [findings[place] for place in places.tolist()]
