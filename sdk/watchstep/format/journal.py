"""The journal: the order in which a service evaluated the segments of an attempt, its clock and the last step.

A rule has the same result for the same rows in the same order with the same ticks. So its result for a finished run
follows from the journal and the rows. The journal is written in parts, each atomically and never changed.
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
"""Maximum size of a part in bytes."""

_MAX_MEMORY = 384 * 1024 * 1024

MAX_EVALUATIONS = 1000
MAX_SEGMENTS = 20_000
"""Maximum number of segments in a part, unless a single evaluation has more."""

MAX_RANKS = 50_000
"""Maximum number of ranks of all segments of a part, with the same exception. 2.5 million took 33 s to write."""

_INT64 = 2**63


@dataclass(frozen=True)
class RankRows:
    """Rows of one rank in a segment: its first and last step, and the number of rows.

    A rank's step is never split between segments, so these can be found in any layout of the rows.
    """

    rank: int
    first: int
    last: int
    rows: int


@dataclass(frozen=True)
class JournalSegment:
    """An evaluated segment.

    Attributes:
        key: Key of the segment.
        ranks: Ranks with rows in the segment; empty for a segment without rows, None if unknown.
    """

    key: SegmentKey
    ranks: tuple[RankRows, ...] | None


@dataclass(frozen=True)
class JournalEvaluation:
    """One evaluation.

    Attributes:
        tick: Number of the evaluation, ascending within a run. An attempt has a subset.
        at_ns: The clock of the rules in nanoseconds since the epoch.
        watermark: The last step that was complete after the evaluation; -1 without one.
        ended: Whether no row had arrived and the attempt had ended, so that silence was not evaluated.
        segments: The segments that arrived, in order.
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
        attempt: The attempt.
        number: Number of the part, from 0.
        evaluations: The evaluations in order; at least one.
    """

    attempt: str
    number: int
    evaluations: tuple[JournalEvaluation, ...]


def first_part(evaluations: Iterable[JournalEvaluation]) -> tuple[JournalEvaluation, ...]:
    """Return the first evaluations, as many as fit into one part."""
    taken: list[JournalEvaluation] = []
    segments = ranks = 0
    for evaluation in evaluations:
        segments += len(evaluation.segments)
        ranks += sum(len(entry.ranks or ()) for entry in evaluation.segments)
        is_full = len(taken) >= MAX_EVALUATIONS or segments > MAX_SEGMENTS or ranks > MAX_RANKS
        if taken and is_full:
            break
        taken.append(evaluation)
    return tuple(taken)


def encode(part: JournalPart) -> bytes:
    """Encode a part."""
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
    """Decode a part.

    Args:
        data: Content of the part.
        name: Name of the part for error messages.

    Raises:
        FormatError: The bytes are not a part, or have another version.
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
            f"{name} is not a part of a journal ({error})", "the run can be evaluated without its journal"
        ) from error


def check_order(evaluations: Sequence[JournalEvaluation], name: str) -> None:
    """Check that evaluations can have been in this order.

    Raises:
        FormatError: Ticks or watermarks decrease, or there is no evaluation.
    """
    pairs = pairwise(evaluations)
    if not evaluations or any(a.tick >= b.tick or a.watermark > b.watermark for a, b in pairs):
        raise FormatError(
            f"{name} has evaluations that are not in order", "the run can be evaluated without its journal"
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
            raise ValueError(f"segment {key.path} has invalid steps")
        yield JournalSegment(key, rank_rows)


def _number(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _INT64:
        raise ValueError(f"{str(value)[:80]!r} is not a valid number")
    return value
