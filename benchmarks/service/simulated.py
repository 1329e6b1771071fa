"""Recorders that never trained: they send segments that were encoded before, at a steady pace, in a process of their own.

``python -m benchmarks.service.simulated PLAN.json RESULT.json``: a segment is written to the store as the SDK writes it, and
announced over HTTP by the SDK's own client. A run that is asked to stop writes its last words and another takes its place.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.made_rows import Shape, catalogue_of, rows_of_steps
from watchstep.capture.service.client import ServiceClient
from watchstep.errors import ServiceError
from watchstep.format import documents, layout, segment
from watchstep.format.documents import AttemptDocument, EndDocument, RunDocument
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.platform.transport import ServiceAddress
from watchstep.store.store import Store

PROJECT = "simulated"
LAYERS = 28
"""Seven tensors each, and three more: 199 tensors."""

_SENDERS = 12


@dataclass(frozen=True)
class Plan:
    """What to simulate.

    Attributes:
        url: of the API.
        token: a recorder's.
        store: where to write.
        runs: at any time.
        period: seconds between two segments of a run.
        steps: of a segment.
        warm: seconds before anything is measured; nothing goes wrong in them.
        seconds: in which it is measured.
        bad_share: of the segments hold a NaN.
        seed: of what goes wrong where.
        says_urgent: with every other NaN the recorder says that it is urgent, as the SDK does; the others stand for what only rules see.
    """

    url: str
    token: str
    store: str
    runs: int
    period: float
    steps: int
    warm: float
    seconds: float
    bad_share: float
    seed: int = 0
    says_urgent: bool = True


@dataclass
class Told:
    """What the simulation saw.

    Attributes:
        sent: segments that were announced in the measured time.
        failed: announcements without an answer.
        late: seconds by which the simulation itself was behind at most.
        bad: of each run with a NaN: when its segment had been written, and when an answer asked it to stop; 0 if none did.
        unsaid: those of them whose recorder did not say that it is urgent.
        cpu: seconds of CPU of the simulation itself.
    """

    sent: int = 0
    failed: int = 0
    late: float = 0.0
    bad: dict[str, list[int]] = field(default_factory=dict)
    unsaid: list[str] = field(default_factory=list)
    cpu: float = 0.0


class Segments:
    """The bytes of each segment of a run, with and without a NaN; all runs have the same."""

    def __init__(self, steps: int, number: int) -> None:
        made = [rows_of_steps(Shape(layers=LAYERS), seq * steps, steps) for seq in range(number)]
        self.good = [segment.encode(block) for block in made]
        roles = [info.role for info in catalogue_of(Shape(layers=LAYERS))]
        for block in made:
            block.statistics.nan[np.flatnonzero(block.tensor == roles.index("gradient"))[-1]] = 1
        self.bad = [segment.encode(block) for block in made]


@dataclass
class Simulated:
    """One place, in which one run follows another."""

    place: int
    generation: int = -1
    seq: int = 0
    bad: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """A recorder sends one segment at a time, also if the next is due before the answer has come."""

    @property
    def name(self) -> str:
        return f"run-{self.place}-{self.generation}"


class Simulation:
    """All runs, each at its moment."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.told = Told()
        self.segments = Segments(plan.steps, int((plan.warm + plan.seconds) / plan.period) + 3)
        self.client = ServiceClient(ServiceAddress.checked(plan.url, plan.token), PROJECT)
        self.store = Store.open(plan.store)
        self.random = random.Random(plan.seed)
        self.lock = threading.Lock()

    def run(self) -> Told:
        """Send for as long as the plan says."""
        plan, began = self.plan, time.monotonic()
        spent = time.process_time()
        order = itertools.count()
        waiting = [
            (began + plan.period * place / plan.runs, next(order), Simulated(place))
            for place in range(plan.runs)
        ]
        heapq.heapify(waiting)
        measured = began + plan.warm
        self.measured_ns = time.time_ns() + int(plan.warm * 1e9)
        with ThreadPoolExecutor(_SENDERS) as senders:
            while True:
                at, _, one = heapq.heappop(waiting)
                if at >= measured + plan.seconds:
                    break
                time.sleep(max(0.0, at - time.monotonic()))
                senders.submit(self._guarded, one, at, at >= measured)
                heapq.heappush(waiting, (at + plan.period, next(order), one))
        self.told.cpu = time.process_time() - spent
        return self.told

    def _guarded(self, one: Simulated, at: float, counted: bool) -> None:
        try:
            with one.lock:
                self._send(one, counted)
        except ServiceError as error:
            print(error, file=sys.stderr)
            with self.lock:
                self.told.failed += 1
        with self.lock:
            self.told.late = max(self.told.late, time.monotonic() - at if counted else 0.0)

    def _send(self, one: Simulated, counted: bool) -> None:
        if one.generation < 0:
            self._begin(one)
        run_store = self.store.child(layout.run_prefix(PROJECT, one.name))
        with self.lock:
            goes_wrong = counted and not one.bad and self.random.random() < self.plan.bad_share
        data = (self.segments.bad if goes_wrong else self.segments.good)[one.seq]
        first = one.seq * self.plan.steps
        key = SegmentKey(WriterId("a1", "node", "w0"), one.seq, first, first + self.plan.steps - 1)
        run_store.create(key.path, data)
        written = time.time_ns()
        one.seq += 1
        if goes_wrong:
            one.bad = True
            with self.lock:
                urgent = self.plan.says_urgent and len(self.told.bad) % 2 == 0
                self.told.bad[one.name] = [written, 0]
                if not urgent:
                    self.told.unsaid.append(one.name)
        health = {"rows": first, "dropped_rows": 0}
        control = self.client.announce(one.name, [key], health, urgent=goes_wrong and urgent)
        with self.lock:
            self.told.sent += counted
        if control.stop is not None:
            with self.lock:
                if one.name in self.told.bad:
                    self.told.bad[one.name][1] = time.time_ns()
            self._end(one, run_store, key.last)

    def _begin(self, one: Simulated) -> None:
        one.generation, one.seq, one.bad = one.generation + 1, 0, False
        run_store = self.store.child(layout.run_prefix(PROJECT, one.name))
        run_store.create(layout.RUN_DOCUMENT, documents.encode(RunDocument(PROJECT, one.name, 1)))
        claim = AttemptDocument("a1", time.time_ns(), 1, "raise")
        run_store.create(layout.attempt_document("a1"), documents.encode(claim))
        self.client.register({"run": one.name, "attempt": "a1"})

    def _end(self, one: Simulated, run_store: Store, last: int) -> None:
        end = EndDocument(0, "stopped", last, time.time_ns(), one.seq, "w0", "asked to")
        run_store.put(layout.end_document("a1", 0), documents.encode(end))
        self._begin(one)


def main() -> None:
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text()))
    simulation = Simulation(plan)
    print("ready", flush=True)
    sys.stdin.readline()
    told: dict[str, Any] = asdict(simulation.run())
    Path(sys.argv[2]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
