"""Device memory for the outputs of modules: a ring of rows of statistics for each output, written by the program that is being traced.

`ActivationRing.write` is called at trace time, inside of the function that the program differentiates. The traced program then writes a row of an output into
a `jax.Ref` of the process. A row is (number of the call, number of the update inside of scans, dead channels, saturated channels), then the words of
`watchstep.jax.device_rows.measure`. It is computed in one branch of a ``lax.cond``, if the cadence in another Ref says so, and written in any case: a ``cond`` that
writes to a Ref has no rule for ``jax.checkpoint``. The cadence is a number in device memory, so that a change of it compiles nothing.

An output that is computed several times, such as that of a shared module or of layers under a scan, has the row of its first computation: the backward pass of
``jax.checkpoint`` computes layers again, the first one last. Of micro-batches, the last one has the row.

Programs use these Refs as long as they live. They are therefore those of the process, not of a recording.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from watchstep.format.statistics import StatisticsBatch
from watchstep.jax.device_rows import RowLayout, RowWords, measure, statistics
from watchstep.jax.internals import has_activations, jax_names
from watchstep.jax.ring.ref_memory import (
    buffer_of,
    context_mesh,
    has_failed,
    new_memory,
    new_ref,
    set_buffer,
)


def _outside_of_traces() -> Any:
    """Return a context outside of all traces. `jax.ensure_compile_time_eval` does not apply to Refs that are created in a function that is differentiated."""
    return jax_names.find("outside_of_traces")()


_LEAD = 4
_CALL, _INNER, _DEAD, _SATURATED = range(_LEAD)
"""Words before those of the statistics."""

_MAX_OUTPUTS = 1024
_IMAGE_DIMENSIONS = 4
_MARGIN = 0.01
"""Distance from a bound that counts as saturated, as a share of the range, as with PyTorch."""

_RECTIFIERS = frozenset({"ReLU", "ReLU6"})
_BOUNDS = {
    "Sigmoid": (0.0, 1.0),
    "Hardsigmoid": (0.0, 1.0),
    "Tanh": (-1.0, 1.0),
    "Hardtanh": (-1.0, 1.0),
    "Softsign": (-1.0, 1.0),
}


@dataclass(frozen=True)
class Output:
    """An output of a module, or of an activation function that a module calls.

    Attributes:
        name: its name, as ``layers.0:output`` or ``layers.0:relu_0``.
        module: path of the module.
        module_type: class of the module; for a function, its kind, such as ``ReLU``.
        bases: names of the classes of the module.
        order: its rank in the order of computation.
        channel_last: whether images have their channels in the last dimension.
    """

    name: str
    module: str
    module_type: str
    bases: tuple[str, ...]
    order: int
    channel_last: bool = True

    def channel_axis(self, dimensions: int) -> int:
        """Return the dimension of the channels."""
        return 1 if dimensions >= _IMAGE_DIMENSIONS and not self.channel_last else dimensions - 1

    def counts_channels(self, shape: tuple[int, ...]) -> bool:
        """Whether channels of an output of this shape can be dead or saturated."""
        return (
            len(shape) > 1
            and 0 not in shape
            and (self.module_type in _RECTIFIERS or self.module_type in _BOUNDS)
        )


@dataclass(eq=False)
class OutputRows:
    """The rows of an output in device memory.

    Attributes:
        output: the output.
        shape: its shape.
        dtype: its dtype, by NumPy's name.
        layout: what the words of a row belong to.
        ref: the Ref, of shape (slots, device rows, words).
    """

    output: Output
    shape: tuple[int, ...]
    dtype: str
    layout: RowLayout
    ref: Any

    def channels(self, row: NDArray[Any]) -> tuple[float, float, float]:
        """Return the numbers of channels, dead ones and saturated ones; NaN where that does not apply."""
        if not self.output.counts_channels(self.shape):
            return np.nan, np.nan, np.nan
        count = float(self.shape[self.output.channel_axis(len(self.shape))])
        dead = float(row[0, _DEAD]) if self.output.module_type in _RECTIFIERS else np.nan
        saturated = float(row[0, _SATURATED]) if self.output.module_type in _BOUNDS else np.nan
        return count, dead, saturated

    def statistics(self, row: NDArray[Any]) -> StatisticsBatch:
        """Return the statistics of a row."""
        words = np.ascontiguousarray(row[:, _LEAD:])
        is_narrow = bool(self.layout.narrow)
        return statistics(RowWords(words if is_narrow else None, None if is_narrow else words, self.layout))


@dataclass(frozen=True)
class WrittenRow:
    """A row that a program has written.

    Attributes:
        rows: what it is a row of.
        call: number of the call that has written it.
        inner: number of the update inside of scans that it belongs to.
        words: the row.
    """

    rows: OutputRows
    call: int
    inner: int
    words: NDArray[Any]


@dataclass(frozen=True)
class ActivationSnapshot:
    """Copies of all rows that are on their way to the host.

    Attributes:
        generation: how often the memory was replaced.
        counters: the numbers of calls and of updates inside of scans so far.
        members: what the copies are rows of.
        copies: the rows of each.
    """

    generation: int
    counters: Any
    members: tuple[OutputRows, ...]
    copies: tuple[Any, ...]

    def read(self) -> tuple[int, int, list[WrittenRow]]:
        """Return the number of calls, the number of updates inside of scans, and the rows. Waits for the device."""
        with jax.transfer_guard("allow"):
            calls, inner = (int(number) for number in np.asarray(self.counters))
            written: list[WrittenRow] = []
            for rows, copy in zip(self.members, self.copies, strict=True):
                written.extend(
                    WrittenRow(rows, int(words[0, _CALL]), int(words[0, _INNER]), words)
                    for words in np.asarray(copy)
                    if words[0, _CALL] >= 0
                )
        return calls, inner, written


class ActivationRing:
    """The rows of all outputs that programs of this process write. `write` and the counters are called at trace time.

    Attributes:
        slots: rows of an output that is traced from now on.
        generation: how often the memory was replaced.
    """

    def __init__(self) -> None:
        self.slots = 4
        self.generation = 0
        self._lock = threading.RLock()
        self._every = 0
        self._counters: Any = None
        self._cadence: Any = None
        self._members: dict[Any, OutputRows] = {}

    @property
    def is_traced(self) -> bool:
        """Whether a program has been traced that writes rows."""
        return bool(self._members)

    @property
    def is_writing(self) -> bool:
        """Whether programs write rows, at some of their updates."""
        return self._every > 0 and bool(self._members)

    def write(self, output: Output, array: Any) -> None:
        """Add operations to the program that is being traced, which write a row of an output each time they run, if one is due.

        Args:
            output: the output.
            array: a real floating-point array of the innermost trace.

        Raises:
            ValueError: it is not observed, with the reason.
        """
        rows = self._rows_of(output, array)
        counters, every = self._counters[...], self._cadence[0]
        step = jnp.maximum(every, 1)
        slot = (counters[_INNER] // step) % rows.ref.shape[0]
        before = rows.ref[slot]

        def measured() -> Any:
            words = measure([array])
            body = words.narrow if words.wide is None else words.wide
            lead = jnp.stack([counters[_CALL], counters[_INNER], *_channel_counts(output, array)])
            lead = jnp.broadcast_to(lead.astype(body.dtype), (body.shape[0], _LEAD))
            return jnp.concatenate([lead, body], axis=1)

        is_first = before[0, _CALL] != counters[_CALL].astype(before.dtype)
        is_due = (every > 0) & (counters[_INNER] % step == 0) & is_first
        rows.ref[slot] = lax.cond(is_due, measured, lambda: before)

    def count_call(self) -> None:
        """Let the program that is being traced count a call."""
        self._ensure_counters()
        self._counters[_CALL] = self._counters[_CALL] + 1

    def count_inner(self, emitted: Any) -> None:
        """Let the program that is being traced count an update inside of a scan, and a call for each of its micro-batches.

        Args:
            emitted: whether this is an update, bool of shape (); None if it is.
        """
        self._ensure_counters()
        one = np.int32(1) if emitted is None else jnp.asarray(emitted).reshape(()).astype(np.int32)
        self._counters[...] = self._counters[...] + jnp.stack([np.int32(1), one])

    def _ensure_counters(self) -> None:
        if not has_activations():
            raise ValueError("activations are not observed with this version of jax")
        if jax.process_count() > 1:
            raise ValueError("activations are observed in programs of one process")
        mesh = context_mesh()
        if mesh is not None and not mesh.empty:
            raise ValueError("activations under a mesh of the context are not observed")
        with self._lock:
            if self._counters is None:
                counters = self._new_ref(np.zeros(2, np.int32))
                self._cadence = self._new_ref(np.array([self._every], np.int32))
                self._counters = counters

    def _rows_of(self, output: Output, array: Any) -> OutputRows:
        self._ensure_counters()
        key = output.name, output.module_type, tuple(array.shape), array.dtype.name, self.slots
        with self._lock:
            rows = self._members.get(key)
            if rows is None:
                if len(self._members) >= _MAX_OUTPUTS:
                    raise ValueError(f"more than {_MAX_OUTPUTS} outputs of modules are not observed")
                struct = jax.ShapeDtypeStruct(array.shape, array.dtype)
                words: RowWords = jax.eval_shape(measure, [struct])
                body = words.narrow if words.wide is None else words.wide
                if body is None:
                    raise ValueError("outputs without elements are not observed")
                shape = (self.slots, body.shape[0], _LEAD + body.shape[1])
                ref = self._new_ref(np.full(shape, -1, body.dtype))
                rows = OutputRows(output, tuple(array.shape), array.dtype.name, words.layout, ref)
                self._members[key] = rows
            rows.output = output  # its order is that of the newest program
        return rows

    def _new_ref(self, array: NDArray[Any]) -> Any:
        with _outside_of_traces():
            ref = new_ref(array, None)
        if buffer_of(ref) is None or ref.dtype != array.dtype:
            raise ValueError(f"activations are not observed with jax {jax.__version__}")
        return ref

    def set_cadence(self, every: int) -> None:
        """Choose how often rows are written from the next dispatch on: at every call or update; 0 for never."""
        with self._lock:
            if every == self._every:
                return
            self._every = every
            if self._cadence is not None:
                with jax.transfer_guard("allow"), _outside_of_traces():
                    set_buffer(self._cadence, new_memory(np.array([every], np.int32), None))

    def check(self) -> bool:
        """Make the Refs usable by the next dispatch, as `StepRing.check`. Never raises, and does not wait for the device."""
        try:
            with self._lock:
                buffers = [(ref, buffer_of(ref)) for ref in self._refs()]
                if any(has_failed(buffer) for _, buffer in buffers):
                    self._replace()
                    return True
                for ref, buffer in buffers:
                    if buffer.sharding.num_devices > 1:
                        set_buffer(ref, buffer.addressable_shards[0].data)
        except Exception:  # noqa: BLE001 - never into the program, which is then called in its own form
            return False
        return True

    def _refs(self) -> list[Any]:
        if self._counters is None:
            return []
        return [self._counters, self._cadence, *(rows.ref for rows in self._members.values())]

    def clear(self) -> None:
        """Forget what was written, and count from 0."""
        with self._lock:
            if self._counters is not None:
                self._replace()

    def _replace(self) -> None:
        """Give new memory to the Refs."""
        with jax.transfer_guard("allow"), _outside_of_traces():  # a recording may start in a trace
            set_buffer(self._counters, new_memory(np.zeros(2, np.int32), None))
            set_buffer(self._cadence, new_memory(np.array([self._every], np.int32), None))
            for rows in self._members.values():
                set_buffer(rows.ref, new_memory(np.full(rows.ref.shape, -1, rows.ref.dtype), None))
        self.generation += 1

    def snapshot(self) -> ActivationSnapshot | None:
        """Start a copy of all rows to the host after a dispatch, without waiting; None before anything was traced."""
        with self._lock:
            members = tuple(self._members.values())
            if not members or not self.check():
                return None
            with jax.transfer_guard("allow"):
                buffers = [buffer_of(ref) for ref in (self._counters, *(rows.ref for rows in members))]
                copies = jax.device_put(buffers, [buffer.sharding for buffer in buffers], may_alias=False)
                for copy in copies:
                    copy.copy_to_host_async()
            return ActivationSnapshot(self.generation, copies[0], members, tuple(copies[1:]))


def _channel_counts(output: Output, array: Any) -> tuple[Any, Any]:
    """Return the numbers of channels that are zero for every example, and that are at a bound for every example."""
    none = np.int32(0)
    if not output.counts_channels(array.shape):
        return none, none
    axis = output.channel_axis(array.ndim)
    every_example: Callable[[Any], Any] = functools.partial(
        jnp.all, axis=tuple(place for place in range(array.ndim) if place != axis)
    )
    if output.module_type in _RECTIFIERS:
        return jnp.sum(every_example(array == 0)).astype(np.int32), none
    low, high = _BOUNDS[output.module_type]
    distance = jnp.abs(array - (low + high) / 2)
    is_saturated = every_example(distance >= (0.5 - _MARGIN) * (high - low))
    return none, jnp.sum(is_saturated).astype(np.int32)


activation_ring = ActivationRing()
"""The ring of this process."""
