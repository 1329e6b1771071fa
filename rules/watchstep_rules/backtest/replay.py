"""Replay: evaluate recorded rows again, evaluation by evaluation, as the service does.

Rows come from segments in the order of the journal, or by their steps if there is no journal. Memory is bounded in both cases.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from watchstep.errors import FormatError, NotFoundError
from watchstep.format import segment
from watchstep.format.block import Block, BlockMemory, concatenate
from watchstep.format.journal import JournalEvaluation, JournalSegment
from watchstep.format.layout import JOURNALS, SEGMENTS, SegmentKey
from watchstep.format.tensors import SAVED
from watchstep.reading.budget import OverBudgetError, ReadBudget
from watchstep.reading.columns import Selection
from watchstep.reading.index import RunIndex, prefetch, readers_of
from watchstep.reading.run import Run
from watchstep.reading.run_documents import count_parts, read_journal
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase, Transition, coalesce
from watchstep_rules.engine.judge import JudgingLimits, RuleHealth, RuleMemory, Verdict, judge_set
from watchstep_rules.engine.rule_inputs import (
    History,
    JudgingProgress,
    Lookback,
    RuleInputs,
    canonical,
    joined,
    over_one_catalogue,
    trimmed,
)
from watchstep_rules.engine.saved_tensors import SavedTensors
from watchstep_rules.rule import Finding

ROWS = 500_000
"""Approximate number of rows that are read at once: about 250 MB."""

_MOST_ROWS = 500_000
"""Limit of the rows of one evaluation of a journal; a service evaluates fewer at once."""

_SECONDS, MEGABYTES = 600, 1024
"""Limits of reading a range of steps, and of the memory of the rows that rules look back to: a writer chooses how many rows a step has."""

_MEGABYTE = 1024 * 1024

_OBJECTS = 8
"""Saved objects of one evaluation, if a part has several steps with such objects. Far below the limits of an evaluation."""

_CACHED_RANGES = 2
"""Ranges that are cached: the current one, and one for a late worker."""


def _unhurried() -> ReadBudget:
    return ReadBudget(_SECONDS, MEGABYTES)


class StepReader:
    """Reads an attempt by ranges of steps, from whichever objects contain its rows. Not thread-safe.

    Args:
        index: the run's index, which is refreshed.
        attempt: the attempt.
        budget: returns the budget of reading one range.
    """

    def __init__(self, index: RunIndex, attempt: str, budget: Callable[[], ReadBudget] = _unhurried) -> None:
        self._index, self._attempt, self._budget = index, attempt, budget
        objects = [located.object for located in index.objects(attempt)]
        self.first = min((entry.first for entry in objects), default=0)
        self.last = max((entry.last for entry in objects), default=-1)
        steps = self.last - self.first + 1
        self._width = max(1, ROWS * steps // max(1, sum(entry.rows for entry in objects)))
        self._cached: OrderedDict[int, Block] = OrderedDict()

    def chunks(self, first: int = 0) -> Iterator[tuple[Block, int]]:
        """Yield (rows in canonical order, their last step) for consecutive ranges of steps, starting at ``first``.

        Raises:
            OverBudgetError: one step has more rows than the budget allows, or reading a range takes too long.
        """
        start, width = max(first, self.first), self._width
        while start <= self.last:
            last, budget = min(self.last, start + width - 1), self._budget()
            try:
                block = self._read(start, last, budget)
            except OverBudgetError as error:
                if not budget.remaining_seconds:
                    raise
                if start == last:
                    raise OverBudgetError(
                        f"the rows of step {start} take more than {MEGABYTES} MiB", "leave the run out"
                    ) from error
                # Its steps have more rows than most. In large steps, because a writer chooses the range of steps as well.
                width = max(1, (last - start + 1) // 16)
                continue
            yield block.ordered(), last
            start, width = last + 1, min(self._width, 2 * width)

    def rows_of(self, rank: int, first: int, last: int) -> Block:
        """Rows of one rank at steps ``first`` to ``last``, in canonical order.

        Raises:
            OverBudgetError: a range that contains them has more rows than the budget allows.
        """
        parts = []
        for number in range(first // self._width, last // self._width + 1):
            block = self._range(number)
            chosen = (block.worker == rank) & (block.step >= first) & (block.step <= last)
            parts.append(block.where(chosen))
        return concatenate(parts).ordered()

    def _range(self, number: int) -> Block:
        if number not in self._cached:
            while len(self._cached) >= _CACHED_RANGES:
                self._cached.popitem(last=False)
            first = number * self._width
            self._cached[number] = self._read(first, first + self._width - 1, self._budget())
        self._cached.move_to_end(number)
        return self._cached[number]

    def _read(self, first: int, last: int, budget: ReadBudget) -> Block:
        want = Selection((), None, first, last)
        index = self._index.snapshot(budget)
        return index.consistently(lambda: concatenate(index.blocks(self._attempt, want)))


NO_JOURNAL = "the attempt has no journal of a service; all workers are treated as being on time"


class OrderLostError(Exception):
    """The order in which rows were evaluated is no longer known.

    Args:
        what: the reason, in a few words.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


