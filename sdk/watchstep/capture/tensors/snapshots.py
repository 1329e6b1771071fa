"""Snapshots: at which steps all weights and gradients are saved and why, the memory of full tensors, and the thread that writes them.

The memory is bounded and reused. Writing has its own thread, because an upload of seconds must not delay statistics. Of tensors that
are saved on a cadence, the newest stay on the store, up to the limit of their collection.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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

MAX_BY_GATE = 2
"""Snapshots that the gate takes in one attempt, at the first bad steps of two series."""


MAX_BY_REQUEST = 32
"""Requests of control documents that are fulfilled in one attempt."""


@dataclass(frozen=True)
class Occasion:
    """Why a snapshot is taken.

    Attributes:
        reason: the cadence of a collection, the gate, a request of the control document, or the program's request.
        requests: ids of the requests that it fulfils.
    """

    reason: Reason
    requests: tuple[str, ...] = ()


_MAX_REFUSED = 64
"""Ids of refused requests that are stored, so that each is counted once: a document has fewer."""


class SnapshotPlan:
    """Decides at each updated step whether a snapshot is taken. Used on the training thread, except for `request`."""

    def __init__(self, config: Snapshots, health: RecorderHealth | None = None) -> None:
        self._config = config
        self._health = health
        self._lock = threading.RLock()  # reentrant, because a signal handler may call it
        self._seen: set[str] = set()
        self._refused: deque[str] = deque(maxlen=_MAX_REFUSED)
        self._requests: dict[str, int] = {}
        self._is_requested = False
        self._bad_step = -2
        self._gate_step = -1
        self._by_gate = 0
        self._taken = -1

    def request_next(self) -> None:
        """Request a snapshot of the next updated step, by the program."""
        self._is_requested = True

    def request(self, name: str, step: int) -> bool:
        """Add a request of the control document. Thread-safe.

        Returns:
            False for an earlier id, or if it is refused, because the attempt has fulfilled `MAX_BY_REQUEST`. Health counts refused requests.
        """
        with self._lock:
            if name in self._seen or name in self._refused:
                return False
            if len(self._seen) >= MAX_BY_REQUEST:
                self._refused.append(name)
                if self._health is not None:
                    self._health.count("refused_snapshots")
                return False
            self._seen.add(name)
            self._requests[name] = step
            return True

    def bad(self, step: int) -> bool:
        """Report a step with NaN or infinity. Returns whether it is the first of one of the first series of such steps."""
        first = step not in {self._bad_step, self._bad_step + 1}
        self._bad_step = step
        if not first or self._by_gate >= MAX_BY_GATE:
            return False
        self._by_gate += 1
        if self._config.at_gate:
            self._gate_step = step
        return True

    def due(self, step: int) -> Occasion | None:
        """Return why a snapshot is due at this step; None if it is not, or was taken already.

        Of several reasons the rarest counts: the gate, a request, the program.
        """
        if step == self._taken:
            return None
        occasion = self._occasion(step)
        if occasion is not None:
            self._taken = step
        return occasion

    def _occasion(self, step: int) -> Occasion | None:
        fulfilled = self._due_requests(step) if self._requests else ()
        is_requested, self._is_requested = self._is_requested, False
        if step == self._gate_step:
            return Occasion("gate", fulfilled)
        if fulfilled:
            return Occasion("request", fulfilled)
        return Occasion("program") if is_requested else None

    def _due_requests(self, step: int) -> tuple[str, ...]:
        with self._lock:
            due = tuple(name for name, first_step in self._requests.items() if first_step <= step)
            for name in due:
                del self._requests[name]
        return due


_PAGE = 4096


def host_memory(size: int) -> NDArray[np.uint8]:
    """Allocate page-aligned memory; the system maps it on the first write."""
    raw = np.empty(size + _PAGE, np.uint8)
    start = -raw.ctypes.data % _PAGE
    return raw[start : start + size]


class SnapshotMemory:
    """Buffers with a common size limit. Thread-safe.

    The first write to memory costs several times as much as the copy itself, so a released buffer
    is kept for the next snapshot.

    Attributes:
        limit: size of all buffers together in bytes.
        allocate: allocates memory: on the host, or pinned memory that a device copies to during training.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.allocate: Callable[[int], NDArray[np.uint8]] = host_memory
        self._lock = threading.RLock()  # reentrant, because a signal handler may call it
        self._free: list[NDArray[np.uint8]] = []
        self._in_use = 0

    @property
    def available(self) -> int:
        """Bytes that `take` can return now."""
        return max(0, self.limit - self._in_use)

    def take(self, size: int) -> NDArray[np.uint8] | None:
        """Return a buffer of at least ``size`` bytes, at least 1; None if they are not available."""
        with self._lock:
            if size > self.available:
                return None
            reused = self._reusable(size)
            if reused is not None:
                self._in_use += len(reused)
                return reused
            while self._free and self._pooled() + self._in_use + size > self.limit:
                self._free.pop()
            self._in_use += size
        try:
            return self.allocate(size)
        except BaseException:
            with self._lock:
                self._in_use -= size
            raise

    def release(self, buffer: NDArray[np.uint8]) -> None:
        """Make a buffer from `take` available for the next snapshot."""
        with self._lock:
            self._in_use -= len(buffer)
            self._free.append(buffer)

    def _reusable(self, size: int) -> NDArray[np.uint8] | None:
        """Remove and return the smallest released buffer of at least a size; None if a new one is better.

        A buffer of more than twice the size is returned only if there is no room for a new one.
        """
        fitting = [index for index, buffer in enumerate(self._free) if len(buffer) >= size]
        if not fitting:
            return None
        index = min(fitting, key=lambda index: len(self._free[index]))
        length = len(self._free[index])
        has_room = self._pooled() + self._in_use + size <= self.limit
        if self._in_use + length > self.limit or (length > 2 * size and has_room):
            return None
        return self._free.pop(index)

    def _pooled(self) -> int:
        return sum(len(buffer) for buffer in self._free)


