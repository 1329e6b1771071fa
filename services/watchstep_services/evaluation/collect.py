"""The first phase of an evaluation: find and read its segments. No transaction is open meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from watchstep.errors import FormatError, NotFoundError, StoreError
from watchstep.format import segment
from watchstep.format.block import Block, BlockMemory
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.format.segment_checks import check_steps, whole
from watchstep.format.tensors import MAX_WORD_BYTES, TensorInfo
from watchstep.store.store import Store
from watchstep_rules.custom.sql.rule import Sql
from watchstep_rules.engine.rule_inputs import canonical
from watchstep_services.core.settings import nanoseconds
from watchstep_services.db.models import Attempt, RunRow
from watchstep_services.evaluation import inbox as cursors
from watchstep_services.evaluation.inbox import (
    Gap,
    GapTimeout,
    Inbox,
    InboxEntry,
    Plan,
    make_plan,
    open_inbox,
)
from watchstep_services.evaluation.ticks import load_configs
from watchstep_services.evaluation.unfinished_reads import ReadingGuard
from watchstep_services.runs.attempts import MOST_RANKS
from watchstep_services.runs.claim import Claim, FencedError, renew
from watchstep_services.runs.discovery import discover, listing_due
from watchstep_services.service.context import Service
from watchstep_services.service.judging import is_requested, lookback

SLICE_SECONDS = 5.0
"""Time after which an evaluation reads no more, so that runs with much to read do not delay the others."""

LARGE_ROWS = 100_000
"""Rows after which an evaluation reads no more. If each row is a finding, this takes about 0.4 GB and ten seconds."""

LARGE_PRODUCT = 700_000
"""Rows times rules from which an evaluation may take a second: 25,000 rows for the default rules. Several beside each other delay urgent ones."""

LARGE_QUERIES = 200
"""The same for steps times SQL rules that a recorder requested, with 5 ms for a query."""

LARGE_WORDS = 2 * 1024 * 1024
"""Characters of the words of tensors from which an evaluation is large: rules keep several copies of each name in their states."""

SEVERAL_ROWS = 20_000
"""Rows from which an evaluation takes longer than usual."""

SEGMENT_ROWS = 250_000
"""Limit of the rows of one segment, because a segment is evaluated as a whole. Recorders write at most 200,000, unless one step has more."""

SEGMENT_BINS = 64 * SEGMENT_ROWS
"""Histogram bins of a segment beyond which it is evaluated without histograms: 160 MB. Recorders write some tens for each row."""

WORD_BYTES = 8 * 1024 * 1024
"""Limit of the distinct words of an attempt's tensors together (names, modules, types): 100,000 tensors with words of 80 bytes. Rule
states repeat each name several times."""

_MOST_ERRORS = 3
"""Writers of an attempt with store errors, after which no more of its segments are read."""

_MOST_ABSENT = 32
"""Limit of look-ups of absent segments in one evaluation, separately for writers that were read before and for others."""

_ABSENT_SECONDS = 1.0
"""Time limit of these look-ups, separately for the two kinds of writers."""


@dataclass(frozen=True)
class RuleCosts:
    """How many rules an attempt has, which determines how many rows one evaluation reads.

    Attributes:
        rules: number of rule configs.
        requested: number of those that a recorder requested.
        queries: number of the SQL rules among these.
        histograms: whether a rule reads histograms.
    """

    rules: int = 0
    requested: int = 0
    queries: int = 0
    histograms: bool = True

    @property
    def most_rows(self) -> int:
        """Rows after which an evaluation reads no more. The time of requested rules is limited, so that they have to be done within it."""
        return min(LARGE_ROWS, 2 * LARGE_PRODUCT // max(1, self.requested))


@dataclass
class Collected:
    """Segments of one attempt that were read.

    Attributes:
        attempt: name of the attempt; empty if there was nothing to read.
        cursor: the cursor after these segments.
        blocks: rows of each segment, in journal order.
        corrupt: segments that exist and cannot be read, and why.
        missing: gaps that have timed out.
        waiting: gaps that still block segments.
        more: more segments can be read at once.
        attempts: rows of the run's attempts by name, as of the look-up of the segments.
        calm: at that time no alert of the run fired, and its last evaluation had not failed.
        failing: attempts with a failed last evaluation at that time.
        failed: attempt → why some of its segments could not be read now; the next evaluation retries.
        costs: the rules of the attempt.
    """

    attempt: str
    cursor: dict[WriterId, int]
    blocks: list[tuple[InboxEntry, Block]] = field(default_factory=list)
    corrupt: list[tuple[InboxEntry, str]] = field(default_factory=list)
    missing: list[Gap] = field(default_factory=list)
    waiting: tuple[Gap, ...] = ()
    more: bool = False
    attempts: dict[str, Attempt] = field(default_factory=dict)
    calm: bool = False
    failing: frozenset[str] = frozenset()
    failed: dict[str, str] = field(default_factory=dict)
    costs: RuleCosts = field(default_factory=RuleCosts)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return sum(len(block) for _, block in self.blocks)

    @property
    def is_large(self) -> bool:
        """Whether evaluating these rows may take much memory or time."""
        rows, costs = self.rows, self.costs
        if rows >= LARGE_ROWS or rows * costs.rules >= LARGE_PRODUCT:
            return True
        if not costs.queries or rows * costs.queries < LARGE_QUERIES:
            return False
        steps = np.unique(np.concatenate([block.step for _, block in self.blocks]))
        return len(steps) * costs.queries >= LARGE_QUERIES

    @property
    def has_long_words(self) -> bool:
        """Whether the words of these tensors are many or long, as in `LARGE_WORDS`."""
        catalogues = {id(block.catalogue): block.catalogue for _, block in self.blocks}.values()
        return sum(len(word) for known in catalogues for info in known for word in info.words) >= LARGE_WORDS

    @property
    def has_several_rows(self) -> bool:
        """Whether evaluating these rows takes longer than usual."""
        return self.rows >= SEVERAL_ROWS


@dataclass
class AbsentLookups:
    """Look-ups of absent segments in one evaluation. Any client that may announce can cause any number of them.

    A writer with a segment that was read has at most one next segment, and has a limit of its own: made-up writers
    do not delay writers that the service has read.
    """

    _seconds: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    _count: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})

    @property
    def seconds(self) -> float:
        """Time that the look-ups took."""
        return sum(self._seconds.values())

    @property
    def limited(self) -> bool:
        """Whether a limit was reached, so that segments may have been left out."""
        return any(self.full(of_known_writer=known) for known in (False, True))

    def full(self, *, of_known_writer: bool) -> bool:
        """Whether no more segments of such writers are looked up in this evaluation."""
        return (
            self._count[of_known_writer] >= _MOST_ABSENT or self._seconds[of_known_writer] >= _ABSENT_SECONDS
        )

    def add(self, seconds: float, *, of_known_writer: bool) -> None:
        """Count a look-up."""
        self._count[of_known_writer] += 1
        self._seconds[of_known_writer] += seconds


@dataclass
class ReadAhead:
    """What was read of a run since its claim, before its evaluation begins; each part is used once.

    Attributes:
        inbox: its inbox; None if it was not loaded.
        objects: path of a segment → its bytes. Segments that could not be read are read again by the evaluation.
    """

    inbox: Inbox | None = None
    objects: dict[str, bytes] = field(default_factory=dict)

    def take_inbox(self) -> Inbox | None:
        """The inbox, for the first caller."""
        inbox, self.inbox = self.inbox, None
        return inbox


@dataclass(frozen=True)
class RunSource:
    """The run's store, the guard that is called before a segment is read, the look-ups of absent segments, and what was read already."""

    store: Store
    guard: ReadingGuard
    absent: AbsentLookups = field(default_factory=AbsentLookups)
    ahead: ReadAhead = field(default_factory=ReadAhead)


