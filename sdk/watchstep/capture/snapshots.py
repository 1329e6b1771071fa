"""Snapshots: at which steps full tensors are taken and why, the memory that they are copied to, and the thread that writes them.

The memory is bounded and reused. Snapshots have a thread of their own, since an upload of seconds must not delay statistics. Of a cadence
the newest snapshots stay on the store, up to a bound.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from watchstep.capture.config import Snapshots
from watchstep.capture.health import RecorderHealth
from watchstep.errors import StoreError
from watchstep.format.layout import SnapshotKey
from watchstep.format.snapshot import Described, header, missing_metadata
from watchstep.format.tensors import Mode
from watchstep.store.store import Store

Reason = Literal["cadence", "gate", "request", "program"]

MOST_BY_GATE = 2
"""Snapshots that the gate takes in one attempt: the first bad step of a run of bad steps, twice."""


@dataclass(frozen=True)
class Occasion:
    """Why a snapshot is taken.

    Attributes:
        reason: the cadence, the gate, a request of the control document, or the program's own.
        requests: ids of the requests that it answers.
    """

    reason: Reason
    requests: tuple[str, ...] = ()


class SnapshotPlan:
    """Asked once for each step that is updated. On the training thread, but for `request`."""

    def __init__(self, config: Snapshots) -> None:
        self._config = config
        self._lock = threading.RLock()  # a signal's handler may come back in
        self._seen: set[str] = set()
        self._requests: dict[str, int] = {}
        self._asked = False
        self._bad_step = -2
        self._gate_step = -1
        self._by_gate = 0
        self._taken = -1

    def ask(self) -> None:
        """The program wants the next step that is updated."""
        self._asked = True

    def request(self, name: str, step: int) -> bool:
        """A request of the control document; False where its id was seen before. From any thread."""
        with self._lock:
            if name in self._seen:
                return False
            self._seen.add(name)
            self._requests[name] = step
            return True

    def bad(self, step: int) -> bool:
        """This step holds NaN or infinity; whether it is the first of one of the first runs of such steps."""
        first = step not in {self._bad_step, self._bad_step + 1}
        self._bad_step = step
        if not first or self._by_gate >= MOST_BY_GATE:
            return False
        self._by_gate += 1
        if self._config.at_gate:
            self._gate_step = step
        return True

    def due(self, step: int) -> Occasion | None:
        """Why a snapshot is to be taken at this step; None where none is, or one was taken of it.

        Of several reasons the rarer one counts: the gate, a request, the program, the cadence.
        """
        if step == self._taken:
            return None
        occasion = self._occasion(step)
        if occasion is not None:
            self._taken = step
        return occasion

    def _occasion(self, step: int) -> Occasion | None:
        answered = self._due_requests(step) if self._requests else ()
        asked, self._asked = self._asked, False
        if step == self._gate_step:
            return Occasion("gate", answered)
        if answered:
            return Occasion("request", answered)
        if asked:
            return Occasion("program")
        every = self._config.every
        return Occasion("cadence") if every is not None and step % every == 0 else None

    def _due_requests(self, step: int) -> tuple[str, ...]:
        with self._lock:
            due = tuple(name for name, at in self._requests.items() if at <= step)
            for name in due:
                del self._requests[name]
        return due


_PAGE = 4096


def host_memory(size: int) -> NDArray[np.uint8]:
    """New memory of so many bytes, from the start of a page; the system gives it when it is first written to."""
    raw = np.empty(size + _PAGE, np.uint8)
    start = -raw.ctypes.data % _PAGE
    return raw[start : start + size]


class SnapshotMemory:
    """Buffers up to a number of bytes together. Thread-safe.

    Writing to memory for the first time costs several times what the copy itself costs, so a buffer that is given back
    is kept for the next snapshot.

    Attributes:
        limit: bytes of all buffers together.
        allocate: makes memory: the host's, or such as a device copies to while training goes on.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.allocate: Callable[[int], NDArray[np.uint8]] = host_memory
        self._lock = threading.RLock()  # a signal's handler may come back in
        self._free: list[NDArray[np.uint8]] = []
        self._in_use = 0

    @property
    def available(self) -> int:
        """Bytes that `take` would give now."""
        return max(0, self.limit - self._in_use)

    def take(self, size: int) -> NDArray[np.uint8] | None:
        """A buffer of at least so many bytes, at least 1; None where they are not available."""
        with self._lock:
            if size > self.available:
                return None
            fitting = [place for place, buffer in enumerate(self._free) if len(buffer) >= size]
            if fitting:
                buffer = self._free.pop(min(fitting, key=lambda place: len(self._free[place])))
                if self._in_use + len(buffer) <= self.limit:
                    self._in_use += len(buffer)
                    return buffer
            while self._free and self._pooled() + self._in_use + size > self.limit:
                self._free.pop()
            self._in_use += size
        try:
            return self.allocate(size)
        except BaseException:
            with self._lock:
                self._in_use -= size
            raise

    def give_back(self, buffer: NDArray[np.uint8]) -> None:
        """Let the next snapshot have what `take` gave."""
        with self._lock:
            self._in_use -= len(buffer)
            self._free.append(buffer)

    def prepare(self, size: int) -> None:
        """Have a buffer of that size ready, its memory written to, unless it is over the limit or one is kept."""
        size = min(size, self.limit)
        with self._lock:
            if any(len(buffer) >= size for buffer in self._free):
                return
        buffer = self.take(size) if size else None
        if buffer is not None:
            buffer[::_PAGE] = 0
            self.give_back(buffer)

    def _pooled(self) -> int:
        return sum(len(buffer) for buffer in self._free)