class SnapshotRing:
    """Decides which snapshots are deleted for newer ones. Knows only the names of those that this process wrote.

    Attributes:
        limit: size on the store in bytes; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._objects: deque[tuple[str, int]] = deque()

    def add(self, key: str, size: int) -> list[str]:
        """Add a written snapshot. Returns keys of snapshots to delete for it, oldest first.

        The newest one remains, even if it exceeds the limit by itself.
        """
        if self.limit is None:
            return []
        self._objects.append((key, size))
        rotated = []
        while len(self._objects) > 1 and sum(size for _, size in self._objects) > self.limit:
            rotated.append(self._objects.popleft()[0])
        return rotated

    def protect(self) -> None:
        """Never delete the current snapshots, and no longer count them."""
        self._objects.clear()


_FIRST_BACKOFF = 0.2
_MAX_BACKOFF = 10.0
_PIECE = 1024 * 1024
_MAX_OBJECTS = 1000
_MAX_TENSORS = 20_000
"""Limits of objects of collections that wait for the store, in addition to their memory: descriptions of so many tensors take 20 MB."""


@dataclass(frozen=True)
class TakenSnapshot:
    """Tensors of one step, copied or being copied by a device.

    Attributes:
        step: the step.
        mode: the mode.
        occasion: why it was taken.
        parameters: "before the update" or "after the update"; empty for the tensors of a collection.
        tensors: in their order in the object.
        data: the bytes of each.
        memory: buffers with these bytes, owned by the snapshot until they are released.
        missing: names of tensors that did not fit into a limit.
        ready: waits until the copies are done.
        collection: the collection; empty for a snapshot of weights and gradients.
        is_rotated: whether it is deleted for newer ones of its collection, according to the limit on their size.
        describe: returns further metadata of the object; called when it is written.
    """

    step: int
    mode: Mode
    occasion: Occasion
    parameters: str
    tensors: tuple[Described, ...]
    data: tuple[NDArray[np.uint8], ...]
    memory: tuple[NDArray[np.uint8], ...]
    missing: tuple[str, ...] = ()
    ready: Callable[[], None] = field(default=lambda: None)
    collection: str = ""
    is_rotated: bool = False
    describe: Callable[[], Mapping[str, str]] = dict

    @property
    def names(self) -> int:
        """Number of tensors, including missing ones."""
        return len(self.tensors) + len(self.missing)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the object."""
        requests = {"requests": ",".join(self.occasion.requests)} if self.occasion.requests else {}
        return {
            "step": str(self.step),
            "reason": self.occasion.reason,
            **({"collection": self.collection} if self.collection else {"parameters": self.parameters}),
            **requests,
            **self.describe(),
            **missing_metadata(self.missing),
        }