def collect(service: Service, claim: Claim, source: RunSource) -> Collected:
    """Read segments, up to the limits of the settings.

    Raises:
        FencedError: another worker has taken the run.
        StoreError: the store did not answer.
    """
    plan, inbox = _plan(service, claim, source.ahead)
    if not plan.readable:
        return _without_segments(claim, plan, inbox)
    collected, absent = _first_there(service, claim, source, plan, inbox)
    if absent:
        collected.waiting += tuple(absent)
        if _may_list(service, claim, collected.waiting):
            read = [entry.key for entry, _ in collected.blocks]
            # Segments that were left out are looked up next, except those that the listing shows to be absent.
            listing = discover(service, claim.run_id, claim, read, forget_at_once=source.absent.limited)
            collected.more |= listing.fresh
    return collected


def _first_there(
    service: Service, claim: Claim, source: RunSource, plan: Plan, inbox: Inbox
) -> tuple[Collected, list[Gap]]:
    """Read the first attempt that has segments, and report the absent ones.

    Announcements are not trusted: absent segments do not block other attempts, and an attempt that is known only from
    an announcement is not created. Known attempts are read first, and failing ones last, so that a fault of one attempt
    or its objects does not block the others.

    Raises:
        StoreError: no segment could be read.
    """
    began = time.monotonic()
    chosen: Collected | None = None
    absent: list[Gap] = []
    errors: dict[str, StoreError] = {}
    entries: dict[str, list[InboxEntry]] = {}
    for entry in plan.readable:
        entries.setdefault(entry.key.writer.attempt, []).append(entry)
    ordered = sorted(entries, key=lambda name: (name in inbox.failing, name not in inbox.attempts))
    for place, attempt in enumerate(ordered, 1):
        if chosen is not None and attempt not in inbox.attempts and source.absent.full(of_known_writer=False):
            absent.append(_left_out(entries[attempt][0]))
            continue
        collected = _begun(attempt, claim, plan, inbox)
        gaps, error = _read_all(service, claim, source, entries[attempt], collected)
        absent += gaps
        if error is not None:
            errors[attempt] = error
        there = bool(collected.blocks or collected.corrupt)
        if there or chosen is None:
            chosen = collected
        if there or time.monotonic() - began >= SLICE_SECONDS:
            chosen.more |= place < len(ordered)
            break
    assert chosen is not None
    if errors and not (chosen.blocks or chosen.corrupt):
        raise next(iter(errors.values()))
    # Timed-out gaps are skipped once no segment is left to read.
    chosen.more |= bool(plan.trailing and (chosen.blocks or chosen.corrupt))
    chosen.failed = {attempt: error.what for attempt, error in errors.items()}
    if not (chosen.blocks or chosen.corrupt or chosen.attempt in inbox.attempts):
        chosen.attempt = ""
    return chosen, absent