@dataclass(frozen=True)
class Recorded:
    """An attempt on a store.

    Attributes:
        run: the run.
        store: the store, rooted at the run.
        attempt: the name of the attempt.
    """

    run: Run
    store: Store
    attempt: str


@dataclass(frozen=True)
class _Rest:
    """Rows from step ``first`` on, and of each rank in ``after`` those after its step."""

    first: int
    after: dict[int, int]


_ALL = _Rest(0, {})


def recorded_attempts(run: Run, store: Store) -> list[Recorded]:
    """Attempts with rows, oldest first, then attempts that have only a journal."""
    written = run.attempts
    without_rows = sorted(set(store.folders(JOURNALS)) - set(written))
    return [Recorded(run, store, attempt) for attempt in (*written, *without_rows)]


def arrivals_by_steps(recorded: Recorded, rest: _Rest = _ALL) -> Iterator[Arrival]:
    """Arrivals by step, all workers at once. The watermark passes each arrival at once; the clock is the time of the newest row.

    Args:
        recorded: the attempt.
        rest: only these rows.
    """
    clock_ns = 0
    for block, last in StepReader(recorded.run.index.judged(), recorded.attempt).chunks(rest.first):
        rows = block.where(_is_after(block, rest.after)) if rest.after else block
        if len(rows):
            clock_ns = max(clock_ns, int(rows.time_ns.max()))
            for part, end in in_parts(canonical(rows), last):
                yield Arrival(clock_ns, end, (part,))


def in_parts(rows: Block, last: int) -> Iterator[tuple[Block, int]]:
    """Yield rows in parts of whole steps with few saved objects each, because an evaluation reads a limited number of them.

    Args:
        rows: rows in canonical order.
        last: the last step that they cover.

    Yields:
        The rows of a part, and the last step that it covers. All rows, if they are about few saved objects.
    """
    marks = np.flatnonzero(rows.mask_of_tensors([SAVED in info.collections for info in rows.catalogue]))
    start = 0
    if len(marks) > _OBJECTS:
        steps, counts = np.unique(rows.step[marks], return_counts=True)
        together = 0
        for step, count in zip(steps.tolist(), counts.tolist(), strict=True):
            if together and together + count > _OBJECTS:
                end = int(np.searchsorted(rows.step, step))  # before this step
                yield rows.take(np.arange(start, end)), step - 1
                start, together = end, 0
            together += count
    yield (rows if not start else rows.take(np.arange(start, len(rows)))), last


