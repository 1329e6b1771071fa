"""The journal: in which order a service judged the segments of an attempt, by which clock, and up to which step.

Rules judge the same rows in the same order with the same ticks alike. So what a rule would have said of a finished run
follows from the journal and the rows. It is written in parts, each whole and never changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from watchstep.errors import BadNameError, FormatError
from watchstep.format.documents import parse_json
from watchstep.format.layout import SCHEMA_VERSION, SegmentKey, WriterId, check_name, check_schema

MAX_BYTES = 64 * 1024 * 1024
"""A larger part is none."""

_MAX_MEMORY = 384 * 1024 * 1024

MOST_EVALUATIONS = 1000
MOST_SEGMENTS = 20_000
"""A part ends after so many, but for one evaluation that has more."""

_INT64 = 2**63


@dataclass(frozen=True)
class RankRows:
    """Rows of one rank in a segment: its first and last step, and how many rows.

    A rank's step is never split between segments, so these are found again wherever the rows lie.
    """

    rank: int
    first: int
    last: int
    rows: int


@dataclass(frozen=True)
class JournalSegment:
    """A segment that was judged.

    Attributes:
        key: its name.
        ranks: whose rows it held; empty where it held none, None where nobody noted it.
    """

    key: SegmentKey
    ranks: tuple[RankRows, ...] | None


@dataclass(frozen=True)
class JournalEvaluation:
    """One evaluation that judged.

    Attributes:
        tick: its number; ascending within a run, of which an attempt has some.
        at_ns: the clock that rules were given, nanoseconds since the epoch.
        watermark: the last step that was complete after it; -1 for none.
        ended: no row came and the attempt had ended, so that silence was not judged.
        segments: what arrived, in order.
    """

    tick: int
    at_ns: int
    watermark: int
    ended: bool
    segments: tuple[JournalSegment, ...]


@dataclass(frozen=True)
class JournalPart:
    """One object of a journal.

    Attributes:
        attempt: whose.
        number: its place, from 0.
        evaluations: in order; at least one.
    """

    attempt: str
    number: int
    evaluations: tuple[JournalEvaluation, ...]


def first_part(evaluations: Iterable[JournalEvaluation]) -> tuple[JournalEvaluation, ...]:
    """As many of the evaluations as go into one part."""
    taken: list[JournalEvaluation] = []
    segments = 0
    for evaluation in evaluations:
        segments += len(evaluation.segments)
        if taken and (len(taken) >= MOST_EVALUATIONS or segments > MOST_SEGMENTS):
            break
        taken.append(evaluation)
    return tuple(taken)


def encode(part: JournalPart) -> bytes:
    """A part's bytes."""
    writers: dict[WriterId, int] = {}
    evaluations = []
    for evaluation in part.evaluations:
        segments = []
        for entry in evaluation.segments:
            key = entry.key
            place = writers.setdefault(key.writer, len(writers))
            ranks = None if entry.ranks is None else [[r.rank, r.first, r.last, r.rows] for r in entry.ranks]
            segments.append([place, key.seq, key.first, key.last, ranks])
        evaluations.append(
            [evaluation.tick, evaluation.at_ns, evaluation.watermark, evaluation.ended, segments]
        )
    document = {
        "schema": SCHEMA_VERSION,
        "attempt": part.attempt,
        "number": part.number,
        "writers": [[who.node, who.writer] for who in writers],
        "evaluations": evaluations,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def decode(data: bytes, name: str) -> JournalPart:
    """Read a part.

    Args:
        data: its bytes.
        name: what to call it in an error.

    Raises:
        FormatError: it is none, or of another version.
    """
    try:
        document = parse_json(data, _MAX_MEMORY)
        check_schema(name, _number(document["schema"]))
        attempt = check_name("attempt", document["attempt"])
        writers = [
            WriterId(attempt, check_name("node", node), check_name("writer", writer))
            for node, writer in document["writers"]
        ]
        evaluations = tuple(_evaluation(entry, writers) for entry in document["evaluations"])
        check_order(evaluations, name)
        return JournalPart(attempt, _number(document["number"]), evaluations)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, BadNameError) as error:
        raise FormatError(
            f"{name}: not a part of a journal ({error})", "the run can still be judged without its journal"
        ) from error


def check_order(evaluations: Sequence[JournalEvaluation], name: str) -> None:
    """Refuse evaluations that cannot have been in this order.

    Raises:
        FormatError: ticks or watermarks go back, or there is no evaluation.
    """
    pairs = pairwise(evaluations)
    if not evaluations or any(a.tick >= b.tick or a.watermark > b.watermark for a, b in pairs):
        raise FormatError(
            f"{name}: its evaluations are in no order", "the run can still be judged without its journal"
        )


def _evaluation(entry: Any, writers: list[WriterId]) -> JournalEvaluation:
    tick, at_ns, watermark, ended, segments = entry
    if type(ended) is not bool:
        raise ValueError(f"ended is {str(ended)[:80]!r}")
    return JournalEvaluation(
        _number(tick), _number(at_ns), _number(watermark, -1), ended, tuple(_segments(segments, writers))
    )


def _segments(rows_of_segments: Any, writers: list[WriterId]) -> Iterator[JournalSegment]:
    for place, seq, first, last, ranks in rows_of_segments:
        key = SegmentKey(writers[_number(place)], _number(seq), _number(first), _number(last))
        rank_rows = None if ranks is None else tuple(RankRows(*map(_number, entry)) for entry in ranks)
        if first > last or any(not first <= rows.first <= rows.last <= last for rows in rank_rows or ()):
            raise ValueError(f"segment {key.path}: steps that it cannot hold")
        yield JournalSegment(key, rank_rows)


def _number(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _INT64:
        raise ValueError(f"{str(value)[:80]!r} is no number that may stand here")
    return value
