"""Replay: judge recorded rows again, evaluation by evaluation, as the service does.

Rows come from segments in the order of the journal, or by their steps if there is no journal. Memory is bounded in both cases.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from watchstep.errors import FormatError, NotFoundError
from watchstep.format import segment
from watchstep.format.block import Block, concatenate
from watchstep.format.journal import JournalEvaluation, JournalSegment
from watchstep.format.layout import JOURNALS, SEGMENTS, SegmentKey
from watchstep.reading.columns import Want
from watchstep.reading.index import RunIndex, prefetch, readers_of
from watchstep.reading.run import Run
from watchstep.reading.run_documents import count_parts, read_journal
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.alert import Phase, Transition, as_told
from watchstep_rules.engine.history import History, canonical, joined, over_one_catalogue, trimmed
from watchstep_rules.engine.judge import RuleHealth, RuleMemory, Verdict, judge_set
from watchstep_rules.engine.rule_inputs import JudgingProgress, Lookback, Prepared
from watchstep_rules.rule import Finding

ROWS = 500_000
"""Rows that are read at once, about: some 250 MB."""

_HELD = 2
"""Ranges that are kept: the one that is being read, and one for a worker that is late."""


class StepReader:
    """Reads an attempt by ranges of steps, wherever its rows lie. Not thread-safe."""

    def __init__(self, index: RunIndex, attempt: str) -> None:
        self._index, self._attempt = index, attempt
        objects = [located.object for located in index.objects(attempt)]
        self.first = min((held.first for held in objects), default=0)
        self.last = max((held.last for held in objects), default=-1)
        steps = self.last - self.first + 1
        self._width = max(1, ROWS * steps // max(1, sum(held.rows for held in objects)))
        self._held: OrderedDict[int, Block] = OrderedDict()

    def chunks(self, first: int = 0) -> Iterator[tuple[Block, int]]:
        """(rows in canonical order, their last step) of one range of steps after the other, from a step on."""
        for start in range(max(first, self.first), self.last + 1, self._width):
            last = min(self.last, start + self._width - 1)
            yield self._read(start, last).ordered(), last

    def rows_of(self, rank: int, first: int, last: int) -> Block:
        """Rows of one rank, in canonical order, from a first step to a last."""
        parts = []
        for number in range(first // self._width, last // self._width + 1):
            block = self._range(number)
            chosen = (block.worker == rank) & (block.step >= first) & (block.step <= last)
            parts.append(block.where(chosen))
        return concatenate(parts).ordered()

    def _range(self, number: int) -> Block:
        if number not in self._held:
            while len(self._held) >= _HELD:
                self._held.popitem(last=False)
            self._held[number] = self._read(number * self._width, (number + 1) * self._width - 1)
        self._held.move_to_end(number)
        return self._held[number]

    def _read(self, first: int, last: int) -> Block:
        want = Want((), None, first, last)
        return self._index.consistently(lambda: concatenate(self._index.blocks(self._attempt, want)))


NO_JOURNAL = "no service has left a journal; all workers are taken to have been in time"


class OrderLostError(Exception):
    """The order in which rows were judged is not known any more.

    Args:
        what: why, in a few words.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


@dataclass(frozen=True)
class Recorded:
    """An attempt on a store.

    Attributes:
        run: the run.
        store: seen from the run.
        attempt: its name.
    """

    run: Run
    store: Store
    attempt: str


@dataclass(frozen=True)
class _Rest:
    """Rows from a first step on; of each rank those after a step."""

    first: int
    after: dict[int, int]


_ALL = _Rest(0, {})


def recorded_attempts(run: Run, store: Store) -> list[Recorded]:
    """Attempts with rows, oldest first; then those that a service only waited for."""
    written = run.attempts
    waited_for = sorted(set(store.folders(JOURNALS)) - set(written))
    return [Recorded(run, store, attempt) for attempt in (*written, *waited_for)]