def _is_after(block: Block, after: dict[int, int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    ranks = np.array(sorted(after), np.int64)
    steps = np.array([after[rank] for rank in ranks.tolist()], np.int64)
    places = np.searchsorted(ranks[:-1], block.worker)
    chosen: np.ndarray[tuple[int], np.dtype[np.bool_]] = (ranks[places] != block.worker) | (
        block.step > steps[places]
    )
    return chosen


def arrivals_of_journal(recorded: Recorded, notes: list[str]) -> Iterator[Arrival]:
    """The arrivals of each evaluation, in the journal's order, then the rows that the service did not evaluate.

    Args:
        recorded: the attempt.
        notes: differences from the live run are appended.

    Raises:
        OrderLostError: there is no journal, it is damaged, it names more rows at once than a service evaluates, or the rows of a missing
            segment cannot be identified.
        StoreError: the store cannot be read.
    """
    if not count_parts(recorded.store, recorded.attempt):
        raise OrderLostError(NO_JOURNAL)
    fetcher = _Fetcher(recorded)
    arrival = Arrival(0, -1)
    try:
        for arrival in _replayed(recorded, fetcher):
            yield arrival
    except FormatError as error:
        raise OrderLostError(f"{error.what}; rows are evaluated in the order of their steps") from error
    later_rows = 0
    for later in arrivals_by_steps(recorded, fetcher.rest()):
        later_rows += sum(len(block) for block in later.blocks)
        watermark = max(arrival.watermark, later.watermark)
        yield Arrival(max(arrival.clock_ns, later.clock_ns), watermark, later.blocks)
    if later_rows:
        notes.append(
            f"{later_rows} rows after the end of the journal, which the service did not evaluate, are evaluated in the order of their steps"
        )


def _replayed(recorded: Recorded, fetcher: _Fetcher) -> Iterator[Arrival]:
    """Segments are prefetched across evaluations. They are decoded one by one, because a small object may contain a million rows."""

    def items() -> Iterator[JournalEvaluation | JournalSegment]:
        for evaluation in read_journal(recorded.store, recorded.attempt):
            yield from evaluation.segments
            yield evaluation

    def work(
        item: JournalEvaluation | JournalSegment,
    ) -> tuple[JournalEvaluation | JournalSegment, bytes | None]:
        return item, None if isinstance(item, JournalEvaluation) else fetcher.fetched(item)

    blocks: list[Block] = []
    for item, data in prefetch(work, items(), readers_of(recorded.store)):
        if isinstance(item, JournalEvaluation):
            yield Arrival(item.at_ns, item.watermark, tuple(blocks), item.ended)
            blocks = []
            continue
        block = fetcher.rows_of_missing(item) if data is None else fetcher.decoded(item, data)
        fetcher.record(block)
        blocks.append(block)
        if sum(len(block) for block in blocks) > _MOST_ROWS:
            raise OrderLostError(
                f"an evaluation of the journal has more than {_MOST_ROWS:,} rows; rows are evaluated in the order of their steps"
            )


class _Fetcher:
    """Reads segments as they were evaluated: from their own objects, or their rows from compacted segments."""

    def __init__(self, recorded: Recorded) -> None:
        self._store = recorded.store
        self._existing = {entry.key for entry in recorded.store.entries(f"{SEGMENTS}{recorded.attempt}/")}
        self._unread = set(self._existing)
        self._reader = StepReader(recorded.run.index.judged(), recorded.attempt)
        self._reached: dict[int, int] = {}

    def record(self, block: Block) -> None:
        """Record rows as evaluated."""
        ranks, places = np.unique(block.worker, return_inverse=True)
        last = np.full(len(ranks), -1, np.int64)
        np.maximum.at(last, places, block.step)
        for rank, step in zip(ranks.tolist(), last.tolist(), strict=True):
            self._reached[rank] = max(self._reached.get(rank, -1), step)

    def rest(self) -> _Rest:
        """Rows that no evaluation received: those of each rank after its last evaluated step."""
        starts = [min(self._reached.values(), default=-1) + 1]
        for path in self._unread:
            with suppress(FormatError):  # a foreign object below stats/, which no reader reads
                starts.append(SegmentKey.parse(path).first)
        return _Rest(min(starts), self._reached)

    def fetched(self, entry: JournalSegment) -> bytes | None:
        """The object of a segment; None if it is missing."""
        path = entry.key.path
        self._unread.discard(path)
        if path not in self._existing:
            return None
        try:
            return self._store.get(path, limit=segment.MAX_BYTES)
        except NotFoundError:
            return None

    def decoded(self, entry: JournalSegment, data: bytes) -> Block:
        """The rows of a segment."""
        return canonical(segment.decode(data, entry.key.path))

    def rows_of_missing(self, entry: JournalSegment) -> Block:
        """The rows of a segment whose object is missing, found by rank and step.

        Raises:
            OrderLostError: they cannot be identified, or a range that contains them has too many rows.
        """
        if entry.ranks is None:
            raise OrderLostError(
                f"segment {entry.key.path} is missing; rows are evaluated in the order of their steps"
            )
        parts = []
        for rank in entry.ranks:
            try:
                rows = self._reader.rows_of(rank.rank, rank.first, rank.last)
            except OverBudgetError as error:
                raise OrderLostError(f"segment {entry.key.path} is missing; {error.what}") from error
            if len(rows) != rank.rows:
                raise OrderLostError(
                    f"segment {entry.key.path} is missing, and only {len(rows)} of its {rank.rows} rows of rank "
                    f"{rank.rank} were found; rows are evaluated in the order of their steps"
                )
            parts.append(rows)
        return canonical(concatenate(parts))


FINDINGS_KEPT = 1000
"""Limit of findings that are kept of one rule config on one attempt; the rest are counted. The service has the same limit."""


@dataclass(frozen=True)
class Arrival:
    """The input of one evaluation.

    Attributes:
        clock_ns: the tick of the evaluation, nanoseconds since the epoch.
        watermark: the watermark of the evaluation; -1 for none.
        blocks: rows that arrived, each block in canonical order.
        ended: whether no row arrived and the attempt had ended.
    """

    clock_ns: int
    watermark: int
    blocks: tuple[Block, ...] = ()
    ended: bool = False


@dataclass(frozen=True)
class ReplayOutcome:
    """The results of one rule config on an attempt.

    Attributes:
        config: the rule config.
        findings: the first findings, in the order of the rows.
        found: the total number of findings.
        transitions: transitions of the alert.
        health: whether the rule config could be evaluated.
        problem: why it could not.
    """

    config: RuleConfig
    findings: list[Finding]
    found: int
    transitions: list[Transition]
    health: RuleHealth
    problem: str

    @property
    def fired(self) -> list[Transition]:
        """Each transition to firing, with the last cause that the alert named."""
        return [change for change in coalesce(self.transitions) if change.phase is Phase.FIRING]


class _RuleProgress:
    """The state and results of one rule config so far."""

    def __init__(self, config: RuleConfig) -> None:
        self.config = config
        self.memory = RuleMemory()
        self.findings: list[Finding] = []
        self.found = 0
        self.transitions: list[Transition] = []

    def add(self, verdict: Verdict, kept: int) -> None:
        self.memory = verdict.memory
        self.found += len(verdict.findings)
        self.findings += verdict.findings[: max(0, kept - len(self.findings))]
        self.transitions += verdict.transitions

    def outcome(self) -> ReplayOutcome:
        memory = self.memory
        return ReplayOutcome(
            self.config, self.findings, self.found, self.transitions, memory.health, memory.problem
        )


def _continue() -> None:
    """Continue."""


class Replay:
    """Evaluates one attempt by sets of rule configs. It keeps the same earlier rows as the service."""

    def __init__(
        self,
        rule_sets: Sequence[Sequence[RuleConfig]],
        findings_kept: int | None = None,
        saved: Callable[[], SavedTensors] | None = None,
        check_running: Callable[[], None] | None = None,
    ) -> None:
        """Begin an attempt.

        Args:
            rule_sets: each set is evaluated like the rules of a run; inhibition acts within a set.
            findings_kept: limit of findings kept of each rule config; `FINDINGS_KEPT` by default. The rest are counted.
            saved: returns a reader of full tensors for each evaluation; by default they cannot be read.
            check_running: is called before each rule config; an exception that it raises ends the replay.
        """
        self._check_running = check_running or _continue
        self._saved = saved or (lambda: SavedTensors(None))
        self._sets = [[_RuleProgress(config) for config in configs] for configs in rule_sets]
        self._findings_kept = FINDINGS_KEPT if findings_kept is None else findings_kept
        self._lookback = Lookback.of(config for configs in rule_sets for config in configs)
        self._history = History.empty()
        self._position = 0
        self._watermark = -1
        self.rows = 0
        """Number of rows evaluated so far."""

    def evaluate(self, arrival: Arrival) -> None:
        """Run one evaluation.

        Raises:
            OverBudgetError: the rows that the next evaluation looks back to take too much memory.
        """
        parts = list(enumerate(arrival.blocks, self._position))
        arrived = joined(parts, History.empty()).block
        progress = JudgingProgress(self._watermark, arrival.watermark, arrival.clock_ns, arrival.ended)
        rows = RuleInputs(*over_one_catalogue(self._history.block, arrived), progress, self._saved())
        limits = JudgingLimits(check_running=self._check_running)
        for rule_set in self._sets:
            verdicts = judge_set([(rule.config, rule.memory) for rule in rule_set], rows, limits)
            for rule, verdict in zip(rule_set, verdicts, strict=True):
                rule.add(verdict, self._findings_kept)
        self._history = trimmed(joined(parts, self._history), self._lookback, arrival.watermark)
        if BlockMemory().of(self._history.block) > MEGABYTES * _MEGABYTE:
            raise OverBudgetError(
                f"the rows that the rules look back to take more than {MEGABYTES} MiB",
                "use rules with a shorter lookback",
            )
        self._position += len(parts)
        self._watermark = arrival.watermark
        self.rows += len(arrived)

    def outcomes(self) -> list[list[ReplayOutcome]]:
        """The results of each rule config of each set, in their order."""
        return [[rule.outcome() for rule in rule_set] for rule_set in self._sets]