def _begun(attempt: str, claim: Claim, plan: Plan, inbox: Inbox) -> Collected:
    return Collected(
        attempt,
        cursors.decode(claim.cursor),
        waiting=plan.waiting,
        attempts=inbox.attempts,
        calm=inbox.calm,
        failing=inbox.failing,
    )


def _without_segments(claim: Claim, plan: Plan, inbox: Inbox) -> Collected:
    names = sorted((gap.writer.attempt for gap in plan.trailing), key=lambda name: name in inbox.failing)
    collected = _begun(names[0] if names else "", claim, plan, inbox)
    for gap in plan.trailing:
        collected.missing.append(gap)
        collected.cursor[gap.writer] = gap.until
    return collected


def _plan(service: Service, claim: Claim, ahead: ReadAhead) -> tuple[Plan, Inbox]:
    gap_ns = nanoseconds(service.settings.gap_seconds)
    inbox = ahead.take_inbox() or open_inbox(service.database, claim.run_id)
    plan = _plan_of(claim, inbox, GapTimeout(claim.now_ns, gap_ns, listed=False))
    if not plan.waiting or not _may_list(service, claim, plan.waiting):
        return plan, inbox
    # A lost announcement leaves the same gap as a lost segment; only a listing distinguishes the two.
    listing = discover(service, claim.run_id, claim)
    inbox = open_inbox(service.database, claim.run_id)
    return _plan_of(claim, inbox, GapTimeout(claim.now_ns, gap_ns, listed=listing.complete)), inbox


def segments_ahead(service: Service, claim: Claim, inbox: Inbox) -> list[SegmentKey]:
    """The segments of an inbox that the next evaluation probably reads."""
    timeout = GapTimeout(claim.now_ns, nanoseconds(service.settings.gap_seconds), listed=False)
    plan = _plan_of(claim, inbox, timeout)
    return [entry.key for entry in plan.readable if entry.key.writer.attempt in inbox.attempts]