def arrivals_by_steps(recorded: Recorded, rest: _Rest = _ALL) -> Iterator[Arrival]:
    """Rows by their steps, all workers at once, each arrival sealed at once; the clock is that of the newest row.

    Args:
        recorded: the attempt.
        rest: only these rows.
    """
    clock_ns = 0
    for block, last in StepReader(recorded.run.index, recorded.attempt).chunks(rest.first):
        rows = block.where(_is_after(block, rest.after)) if rest.after else block
        if len(rows):
            clock_ns = max(clock_ns, int(rows.time_ns.max()))
            yield Arrival(clock_ns, last, (canonical(rows),))


def _is_after(block: Block, after: dict[int, int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    chosen = np.ones(len(block), np.bool_)
    for rank, step in after.items():
        chosen &= (block.worker != rank) | (block.step > step)
    return chosen


def arrivals_of_journal(recorded: Recorded, notes: list[str]) -> Iterator[Arrival]:
    """What each evaluation was given, in the journal's order; rows that no service judged come last.

    Args:
        recorded: the attempt.
        notes: what stands against this being all that was judged is added.

    Raises:
        OrderLostError: there is no journal, it is damaged, or rows are not to be told apart any more.
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
        raise OrderLostError(f"{error.what}; rows are taken by their steps") from error
    later_rows = 0
    for later in arrivals_by_steps(recorded, fetcher.rest()):
        later_rows += sum(len(block) for block in later.blocks)
        sealed = max(arrival.sealed, later.sealed)
        yield Arrival(max(arrival.clock_ns, later.clock_ns), sealed, later.blocks)
    if later_rows:
        notes.append(
            f"{later_rows} rows after the journal's end, not judged by the service, are taken by their steps"
        )


def _replayed(recorded: Recorded, fetcher: _Fetcher) -> Iterator[Arrival]:
    """Segments are fetched a few ahead, across evaluations."""

    def items() -> Iterator[JournalEvaluation | JournalSegment]:
        for evaluation in read_journal(recorded.store, recorded.attempt):
            yield from evaluation.segments
            yield evaluation

    def work(item: JournalEvaluation | JournalSegment) -> JournalEvaluation | JournalSegment | Block:
        return item if isinstance(item, JournalEvaluation) else fetcher.fetched(item)

    blocks: list[Block] = []
    for item in prefetch(work, items(), readers_of(recorded.store)):
        if isinstance(item, JournalEvaluation):
            yield Arrival(item.at_ns, item.watermark, tuple(blocks), item.ended)
            blocks = []
            continue
        block = fetcher.found_again(item) if isinstance(item, JournalSegment) else item
        fetcher.note(block)
        blocks.append(block)


class _Fetcher:
    """Segments as they were judged: their own objects, or their rows in what a compaction made of them."""

    def __init__(self, recorded: Recorded) -> None:
        self._store = recorded.store
        self._there = {entry.key for entry in recorded.store.entries(f"{SEGMENTS}{recorded.attempt}/")}
        self._unread = set(self._there)
        self._reader = StepReader(recorded.run.index, recorded.attempt)
        self._reached: dict[int, int] = {}

    def note(self, block: Block) -> None:
        """Rows that have been judged."""
        for rank in map(int, np.unique(block.worker)):
            last = int(block.step[block.worker == rank].max())
            self._reached[rank] = max(self._reached.get(rank, -1), last)

    def rest(self) -> _Rest:
        """Rows that no evaluation was given: of each rank those after its last step that was judged."""
        starts = [min(self._reached.values(), default=-1) + 1]
        for path in self._unread:
            with suppress(FormatError):  # another's object below stats/, which no reader reads
                starts.append(SegmentKey.parse(path).first)
        return _Rest(min(starts), self._reached)

    def fetched(self, held: JournalSegment) -> Block | JournalSegment:
        """A segment's rows; the segment where its object is gone."""
        path = held.key.path
        self._unread.discard(path)
        if path not in self._there:
            return held
        try:
            return canonical(segment.decode(self._store.get(path, limit=segment.MAX_BYTES), path))
        except NotFoundError:
            return held

    def found_again(self, held: JournalSegment) -> Block:
        """The rows of a segment that is gone, by their ranks and steps."""
        if held.ranks is None:
            raise OrderLostError(f"segment {held.key.path} is gone; rows are taken by their steps")
        parts = []
        for rank in held.ranks:
            rows = self._reader.rows_of(rank.rank, rank.first, rank.last)
            if len(rows) != rank.rows:
                raise OrderLostError(
                    f"segment {held.key.path} is gone, and {len(rows)} of its {rank.rows} rows of rank "
                    f"{rank.rank} are found; rows are taken by their steps"
                )
            parts.append(rows)
        return canonical(concatenate(parts))


FINDINGS_KEPT = 1000
"""Findings of one rule config on one attempt that are kept; the rest are counted. The service keeps as many."""


@dataclass(frozen=True)
class Arrival:
    """What one evaluation is given.

    Attributes:
        clock_ns: its tick, nanoseconds since the epoch.
        sealed: the last sealed step after it; -1 for none.
        blocks: rows that arrived, each block in canonical order.
        ended: no row came, and the attempt had ended.
    """

    clock_ns: int
    sealed: int
    blocks: tuple[Block, ...] = ()
    ended: bool = False


@dataclass(frozen=True)
class ReplayOutcome:
    """What one rule config says of an attempt.

    Attributes:
        config: the rule config.
        findings: the first of them, in the order of the rows.
        found: how many there were.
        transitions: changes of its alert.
        health: whether it could be evaluated.
        problem: why not.
    """

    config: RuleConfig
    findings: list[Finding]
    found: int
    transitions: list[Transition]
    health: RuleHealth
    problem: str

    @property
    def fired(self) -> list[Transition]:
        """When the alert began to fire, each time, with what it came to name as the cause."""
        return [change for change in as_told(self.transitions) if change.phase is Phase.FIRING]


class _Told:
    """What one rule config has said so far."""

    def __init__(self, config: RuleConfig) -> None:
        self.config = config
        self.memory = RuleMemory()
        self.findings: list[Finding] = []
        self.found = 0
        self.transitions: list[Transition] = []

    def take(self, verdict: Verdict, kept: int) -> None:
        self.memory = verdict.memory
        self.found += len(verdict.findings)
        self.findings += verdict.findings[: max(0, kept - len(self.findings))]
        self.transitions += verdict.transitions

    def outcome(self) -> ReplayOutcome:
        memory = self.memory
        return ReplayOutcome(
            self.config, self.findings, self.found, self.transitions, memory.health, memory.problem
        )


class Replay:
    """One attempt, judged by sets of rule configs. Of earlier rows it keeps what the service keeps."""

    def __init__(self, rule_sets: Sequence[Sequence[RuleConfig]], findings_kept: int | None = None) -> None:
        """Begin an attempt.

        Args:
            rule_sets: each is judged as the rules of a run are: an alert may keep others of its set quiet.
            findings_kept: of each rule config, `FINDINGS_KEPT` where it is left out; the rest are counted.
        """
        self._sets = [[_Told(config) for config in configs] for configs in rule_sets]
        self._kept = FINDINGS_KEPT if findings_kept is None else findings_kept
        self._reach = Lookback.of(config for configs in rule_sets for config in configs)
        self._history = History.empty()
        self._position = 0
        self._sealed = -1
        self.rows = 0
        """Rows that have come so far."""

    def evaluate(self, arrival: Arrival) -> None:
        """Judge what came."""
        parts = list(enumerate(arrival.blocks, self._position))
        arrived = joined(parts, History.empty()).block
        progress = JudgingProgress(self._sealed, arrival.sealed, arrival.clock_ns, arrival.ended)
        rows = Prepared(*over_one_catalogue(self._history.block, arrived), progress)
        for rule_set in self._sets:
            verdicts = judge_set([(told.config, told.memory) for told in rule_set], rows)
            for told, verdict in zip(rule_set, verdicts, strict=True):
                told.take(verdict, self._kept)
        self._history = trimmed(joined(parts, self._history), self._reach, arrival.sealed)
        self._position += len(parts)
        self._sealed = arrival.sealed
        self.rows += len(arrived)

    def outcomes(self) -> list[list[ReplayOutcome]]:
        """What each rule config of each set said, in their order."""
        return [[told.outcome() for told in rule_set] for rule_set in self._sets]
