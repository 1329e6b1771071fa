"""Full tensors of collections: at which steps they are saved, the memory that they are copied to, and their limits.

Each step, mode and collection becomes one object. A tensor is copied when the program computes it, into memory that is reused, and the
object is handed to the writer when the step ends. Of several micro-batches of a step, and of several batches of an evaluation,
the first due one is saved. A tensor in several due collections is saved once.

What does not fit into a limit is left out as a whole, counted, and named in the object and in the recorder's health.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from watchstep.capture.config import CaptureConfig, Collection, TensorLimits
from watchstep.capture.health import RecorderHealth
from watchstep.capture.schedule import Schedule
from watchstep.capture.tensors.snapshots import Occasion, SnapshotWriter, TakenSnapshot
from watchstep.format.snapshot import (
    HEADER_METADATA,
    Described,
    TensorPart,
    aligned_order,
    infos_metadata,
    parts_metadata,
)
from watchstep.format.tensors import Mode, TensorInfo, bounded_word
from watchstep.platform.program_errors import is_of_program

CHUNK_BYTES = 4 * 1024 * 1024
"""Size of the memory that small tensors of a collection share, as long as the size of the collection is not known from an earlier step."""

SELECTABLE = frozenset({"output", "input", "label", "custom"})
"""Roles of tensors of which a part may be selected."""

_ALIGNMENT = 64
_PAGE_BYTES = 4096
_HOUR_SECONDS = 3600.0
_INTERVAL_SECONDS = 10.0
_MAX_NAMES = 5
_MAX_REASONS = 10

Copy = Callable[[NDArray[np.uint8]], Callable[[], None] | None]
"""Starts to copy a tensor to memory of its size, and returns a function that waits for the copy, or None if it is done."""


@dataclass(frozen=True)
class DueTensor:
    """A tensor that is saved.

    Attributes:
        info: describes it for readers and rules.
        dtype: its element type in the object, by safetensors' name.
        shape: its shape in the object.
        part: which part of a larger tensor it is; None for a whole tensor.
        derived: a number that the program did not log itself; one that it logs by the same name replaces it.
        replaces: it replaces an earlier tensor of the same name, step and mode; by default the first one is saved.
    """

    info: TensorInfo
    dtype: str
    shape: tuple[int, ...]
    part: TensorPart | None = None
    derived: bool = False
    replaces: bool = False


_Object = tuple[Mode, str]
"""Mode and collection of an object."""


@dataclass
class _Staged:
    """The tensors of one collection at one step so far.

    Attributes:
        step, mode: when they were computed.
        tensors: descriptions by name.
        data: their bytes by name.
        infos: their descriptions for readers and rules, by name.
        parts: the placement of tensors that are parts of a larger one.
        memory: buffers that they occupy.
        free: the unused end of the last buffer.
        expected: bytes of their memory at the last saved step; 0 before.
        used: bytes of their memory.
        dropped: whether it is not written, because too many objects wait for the store.
        ready: functions that wait for copies.
        missing: names of tensors that were left out.
        derived: names of numbers that the program did not log itself.
    """

    step: int
    mode: Mode
    expected: int = 0
    used: int = 0
    dropped: bool = False
    tensors: dict[str, Described] = field(default_factory=dict)
    data: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    infos: dict[str, TensorInfo] = field(default_factory=dict)
    parts: dict[str, TensorPart] = field(default_factory=dict)
    memory: list[NDArray[np.uint8]] = field(default_factory=list)
    free: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    ready: list[Callable[[], None]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    derived: set[str] = field(default_factory=set)

    def remove(self, name: str) -> None:
        """Remove a tensor that another one replaces. Its memory is in use until the object is written."""
        parts: tuple[dict[str, Any], ...] = (self.tensors, self.data, self.infos, self.parts)
        for part in parts:
            part.pop(name, None)
        self.derived.discard(name)


class _HourlyBytes:
    """Bytes of a collection that were saved within the last hour, counted in intervals of ten seconds.

    Attributes:
        limit: their limit; None for no limit.
    """

    def __init__(self, limit: int | None, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._clock = clock
        # The first and the last time of an interval, and its bytes.
        self._saved: deque[tuple[float, float, int]] = deque()
        self._total = 0

    def fits(self, size: int) -> bool:
        """Whether bytes are within the limit."""
        if self.limit is None:
            return True
        now = self._clock()
        while self._saved and now - self._saved[0][1] >= _HOUR_SECONDS:
            self._total -= self._saved.popleft()[2]
        return self._total + size <= self.limit

    def add(self, size: int) -> None:
        """Count bytes that were saved."""
        if self.limit is None:
            return
        first = now = self._clock()
        self._total += size
        if self._saved and now - self._saved[-1][0] < _INTERVAL_SECONDS:
            first, _, before = self._saved.pop()
            size += before
        self._saved.append((first, now, size))


class TensorCapture:
    """Saves full tensors of the configured collections. Used on the training thread.

    Attributes:
        active: whether any collection's tensors are saved; if not, nothing else has to be called.
    """

    def __init__(
        self,
        config: CaptureConfig,
        schedule: Schedule,
        writer: SnapshotWriter,
        health: RecorderHealth,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule = schedule
        self._writer = writer
        self._health = health
        self._clock = clock
        self._collections: dict[str, Collection] = {}
        self._hourly: dict[str, _HourlyBytes] = {}
        self._staged: dict[_Object, _Staged] = {}
        self._sizes: dict[_Object, int] = {}
        self._handed_over: set[_Object] = set()
        self._handed_step = -1
        self._protected_step = -1
        self._left_out: dict[str, dict[str, dict[str, None]]] = {}
        self.active = False
        self.configure(config.chosen)

    def configure(self, collections: Mapping[str, Collection]) -> None:
        """Set the collections, of which those with a cadence for tensors are saved. May be called on any thread."""
        chosen = {
            name: collection for name, collection in collections.items() if collection.tensors is not None
        }
        for name, collection in chosen.items():
            limits = collection.tensor_limits
            self._hourly.setdefault(name, _HourlyBytes(None, self._clock)).limit = limits.hour_bytes
            self._writer.limit_ring(name, limits.ring_bytes)
        self._collections = chosen  # assigned at once, because the training thread reads it
        self.active = bool(chosen)

    def any_due(self, step: int) -> bool:
        """Whether tensors of any collection are saved at a step in mode train."""
        return self.active and self.due(self._collections, step) is not None

    def due(self, collections: Iterable[str], step: int, mode: Mode = "train") -> str | None:
        """Return the first of some collections whose tensors are saved at a step; None if those of none are.

        In modes other than train the number of the forward pass counts, or the step if there was no pass in this mode.
        """
        for name in collections:
            collection = self._collections.get(name)
            if collection is None or collection.tensors is None or not collection.tensors.applies_in(mode):
                continue
            passes = None if mode == "train" else self._schedule.pass_number(mode)
            number = step if passes is None else passes
            if collection.tensors.every is None:
                if number in collection.tensors.steps:
                    return name
            elif collection.tensors.due(number):
                return name
        return None

    def limits(self, collection: str) -> TensorLimits:
        """Return the limits of a collection's tensors."""
        configured = self._collections.get(collection)  # None if it was removed after it was due
        return TensorLimits() if configured is None else configured.tensor_limits

    def add(self, collection: str, step: int, mode: Mode, tensor: DueTensor, copy: Copy) -> bool:
        """Copy a tensor, unless it has been saved at this step in this mode, or does not fit.

        Args:
            collection: the collection that is due.
            step: the step of the run.
            mode: the mode.
            tensor: what is saved.
            copy: copies it; not called for a tensor without elements.

        Returns:
            Whether it was copied.
        """
        info = tensor.info.bounded()
        name, described = info.name, Described(info.name, tensor.dtype, tensor.shape)
        if name == HEADER_METADATA:
            self.unsupported(collection, name, "have a name that the format reserves")
            return False
        if not self._makes_room(name, step, mode, collection, tensor):
            return False
        staged = self._staged.get((mode, collection))
        if staged is None:
            expected = self._sizes.get((mode, collection), 0)
            staged = _Staged(step, mode, expected, dropped=self._writer.is_full)
            self._staged[mode, collection] = staged
        if staged.dropped or name in staged.missing:
            return False
        size, hourly = described.length, self._hourly[collection]
        if not hourly.fits(size):
            return self._leave_out(staged, collection, name, "exceeded the bytes of an hour")
        memory = self._memory(staged, size)
        if memory is None:
            return self._leave_out(staged, collection, name, "did not fit into the memory for tensors")
        try:
            waits = copy(memory) if size else None
        except Exception as error:  # a tensor of the program's own class may raise anything
            if is_of_program(error):
                raise
            return self._leave_out(staged, collection, name, f"could not be copied ({type(error).__name__})")
        hourly.add(size)
        if waits is not None:
            staged.ready.append(waits)
        staged.tensors[name], staged.data[name], staged.infos[name] = described, memory, info
        if tensor.part is not None:
            staged.parts[name] = tensor.part
        if tensor.derived:
            staged.derived.add(name)
        return True

    def add_number(
        self,
        info: TensorInfo,
        number: float,
        step: int,
        mode: Mode,
        *,
        derived: bool = False,
        replaces: bool = False,
    ) -> None:
        """Save a logged number as a float64 of shape (), if its collection is due. The arguments are those of `DueTensor`."""
        collection = self.due(info.collections, step, mode)
        if collection is not None:
            values = np.array([number], "<f8").view(np.uint8)
            due = DueTensor(info, "F64", (), derived=derived, replaces=replaces)
            self.add(collection, step, mode, due, lambda memory: np.copyto(memory, values))

    def unsupported(self, collection: str, name: str, reason: str) -> None:
        """Report a tensor that cannot be saved, for example because of its dtype or layout."""
        self._report(collection, bounded_word(name), reason)

    def discard(self, tensors: Iterable[TensorInfo], mode: Mode) -> None:
        """Remove tensors of the current step, which were computed for an update that was not made."""
        for info in tensors if self._staged else ():
            name = info.bounded().name
            for (other, _), staged in self._staged.items():
                if other == mode:
                    staged.remove(name)

    def protect(self, step: int) -> None:
        """Never delete the objects of a step, because something went wrong at it."""
        self._protected_step = step

    def hand_over(self) -> bool:
        """Pass the tensors of the step to the writer, when the step ends. Returns whether there are any.

        A step that never ends may be handed over several times. Its first object of a mode and collection is the only one.
        """
        if not self._staged:
            return False
        all_staged, self._staged = self._staged, {}
        for key, staged in all_staged.items():
            if staged.step != self._handed_step:
                self._handed_step = staged.step
                self._handed_over.clear()
            self._handed_over.add(key)
            if staged.dropped:
                self._health.count("dropped_snapshots")
                continue
            self._sizes[key] = staged.used
            if staged.tensors or staged.missing:
                is_rotated = staged.step != self._protected_step
                self._writer.offer(_taken(key[1], staged, is_rotated=is_rotated))
            else:
                self._release(staged)
        return True

    def _makes_room(self, name: str, step: int, mode: Mode, collection: str, tensor: DueTensor) -> bool:
        """Return whether a tensor is saved, and remove an earlier one that it replaces."""
        if step == self._handed_step and (mode, collection) in self._handed_over:
            return False
        for (other, _), staged in self._staged.items():
            if other == mode and name in staged.tensors:
                is_derived = name in staged.derived
                if is_derived == tensor.derived and not tensor.replaces:
                    return False
                if tensor.derived and not is_derived:
                    return False
                staged.remove(name)
        return True

    def _memory(self, staged: _Staged, size: int) -> NDArray[np.uint8] | None:
        """Return memory of a size, aligned for every element type; None if it is not available.

        A buffer is as large as the collection was at its last saved step, so that it is reused: the first write to new memory costs
        several times as much as the copy.
        """
        needed = -(-size // _ALIGNMENT) * _ALIGNMENT
        if needed > len(staged.free):
            available = self._writer.memory.available
            if staged.expected:
                wanted = max(staged.expected - staged.used, min(staged.used // 4, CHUNK_BYTES))
            else:
                wanted = CHUNK_BYTES if needed <= CHUNK_BYTES // 2 else needed
            wanted = max(needed, wanted)
            wanted = -(-wanted // _PAGE_BYTES) * _PAGE_BYTES
            buffer = self._writer.memory.take(max(size, min(wanted, available)))
            if buffer is None:
                return None
            staged.memory.append(buffer)
            staged.free = buffer
        staged.used += needed
        memory, staged.free = staged.free[:size], staged.free[needed:]
        return memory

    def _leave_out(self, staged: _Staged, collection: str, name: str, reason: str) -> Literal[False]:
        staged.missing.append(name)
        self._report(collection, name, reason)
        return False

    def _report(self, collection: str, name: str, reason: str) -> None:
        self._health.count("dropped_tensors")
        reasons = self._left_out.setdefault(collection, {})
        names = reasons.get(reason, {})
        if name in names or len(names) > _MAX_NAMES or (not names and len(reasons) >= _MAX_REASONS):
            return
        names[name] = None
        reasons[reason] = names
        texts = [
            ", ".join(list(names)[:_MAX_NAMES]) + (", …" if len(names) > _MAX_NAMES else "") + f" {reason}"
            for reason, names in reasons.items()
        ]
        self._health.note(f"tensors of {collection}", "; ".join(texts))

    def _release(self, staged: _Staged) -> None:
        for buffer in staged.memory:
            self._writer.memory.release(buffer)


def _taken(collection: str, staged: _Staged, *, is_rotated: bool) -> TakenSnapshot:
    described = list(staged.tensors.values())
    ordered = [described[place] for place in aligned_order(described)]
    waits = tuple(staged.ready)

    def ready() -> None:
        for wait in waits:
            wait()

    return TakenSnapshot(
        step=staged.step,
        mode=staged.mode,
        occasion=Occasion("cadence"),
        parameters="",
        tensors=tuple(ordered),
        data=tuple(staged.data[tensor.name] for tensor in ordered),
        memory=tuple(staged.memory),
        missing=tuple(staged.missing),
        ready=ready,
        collection=collection,
        is_rotated=is_rotated,
        describe=lambda: {**parts_metadata(staged.parts), **infos_metadata(staged.infos.values())},
    )