@dataclass(frozen=True)
class StoredFile:
    """A complete object, in a file of this machine that is mapped to memory or encoded when it is written.

    Attributes:
        key: returns the key relative to the run, of an attempt.
        data: the bytes of the object, or a function that returns them, called by the thread that writes them.
        counter: name of the count of such objects in health.
    """

    key: Callable[[str], str]
    data: NDArray[np.uint8] | Callable[[], NDArray[np.uint8]]
    counter: str

    @property
    def names(self) -> int:
        """Number of tensors that are described in memory: none."""
        return 0

    @property
    def memory(self) -> tuple[NDArray[np.uint8], ...]:
        """Buffers to release: none."""
        return ()


@dataclass(frozen=True)
class _Object:
    """A snapshot as it is written: ``start``, followed by ``data``."""

    path: str
    start: bytes
    data: tuple[NDArray[np.uint8], ...]

    @property
    def size(self) -> int:
        return len(self.start) + sum(map(len, self.data))


class _GivenUpError(Exception):
    """The time limit for writing is exceeded."""


class SnapshotWriter:
    """Writes snapshots to the store, and deletes old periodic ones.

    Methods may be called on any thread; the work is done by a separate thread, which starts with the claim or the first snapshot: a
    program that fails has its first one when Python, since 3.12, refuses to start another thread.

    Attributes:
        memory: memory that snapshots are copied to.
    """

    def __init__(self, config: Snapshots, worker: int, health: RecorderHealth) -> None:
        self.memory = SnapshotMemory(config.memory_bytes)
        self._worker = worker
        self._health = health
        self._rings: dict[str, SnapshotRing] = {}
        self._rotated: deque[str] = deque()
        # Reentrant, because a signal handler may interrupt the thread that holds the lock and call back.
        self._changed = threading.Condition()
        self._items: deque[tuple[int, TakenSnapshot | StoredFile]] = deque()
        self._saved: deque[SnapshotKey] = deque()
        self._offered = 0
        self._names = 0  # of the tensors in items
        self._protected = 0  # snapshots offered up to this number never enter the ring
        self._destination: tuple[Store, str] | None = None
        self._deadline = float("inf")
        self._given_up = False
        self._thread: threading.Thread | None = None

    def open(self, store: Store, attempt: str) -> None:
        """Set the store and attempt, once the attempt is claimed."""
        if self._destination is None:
            with self._changed:
                self._destination = (store, attempt)
                self._start_or_wake()

    def limit_ring(self, collection: str, limit: int | None) -> None:
        """Set the size on the store of a collection's objects in bytes; None for no limit."""
        with self._changed:
            self._rings.setdefault(collection, SnapshotRing(limit)).limit = limit

    def offer(self, taken: TakenSnapshot | StoredFile) -> None:
        """Queue a snapshot or a file. Its memory is released after writing."""
        with self._changed:
            self._offered += 1
            self._names += taken.names
            self._items.append((self._offered, taken))
            self._start_or_wake()

    @property
    def is_full(self) -> bool:
        """Whether so many objects wait that no further one of a collection should be copied."""
        return len(self._items) >= _MAX_OBJECTS or self._names >= _MAX_TENSORS

    def protect(self) -> None:
        """Never delete periodic snapshots written so far, because something went wrong."""
        with self._changed:
            for ring in self._rings.values():
                ring.protect()
            self._protected = self._offered

    def close(self, seconds: float) -> None:
        """Set the time limit for writing; later calls can only shorten it."""
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    @property
    def settled(self) -> bool:
        """Whether nothing is left to write, or the time limit is exceeded; then the rest is dropped."""
        if self._items and time.monotonic() >= self._deadline:
            self.settle()
        return self._given_up or not self._items

    def settle(self) -> None:
        """Stop writing; what is left is counted as dropped."""
        with self._changed:
            if not self._given_up:
                self._given_up = True
                if self._items:
                    self._health.count("dropped_snapshots", len(self._items))
                self._changed.notify_all()
        if self._thread is not None and not self._items:
            self._thread.join(1.0)  # a thread that ends during interpreter shutdown may abort it

    @property
    def has_saved(self) -> bool:
        """Whether `take_saved` returns anything."""
        return bool(self._saved)

    def take_saved(self, last_step: int | None = None) -> list[SnapshotKey]:
        """Return the keys of the objects that were written since the last call. Called by the thread that writes statistics.

        Args:
            last_step: those of later steps are returned by a later call; None for no limit.
        """
        saved: list[SnapshotKey] = []
        while self._saved and (last_step is None or self._saved[0].step <= last_step):
            saved.append(self._saved.popleft())
        return saved

    def _start_or_wake(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="watchstep-snapshots", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the interpreter ends, or the system permits no further thread
                self._health.fault("snapshot", error)
                self._drop_waiting()
                return
            self._thread = thread
        self._changed.notify_all()

    def _drop_waiting(self) -> None:
        """Count what waits as dropped, and release its memory."""
        while self._items:
            _, taken = self._items.popleft()
            self._names -= taken.names
            for buffer in taken.memory:
                self.memory.release(buffer)
            self._health.count("dropped_snapshots")

    def _run(self) -> None:
        while not self._given_up:
            with self._changed:
                self._changed.wait_for(self._has_work)
                head = self._items[0] if self._items and self._destination and not self._given_up else None
            if head is not None:
                self._process(*head)

    def _has_work(self) -> bool:
        return bool((self._items and self._destination) or self._given_up)

    def _process(self, number: int, taken: TakenSnapshot | StoredFile) -> None:
        try:
            if isinstance(taken, StoredFile):
                self._write_file(taken)
            else:
                self._write(number, taken)
        except _GivenUpError:
            pass  # already counted
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("snapshot", error)
            self._health.count("dropped_snapshots")
        for buffer in taken.memory:
            self.memory.release(buffer)
        with self._changed:
            self._items.popleft()
            self._names -= taken.names

    def _write_file(self, file: StoredFile) -> None:
        assert self._destination is not None
        store, attempt = self._destination
        data = file.data() if callable(file.data) else file.data
        object_ = _Object(file.key(attempt), b"", (data,))
        if not self._upload(store, object_):
            self._health.count("dropped_snapshots")
            return
        self._health.count(file.counter)
        self._health.count("objects")
        self._health.count("bytes", object_.size)

    def _write(self, number: int, taken: TakenSnapshot) -> None:
        assert self._destination is not None
        store, attempt = self._destination
        taken.ready()
        key = SnapshotKey(attempt, self._worker, taken.step, taken.mode, taken.collection)
        object_ = _Object(key.path, header(taken.tensors, taken.metadata), taken.data)
        if not self._upload(store, object_):
            self._health.count("dropped_snapshots")
            return
        if taken.collection:  # snapshots are no input of rules
            self._saved.append(key)
        self._health.count("snapshots")
        self._health.count("objects")
        self._health.count("bytes", object_.size)
        if taken.is_rotated:
            with self._changed:
                if number > self._protected:
                    ring = self._rings[taken.collection]
                    self._rotated.extend(ring.add(object_.path, object_.size))
        self._delete_rotated(store)

    def _upload(self, store: Store, object_: _Object) -> bool:
        """Write with retries. Returns False if an earlier process of this worker wrote the same step."""
        pause, tried = _FIRST_BACKOFF, False
        while True:
            try:
                return store.create_in_parts(object_.path, object_.size, self._parts(object_)) or tried
            except StoreError as error:
                if self._given_up:
                    raise _GivenUpError from error
                self._health.fault("store", error)
            tried = True  # the write may have succeeded, with only its answer lost
            with self._changed:
                if self._changed.wait_for(lambda: self._given_up, pause):
                    raise _GivenUpError
            pause = min(_MAX_BACKOFF, 2 * pause)

    def _parts(self, object_: _Object) -> Iterator[memoryview]:
        if object_.start:
            yield memoryview(object_.start)
        for data in object_.data:
            for start in range(0, len(data), _PIECE):
                if self._given_up:
                    raise _GivenUpError
                yield data.data[start : start + _PIECE]

    def _delete_rotated(self, store: Store) -> None:
        while self._rotated:
            try:
                store.delete(self._rotated[0])
            except StoreError as error:
                self._health.fault("store", error)
                return  # retried after the next snapshot
            self._rotated.popleft()
            self._health.count("rotated_snapshots")


def fitting(sizes: Sequence[int], available: int) -> list[int]:
    """Return indices of sizes that fit into the available bytes, first ones first; a smaller one may follow one that does not fit."""
    chosen = []
    for index, size in enumerate(sizes):
        if size <= available:
            chosen.append(index)
            available -= size
    return chosen