class SnapshotRing:
    """Which snapshots make room for newer ones. Knows of those that this process wrote, and only of their names.

    Attributes:
        limit: bytes on the store; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._objects: deque[tuple[str, int]] = deque()

    def add(self, key: str, size: int) -> list[str]:
        """A snapshot was written: keys of those that are to be deleted for it, the oldest first.

        The newest one stays, even where it is over the limit by itself.
        """
        if self.limit is None:
            return []
        self._objects.append((key, size))
        rotated = []
        while len(self._objects) > 1 and sum(size for _, size in self._objects) > self.limit:
            rotated.append(self._objects.popleft()[0])
        return rotated

    def protect(self) -> None:
        """What is held now is never deleted, and does not count any more."""
        self._objects.clear()


_FIRST_BACKOFF = 0.2
_LONGEST_BACKOFF = 10.0
_PIECE = 1024 * 1024


@dataclass(frozen=True)
class TakenSnapshot:
    """Tensors of one step, copied, or being copied by a device.

    Attributes:
        step: the step.
        mode: the mode.
        occasion: why it was taken.
        parameters: "before the update" or "after the update".
        tensors: in the order in which they lie in the memory, one behind the other.
        memory: at least as long as they are; belongs to the snapshot until it is given back.
        missing: names of tensors for which there was no memory.
        ready: waits until the copies are done.
    """

    step: int
    mode: Mode
    occasion: Occasion
    parameters: str
    tensors: tuple[Described, ...]
    memory: NDArray[np.uint8]
    missing: tuple[str, ...] = ()
    ready: Callable[[], None] = field(default=lambda: None)

    @property
    def metadata(self) -> dict[str, str]:
        """What the object says of itself."""
        asked = {"requests": ",".join(self.occasion.requests)} if self.occasion.requests else {}
        return {
            "step": str(self.step),
            "reason": self.occasion.reason,
            "parameters": self.parameters,
            **asked,
            **missing_metadata(self.missing),
        }


@dataclass(frozen=True)
class _Object:
    """A snapshot as it is written: ``memory`` up to ``length`` follows the start."""

    path: str
    start: bytes
    memory: NDArray[np.uint8]
    length: int

    @property
    def size(self) -> int:
        return len(self.start) + self.length


class _GivenUpError(Exception):
    """The time for writing is over."""


class SnapshotWriter:
    """Sees snapshots onto the store, and takes old ones of the cadence off it.

    Any thread may call; the work is done by one of its own, which starts with the first snapshot.

    Attributes:
        memory: where snapshots are copied to.
    """

    def __init__(self, config: Snapshots, worker: int, health: RecorderHealth) -> None:
        self.memory = SnapshotMemory(config.memory_bytes)
        self._worker = worker
        self._health = health
        self._ring = SnapshotRing(config.ring_bytes)
        self._rotated: deque[str] = deque()
        # Its lock may be taken again by the thread that holds it: a signal's handler may come back in.
        self._changed = threading.Condition()
        self._items: deque[tuple[int, TakenSnapshot]] = deque()
        self._offered = 0
        self._protected = 0  # snapshots offered up to this number never enter the ring
        self._to_prepare = 0
        self._place: tuple[Store, str] | None = None
        self._deadline = float("inf")
        self._given_up = False
        self._thread: threading.Thread | None = None

    def open(self, store: Store, attempt: str) -> None:
        """Where snapshots go, once the attempt is claimed."""
        if self._place is None:
            with self._changed:
                self._place = (store, attempt)
                self._changed.notify_all()

    def prepare(self, size: int) -> None:
        """Have memory of that size ready before the first snapshot; makes it on the thread."""
        with self._changed:
            self._to_prepare = size
            self._start_or_wake()

    def offer(self, taken: TakenSnapshot) -> None:
        """Hand a snapshot over; its memory is given back when it is written."""
        with self._changed:
            self._offered += 1
            self._items.append((self._offered, taken))
            self._start_or_wake()

    def protect(self) -> None:
        """Something went wrong: what the cadence wrote so far is never deleted."""
        with self._changed:
            self._ring.protect()
            self._protected = self._offered

    def close(self, seconds: float) -> None:
        """Only so much time is left; a later call can only bring that forward."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    @property
    def settled(self) -> bool:
        """Whether nothing is left to write, or the time for it is over: then what is left is given up."""
        if self._items and time.monotonic() >= self._deadline:
            self.settle()
        return self._given_up or not self._items

    def settle(self) -> None:
        """Write no more; what is left is counted."""
        with self._changed:
            if not self._given_up:
                self._given_up = True
                if self._items:
                    self._health.count("dropped_snapshots", len(self._items))
                self._changed.notify_all()
        if self._thread is not None and not self._items:
            self._thread.join(1.0)  # one that ends while the interpreter is torn down may abort it

    def _start_or_wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="watchstep-snapshots", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while not self._given_up:
            with self._changed:
                self._changed.wait_for(self._has_work)
                size, self._to_prepare = self._to_prepare, 0
                head = self._items[0] if self._items and self._place and not self._given_up else None
            if size:
                self._prepare(size)
            if head is not None:
                self._see_off(*head)

    def _has_work(self) -> bool:
        return bool(self._to_prepare or (self._items and self._place) or self._given_up)

    def _prepare(self, size: int) -> None:
        try:
            self.memory.prepare(size)
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("snapshot", error)

    def _see_off(self, number: int, taken: TakenSnapshot) -> None:
        try:
            self._write(number, taken)
        except _GivenUpError:
            pass  # counted by whoever gave up
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("snapshot", error)
            self._health.count("dropped_snapshots")
        self.memory.give_back(taken.memory)
        with self._changed:
            self._items.popleft()

    def _write(self, number: int, taken: TakenSnapshot) -> None:
        assert self._place is not None
        store, attempt = self._place
        taken.ready()
        key = SnapshotKey(attempt, self._worker, taken.step, taken.mode)
        length = sum(tensor.length for tensor in taken.tensors)
        made = _Object(key.path, header(taken.tensors, taken.metadata), taken.memory, length)
        if not self._upload(store, made):
            self._health.count("dropped_snapshots")
            return
        self._health.count("snapshots")
        self._health.count("objects")
        self._health.count("bytes", made.size)
        if taken.occasion.reason == "cadence":
            with self._changed:
                if number > self._protected:
                    self._rotated.extend(self._ring.add(made.path, made.size))
        self._delete_rotated(store)

    def _upload(self, store: Store, made: _Object) -> bool:
        """Write until it is written; False where an earlier process of this worker wrote the same step."""
        pause, tried = _FIRST_BACKOFF, False
        while True:
            try:
                return store.create_in_parts(made.path, made.size, self._parts(made)) or tried
            except StoreError as error:
                if self._given_up:
                    raise _GivenUpError from error
                self._health.fault("store", error)
            tried = True  # the answer may be all that was lost
            with self._changed:
                if self._changed.wait_for(lambda: self._given_up, pause):
                    raise _GivenUpError
            pause = min(_LONGEST_BACKOFF, 2 * pause)

    def _parts(self, made: _Object) -> Iterator[memoryview]:
        yield memoryview(made.start)
        view = made.memory.data
        for place in range(0, made.length, _PIECE):
            if self._given_up:
                raise _GivenUpError
            yield view[place : min(place + _PIECE, made.length)]

    def _delete_rotated(self, store: Store) -> None:
        while self._rotated:
            try:
                store.delete(self._rotated[0])
            except StoreError as error:
                self._health.fault("store", error)
                return  # again after the next snapshot
            self._rotated.popleft()
            self._health.count("rotated_snapshots")


def fitting(sizes: Sequence[int], available: int) -> list[int]:
    """Places of those that fit into so many bytes, the first ones first; a smaller one may follow one that does not."""
    chosen = []
    for place, size in enumerate(sizes):
        if size <= available:
            chosen.append(place)
            available -= size
    return chosen