def _may_list(service: Service, claim: Claim, gaps: tuple[Gap, ...]) -> bool:
    gap_ns = nanoseconds(service.settings.gap_seconds)
    if any(claim.now_ns >= gap.since_ns + gap_ns for gap in gaps):
        return True
    with service.database.read() as session:
        listed_ns = session.get_one(RunRow, claim.run_id).listed_ns
    return listing_due(service, claim.place, claim.run_id, listed_ns, claim.now_ns)


def _plan_of(claim: Claim, inbox: Inbox, timeout: GapTimeout) -> Plan:
    ends = {name: row.ends for name, row in inbox.attempts.items()}
    timeout = replace(timeout, ends_known=not inbox.is_cut)
    return make_plan(cursors.decode(claim.cursor), inbox.entries, ends, timeout)


def _read_all(
    service: Service, claim: Claim, source: RunSource, entries: list[InboxEntry], collected: Collected
) -> tuple[list[Gap], StoreError | None]:
    """Read segments in order.

    Returns:
        Gaps of announced segments that are absent or were not looked up, and the first store error. A writer with an
        unreadable segment is skipped and the others are read; after `_MOST_ERRORS` such writers, reading ends.
    """
    size, renewed = 0, time.monotonic()
    began = renewed
    costs: RuleCosts | None = None
    absent: dict[WriterId, Gap] = {}
    errors: dict[WriterId, StoreError] = {}
    memory = BlockMemory()
    most = 1 if source.guard.is_careful else service.settings.max_segments
    for entry in entries:
        writer = entry.key.writer
        # Absent segments do not count, so that made-up announcements do not use up the limit.
        read = len(collected.blocks) + len(collected.corrupt)
        full = (
            read >= most or size >= service.settings.max_bytes or collected.rows >= collected.costs.most_rows
        )
        if full or time.monotonic() - began >= SLICE_SECONDS:
            collected.more = not errors or read > 0
            break
        if len(errors) >= _MOST_ERRORS:
            break
        renewed = _renewed(service, claim, renewed)
        if writer in errors or (writer in absent and entry.key.seq >= collected.cursor.get(writer, 0)):
            continue
        if source.absent.full(of_known_writer=writer in collected.cursor):
            absent[writer] = _left_out(entry)
            continue
        began_look_up = time.monotonic()
        try:
            source.guard.check(entry.key)
            data = source.ahead.objects.pop(entry.key.path, None) or fetch(source.store, entry.key)
            if costs is None:  # not before a segment is there, because announcements are not trusted
                costs = collected.costs = _rule_costs(service, claim, collected.attempt)
            data, block = _decoded(source, entry.key, data, histograms=costs.histograms)
            size += len(data)
            size += max(0, memory.of(block) - len(data))
            collected.blocks.append((entry, block))
        except NotFoundError:
            source.absent.add(time.monotonic() - began_look_up, of_known_writer=writer in collected.cursor)
            absent[writer] = _left_out(entry)
            continue
        except StoreError as error:
            errors[writer] = error
            continue
        except MemoryError as error:  # not a fault of the segment, which is read again
            errors[writer] = StoreError(
                f"segment {entry.key.path}: out of memory ({error})", "give the evaluator more memory"
            )
            continue
        except FormatError as error:
            collected.corrupt.append((entry, error.what))
        _advance(collected, entry.key)
    return list(absent.values()), next(iter(errors.values()), None)


def _rule_costs(service: Service, claim: Claim, attempt: str) -> RuleCosts:
    """The rules of an attempt. Histograms, which may take a hundred times the memory of the other columns, are read if a rule needs them."""
    loaded = service.rule_states.get((claim.run_id, attempt), claim.epoch)
    configs = load_configs(service, claim.run_id, attempt) if loaded is None else loaded
    requested = [entry.row.rule for entry in configs if is_requested(entry.row)]
    queries = sum(rule == Sql.name for rule in requested)
    return RuleCosts(len(configs), len(requested), queries, lookback(configs).histograms)


def _decoded(source: RunSource, key: SegmentKey, data: bytes, *, histograms: bool) -> tuple[bytes, Block]:
    """A segment's bytes and rows. If decoding fails it is fetched once more, because one answer may be damaged.

    Raises:
        NotFoundError, StoreError: it cannot be fetched.
        FormatError: the object itself is damaged.
    """
    try:
        return data, decode(data, key, histograms=histograms)
    except FormatError:
        again = fetch(source.store, key)
        if again == data:
            raise
        return again, decode(again, key, histograms=histograms)


