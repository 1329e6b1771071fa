"""Runs written by hand through the SDK's own store and segment modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tests.sdk.format.blocks import Row, block_of, gradient, tensor
from watchstep.format import documents, layout, segment
from watchstep.format.documents import AttemptDocument, EndDocument, EndState, OnStop, RunDocument
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.store.store import Store

PROJECT = "vision"
LOSS = tensor("loss", "losses", role="loss", shape=())
LAYERS = (gradient("first", order=1), gradient("second", order=2))
NAN = math.nan

Value = Callable[[int, str], float]


def healthy(_step: int, _tensor: str) -> float:
    """One, everywhere."""
    return 1.0


def nan_from(bad: int) -> Value:
    """NaN in the loss from a step on."""
    return lambda step, name: NAN if step >= bad and name == "loss" else 1.0


def damage_from(bad: int) -> Value:
    """NaN in everything from a step on, gradients that are applied included."""
    return lambda step, _name: NAN if step >= bad else 1.0


def exploding_from(bad: int) -> Value:
    """A gradient of the second layer that is a million times larger from a step on."""
    return lambda step, name: 1e6 if step >= bad and name.startswith("second") else 1.0 + 0.01 * step


@dataclass
class Recording:
    """A run on a store, as its recorders leave it."""

    root: Store
    run: str = "run-1"
    attempt: str = "a1"
    project: str = PROJECT
    written: dict[str, list[SegmentKey]] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """The store seen from the run."""
        return self.root.child(layout.run_prefix(self.project, self.run))

    def begin(
        self,
        *,
        rules: Sequence[dict[str, object]] = (),
        world_size: int = 1,
        on_stop: OnStop = "raise",
        started_ns: int = 1,
        late: bool = False,
    ) -> Recording:
        """Write the run's and the attempt's documents."""
        run = RunDocument(self.project, self.run, 1, tuple(rules))
        self.store.create(layout.RUN_DOCUMENT, documents.encode(run))
        claim = AttemptDocument(self.attempt, started_ns, world_size, on_stop, late=late)
        self.store.create(layout.attempt_document(self.attempt), documents.encode(claim))
        return self

    def writer(self, worker: int = 0) -> WriterId:
        """A worker's writer."""
        return WriterId(self.attempt, "node", f"w{worker}")

    def key(self, seq: int, first: int, last: int, worker: int = 0) -> SegmentKey:
        """A segment's key."""
        return SegmentKey(self.writer(worker), seq, first, last)

    def encoded(
        self, first: int, last: int, value: Value = healthy, worker: int = 0, taken_ns: int = 0
    ) -> bytes:
        """The bytes of a segment with a loss and two gradients at every step, a millisecond each since a time."""
        rows = [
            Row(step, info, [value(step, info.name)], worker=worker)
            for step in range(first, last + 1)
            for info in (LOSS, *LAYERS)
        ]
        block = block_of(rows)
        return segment.encode(replace(block, time_ns=block.time_ns + taken_ns))

    def write(
        self,
        seq: int,
        first: int,
        last: int,
        value: Value = healthy,
        worker: int = 0,
        taken_ns: int = 0,
    ) -> SegmentKey:
        """Put a segment onto the store."""
        key = self.key(seq, first, last, worker)
        self.store.put(key.path, self.encoded(first, last, value, worker, taken_ns))
        self.written.setdefault(key.writer.writer, []).append(key)
        return key

    def write_rows(self, seq: int, rows: Sequence[Row], worker: int = 0) -> SegmentKey:
        """Put a segment with these rows onto the store."""
        steps = [row.step for row in rows]
        key = self.key(seq, min(steps), max(steps), worker)
        self.store.put(key.path, segment.encode(block_of(rows)))
        self.written.setdefault(key.writer.writer, []).append(key)
        return key

    def write_all(self, ends: Sequence[int], value: Value = healthy, worker: int = 0) -> None:
        """Segments that follow each other: each up to one of these steps."""
        first = 0
        for seq, last in enumerate(ends):
            self.write(seq, first, last, value, worker)
            first = last + 1

    def end(
        self, state: EndState = "completed", last_step: int = 0, worker: int = 0, ended_ns: int = 1
    ) -> None:
        """Write how a worker ended, after what it has written so far."""
        writer = self.writer(worker).writer
        said = EndDocument(worker, state, last_step, ended_ns, len(self.written.get(writer, [])), writer)
        self.store.put(layout.end_document(self.attempt, worker), documents.encode(said))
