"""Phase b, first half: find and read the segments that an evaluation judges. No transaction is open meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from watchstep import segment
from watchstep.block import Block
from watchstep.errors import FormatError, NotFoundError, StoreError
from watchstep.layout import SegmentKey, WriterId
from watchstep.store import Store
from watchstep_rules.judging.history import canonical
from watchstep_services.database.models import Attempt, Run
from watchstep_services.evaluator import cursor as cursors
from watchstep_services.evaluator.claim import Claim, renew
from watchstep_services.evaluator.discover import discover, listing_due
from watchstep_services.evaluator.fence import FencedError
from watchstep_services.evaluator.inbox import Inbox, open_inbox
from watchstep_services.evaluator.judging import lookback
from watchstep_services.evaluator.plan import Entry, Gap, Patience, Plan, make_plan
from watchstep_services.service import Service
from watchstep_services.settings import nanoseconds

SLICE_SECONDS = 5.0
"""After so long an evaluation reads no more: whatever a run has waiting, the others wait for one slice of it."""


@dataclass
class Collected:
    """What was read of one attempt.

    Attributes:
        attempt: its name; empty where there was nothing to read.
        cursor: after these segments.
        blocks: rows of each segment that was read, in journal order.
        corrupt: segments that are there and cannot be read, and why.
        missing: gaps that were given up.
        waiting: gaps that still hold something up.
        more: there is more to read at once.
        attempts: rows of the run's attempts, by name, as they were when the segments were looked for.
        calm: at that time no alert of the run fired, and its last evaluation had not failed.
    """

    attempt: str
    cursor: dict[WriterId, int]
    blocks: list[tuple[Entry, Block]] = field(default_factory=list)
    corrupt: list[tuple[Entry, str]] = field(default_factory=list)
    missing: list[Gap] = field(default_factory=list)
    waiting: tuple[Gap, ...] = ()
    more: bool = False
    attempts: dict[str, Attempt] = field(default_factory=dict)
    calm: bool = False


def collect(service: Service, held: Claim, run_store: Store) -> Collected:
    """Read what can be read, up to the limits of the settings.

    Raises:
        FencedError: another worker has taken the run.
        StoreError: the store did not answer.
    """
    plan, inbox = _plan(service, held)
    if not plan.readable:
        return _without_segments(held, plan, inbox)
    found, absent = _first_there(service, held, run_store, plan, inbox)
    if absent:
        found.waiting += tuple(absent)
        if _may_list(service, held, found.waiting):
            found.more |= discover(service, held.run_id, held)
    return found


def _first_there(
    service: Service, held: Claim, run_store: Store, plan: Plan, inbox: Inbox
) -> tuple[Collected, list[Gap]]:
    """Read the first attempt of which something is there, and say what is not.

    Announcements are hearsay: those of which nothing is there hold up no other attempt, and make none of which no more is
    known than that somebody announced it. Attempts that are known come first.
    """
    began = time.monotonic()
    names = dict.fromkeys(entry.key.writer.attempt for entry in plan.readable)
    chosen: Collected | None = None
    absent: list[Gap] = []
    for place, attempt in enumerate(sorted(names, key=lambda name: name not in inbox.attempts), 1):
        found = _begun(attempt, held, plan, inbox)
        mine = [entry for entry in plan.readable if entry.key.writer.attempt == attempt]
        absent += _read_all(service, held, run_store, mine, found)
        there = bool(found.blocks or found.corrupt)
        if there or chosen is None:
            chosen = found
        if there or time.monotonic() - began >= SLICE_SECONDS:
            chosen.more |= place < len(names)
            break
    assert chosen is not None
    if not (chosen.blocks or chosen.corrupt or chosen.attempt in inbox.attempts):
        chosen.attempt = ""
    return chosen, absent


def _begun(attempt: str, held: Claim, plan: Plan, inbox: Inbox) -> Collected:
    return Collected(
        attempt, cursors.decode(held.cursor), waiting=plan.waiting, attempts=inbox.attempts, calm=inbox.calm
    )


def _without_segments(held: Claim, plan: Plan, inbox: Inbox) -> Collected:
    found = _begun(plan.trailing[0].writer.attempt if plan.trailing else "", held, plan, inbox)
    for gap in plan.trailing:
        found.missing.append(gap)
        found.cursor[gap.writer] = gap.until
    return found


def _plan(service: Service, held: Claim) -> tuple[Plan, Inbox]:
    gap_ns = nanoseconds(service.settings.gap_seconds)
    plan, inbox = _load_plan(service, held, Patience(held.now_ns, gap_ns, listed=False))
    if not plan.waiting or not _may_list(service, held, plan.waiting):
        return plan, inbox
    # A lost announcement leaves the same gap as a lost segment; only the store can tell which.
    discover(service, held.run_id, held)
    return _load_plan(service, held, Patience(held.now_ns, gap_ns, listed=True))


def _may_list(service: Service, held: Claim, gaps: tuple[Gap, ...]) -> bool:
    gap_ns = nanoseconds(service.settings.gap_seconds)
    if any(held.now_ns >= gap.since_ns + gap_ns for gap in gaps):
        return True
    with service.database.read() as session:
        listed_ns = session.get_one(Run, held.run_id).listed_ns
    return listing_due(service, held.place, listed_ns, held.now_ns)


def _load_plan(service: Service, held: Claim, patience: Patience) -> tuple[Plan, Inbox]:
    inbox = open_inbox(service.database, held.run_id)
    ends = {name: row.ends for name, row in inbox.attempts.items()}
    return make_plan(cursors.decode(held.cursor), inbox.entries, ends, patience), inbox


def _read_all(
    service: Service, held: Claim, run_store: Store, entries: list[Entry], found: Collected
) -> list[Gap]:
    """Read in order; returns the gaps that segments leave which were announced and are not there."""
    size, renewed = 0, time.monotonic()
    began = renewed
    known = service.remembered.get((held.run_id, found.attempt), held.epoch)
    histograms = known is None or lookback(known).histograms
    absent: dict[WriterId, Gap] = {}
    for entry in entries:
        writer = entry.key.writer
        # What is not there does not count: else made-up announcements keep what is from its turn.
        read = len(found.blocks) + len(found.corrupt)
        full = read >= service.settings.max_segments or size >= service.settings.max_bytes
        if full or time.monotonic() - began >= SLICE_SECONDS:
            found.more = True
            break
        renewed = _renewed(service, held, renewed)
        if writer in absent and entry.key.seq >= found.cursor.get(writer, 0):
            continue
        try:
            data = fetch(run_store, entry.key)
            size += len(data)
            found.blocks.append((entry, decode(data, entry.key, histograms=histograms)))
        except NotFoundError:
            absent[writer] = Gap(writer, entry.key.seq, entry.key.seq + 1, entry.found_ns)
            continue
        except FormatError as error:
            found.corrupt.append((entry, error.what))
        _advance(found, entry.key)
    return list(absent.values())


def _renewed(service: Service, held: Claim, renewed: float) -> float:
    lease = service.settings.lease_seconds
    if time.monotonic() - renewed <= lease / 3:
        return renewed
    if not renew(service.database, held, nanoseconds(lease)):
        raise FencedError
    return time.monotonic()


def _advance(found: Collected, key: SegmentKey) -> None:
    following = found.cursor.get(key.writer, 0)
    if key.seq > following:
        found.missing.append(Gap(key.writer, following, key.seq, 0))
    found.cursor[key.writer] = max(following, key.seq + 1)


def fetch(run_store: Store, key: SegmentKey) -> bytes:
    """A segment's bytes.

    Raises:
        NotFoundError: it is not there.
        FormatError: it is too large to be one.
        StoreError: the store did not answer.
    """
    try:
        return run_store.get(key.path, limit=segment.MAX_BYTES)
    except NotFoundError:
        raise
    except StoreError as error:
        size = run_store.size(key.path)
        if size <= segment.MAX_BYTES:
            raise
        raise FormatError(f"segment {key.path}: {size} bytes, over the limit", error.mend) from error


def decode(data: bytes, key: SegmentKey, *, histograms: bool) -> Block:
    """A segment's rows in canonical order, over a catalogue sorted by name; with their histograms, or without.

    Raises:
        FormatError: the bytes are no whole segment, or hold steps that its name does not say.
    """
    block = segment.decode(data, key.path, histograms=histograms)
    if len(block) and not (key.first <= int(block.step.min()) and int(block.step.max()) <= key.last):
        raise FormatError(
            f"segment {key.path}: holds steps {block.step.min()} to {block.step.max()}",
            "the writer or the transfer damaged it",
        )
    return canonical(block)


def run_store_of(service: Service, held: Claim) -> Store:
    """The store seen from the run.

    Raises:
        ConfigError, StoreError: it cannot be opened.
    """
    return service.stores.of_run(held.place, held.run)