def _left_out(entry: InboxEntry) -> Gap:
    return Gap(entry.key.writer, entry.key.seq, entry.key.seq + 1, entry.found_ns)


def _renewed(service: Service, claim: Claim, renewed: float) -> float:
    lease = service.settings.lease_seconds
    if time.monotonic() - renewed <= lease / 3:
        return renewed
    if not renew(service.database, claim, nanoseconds(lease)):
        raise FencedError
    return time.monotonic()


def _advance(collected: Collected, key: SegmentKey) -> None:
    following = collected.cursor.get(key.writer, 0)
    if key.seq > following:
        collected.missing.append(Gap(key.writer, following, key.seq, 0))
    collected.cursor[key.writer] = max(following, key.seq + 1)


def reject_new_tensors(collected: Collected, catalogue: Sequence[TensorInfo]) -> None:
    """Reject segments whose new tensors exceed `WORD_BYTES` with those of the attempt; they count as corrupt.

    Without a limit, a recorder that names new tensors in every segment grows rule states and the row cache without end.

    Args:
        collected: segments that were read; rejected ones move from ``blocks`` to ``corrupt``.
        catalogue: tensors of the attempt's earlier rows.
    """
    catalogues = {id(block.catalogue): block.catalogue for _, block in collected.blocks}
    if all(known is catalogue for known in catalogues.values()):
        return  # nothing new
    described = [info for known in (catalogue, *catalogues.values()) for info in known]
    if sum(len(info.words) for info in described) * MAX_WORD_BYTES <= WORD_BYTES:
        return  # the words cannot exceed the limit
    words = {word for info in catalogue for word in info.words}
    size = sum(map(_bytes, words))
    accepted: list[tuple[InboxEntry, Block]] = []
    for entry, block in collected.blocks:
        new = {word for info in block.catalogue for word in info.words} - words
        added = sum(map(_bytes, new))
        if new and size + added > WORD_BYTES:
            problem = (
                f"segment {entry.key.path}: describes tensors with {added} bytes of new words; the attempt's words have {size} bytes, "
                f"and {WORD_BYTES} are allowed"
            )
            collected.corrupt.append((entry, problem))
            continue
        words |= new
        size += added
        accepted.append((entry, block))
    collected.blocks = accepted


def _bytes(word: str) -> int:
    return len(word.encode(errors="surrogatepass"))


def fetch(run_store: Store, key: SegmentKey, most_bytes: int = segment.MAX_BYTES) -> bytes:
    """A segment's bytes, of which there may be so many.

    Raises:
        NotFoundError: it is not there.
        FormatError: it is too large to be one.
        StoreError: the store did not answer.
    """
    return run_store.get(key.path, limit=most_bytes)


def decode(data: bytes, key: SegmentKey, *, histograms: bool) -> Block:
    """Decode a segment's rows, in canonical order and with a catalogue sorted by name, with or without histograms.

    Raises:
        FormatError: the segment is damaged, or contains steps outside its name or ranks above the limit.
    """
    block = segment.decode(
        data, key.path, histograms=histograms, most_rows=SEGMENT_ROWS, most_bins=SEGMENT_BINS
    )
    with whole(key.path):
        check_steps(block.step, key.first, key.last)
        if len(block) and int(block.worker.max()) >= MOST_RANKS:
            raise ValueError(f"contains rank {block.worker.max()}; ranks below {MOST_RANKS} are supported")
    return canonical(block)


def spans_of_ranks(block: Block) -> list[list[int]]:
    """Rank, first step, last step and rows of each rank, by which the rows are found in a compacted run."""
    if not len(block):
        return []
    order = np.argsort(block.worker, kind="stable")
    ranks, starts, counts = np.unique(block.worker[order], return_index=True, return_counts=True)
    steps = block.step[order]
    columns = (ranks, np.minimum.reduceat(steps, starts), np.maximum.reduceat(steps, starts), counts)
    spans: list[list[int]] = np.stack([column.astype(np.int64) for column in columns], axis=1).tolist()
    return spans


def run_store_of(service: Service, claim: Claim) -> Store:
    """The store seen from the run.

    Raises:
        ConfigError, StoreError: it cannot be opened.
    """
    return service.stores.of_run(claim.place, claim.run)
