"""Traces chosen steps of a recorded training, and writes them to the run in the background.

A step begins where the one before it is finished, and ends where it is finished itself: at the end of the optimizer's step, or at
`Hook.step`. Both are on the training thread, between operations. What cannot be traced is left out and counted, and nothing waits:

- at most one hook of a process traces at a time
- a step that begins in another thread, or within a backward pass, as with optimizers in hooks of gradients, is not traced
- a step that begins within a mode of the program, a compiled function or inference mode is not traced: what ends there would end
  the tracer's mode, or restore the state of PyTorch's dispatcher from before it
- where a step ends within one of them, nothing more is recorded, and the tracer's mode ends at a later backward pass or step
- traces that wait for the store take at most `TraceSteps.max_bytes`, approximately
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from watchstep.capture.health import RecorderHealth
from watchstep.capture.steps.own_work import own_work
from watchstep.capture.tensors.snapshots import SnapshotWriter, StoredFile
from watchstep.format.layout import TraceKey
from watchstep.pytorch import internals, losses
from watchstep.trace.operations import Trace, TraceMode
from watchstep.trace.report import render_unusual
from watchstep.trace.trace_file import encode_trace
from watchstep.trace.trace_steps import TraceSteps
from watchstep.trace.tracer import TraceConfig, Tracer
from watchstep.trace.unusual import unusual_operations

_Error = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
_SHARE = 0.5
"""Share of the memory at which the steps so far are written, though the range goes on."""
_ALL = 2**62

_tracing = threading.Lock()
"""Held by the hook that traces. A second dispatch mode would observe the first one's operations."""


_leaving: set[OnlineTracing] = set()
"""Those that are closed, and whose mode could not end yet. Listeners of losses are only referred to weakly."""


def _restores_dispatcher(frame: FrameType | None) -> bool:
    """Whether the code around a frame restores the state of PyTorch's dispatcher when it ends: compiled functions, and inference mode.

    A mode that begins or ends there is on the stack without being enabled in the dispatcher afterwards, or reversely, and operations
    then fail.
    """
    return torch.is_inference_mode_enabled() or internals.runs_compiled(frame)


class OnlineTracing:
    """Traces the chosen steps of one hook."""

    def __init__(
        self,
        config: TraceSteps,
        model: nn.Module,
        worker: int,
        health: RecorderHealth,
        writer: SnapshotWriter,
    ) -> None:
        """Create it; `start` begins.

        Args:
            config: What to trace.
            model: Its modules and parameters are named.
            worker: The rank.
            health: Counts what is left out.
            writer: Writes the traces.

        Raises:
            ConfigError: a dtype of the configuration does not exist.
        """
        self._config = config
        self._worker = worker
        self._health = health
        self._writer = writer
        self._tracer = Tracer(
            model,
            TraceConfig(
                TraceMode(config.mode),
                None,
                config.operations,
                config.modules,
                config.dtypes,
                ring_steps=_ALL,
                ring_bytes=config.max_bytes,
            ),
            keeps_hooks=True,
        )
        self._process = os.getpid()
        self._thread = threading.get_ident()
        self._open = ExitStack()
        self._mode: Any = None  # the dispatch mode of the step that runs
        self._first = -1  # the first step that is not yet written
        self._last = -1
        self._running = -1  # the step that runs
        self._is_over = False  # whether that step is finished, and its mode could not end yet
        self._is_closed = False
        self._pending = 0
        self._lock = threading.Lock()

    def start(self, step: int) -> None:
        """Begin with the step that is not finished, if it is chosen."""
        self._contained(lambda: self._begin(step))

    def finished(self, step: int) -> None:
        """A step is finished, and the next one begins. Never raises."""
        if self._mode is None and not self._config.chooses(step + 1):
            return
        self._contained(lambda: self._finish(step))

    def backward_begins(self) -> None:
        """Leave the mode of a step that is over. See `LossListener`; this listens only meanwhile."""
        self._contained(self._leave_late)

    def found(self, loss: losses.BackwardLoss) -> None:
        """Do nothing."""

    def failed(self, error: Exception) -> None:
        """Do nothing: watches count it."""

    def close(self) -> None:
        """End a step that runs, and write what is left."""
        self._contained(self._close)
        self._tracer.release_model()

    def _contained(self, work: Callable[[], None]) -> None:
        if os.getpid() != self._process:
            return
        own_work.depth += 1
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("trace", error)
        finally:
            own_work.depth -= 1

    def _begin(self, step: int) -> None:
        if not self._config.chooses(step):
            return
        if (reason := self._obstacle()) or not _tracing.acquire(blocking=False):
            self._health.count("left_out_traces")
            self._health.note("trace", reason or "another hook of this process traces")
            return
        try:
            self._open.enter_context(self._tracer.step(step))
        except BaseException:
            _tracing.release()
            raise
        self._mode = internals.current_dispatch_mode.value()
        self._running = step
        if self._first < 0:
            self._first = step

    def _obstacle(self) -> str:
        if threading.get_ident() != self._thread:
            return "steps that begin in another thread than Hook.watch was called in are not traced"
        if internals.current_node.value() is not None:
            return "steps that begin within a backward pass are not traced"
        if internals.current_dispatch_mode.value() is not None or any(
            not isinstance(mode, internals.device_context.value) for mode in internals.function_modes.value()
        ):
            return "steps that begin within a dispatch or function mode of the program are not traced"
        if _restores_dispatcher(sys._getframe()):  # noqa: SLF001 - the documented way to a frame
            return "steps that begin within a compiled function or inference mode are not traced"
        if self._pending > self._config.max_bytes:
            return "traces wait for the store"
        return ""

    def _finish(self, step: int) -> None:
        if self._mode is not None:
            if not self._can_end():
                self._wait_to_end(step)
                return
            self._end_and_write(step)
        self._begin(step + 1)

    def _end_and_write(self, step: int) -> None:
        self._end(step)
        full = self._tracer.kept_bytes > _SHARE * self._config.max_bytes
        if full or not self._config.chooses(step + 1):
            self._write()

    def _wait_to_end(self, step: int) -> None:
        if self._config.chooses(step + 1):
            self._health.count("left_out_traces")
        if self._is_over:
            # The program's backward passes are not observed.
            self._tracer.leave_eager()
            return
        self._health.note(
            "trace",
            "the program is in a dispatch mode, compiled function or thread of its own at the end of a step",
        )
        self._is_over, self._last = True, step
        self._tracer.stop()
        losses.listen(self)

    def _leave_late(self) -> None:
        """End the mode of a step that is over, or of which nothing is recorded after the close, if this is a place for it."""
        if self._mode is None or not self._can_end():
            return
        self._end(self._last)
        if not self._is_closed:
            self._write()

    def _can_end(self) -> bool:
        return (
            threading.get_ident() == self._thread
            and internals.current_dispatch_mode.value() is self._mode
            and not _restores_dispatcher(sys._getframe())  # noqa: SLF001 - as above
        )

    def _end(self, step: int, error: _Error = (None, None, None)) -> None:
        self._mode = None
        if not self._is_over:
            self._last = step
        self._is_over = False
        try:
            self._open.__exit__(*error)
        finally:
            _tracing.release()
            losses.forget(self)
            _leaving.discard(self)

    def _close(self) -> None:
        self._is_closed = True
        if self._mode is not None:
            if not self._can_end():
                self._health.count("left_out_traces")
                self._tracer.stop(discards=True)
                # The mode passes operations on until a backward pass of the thread that entered it.
                self._is_over = True
                _leaving.add(self)
                losses.listen(self)
            else:
                # An exception that ends the training also ends the step.
                self._end(self._running, (None, None, None) if self._is_over else sys.exc_info())
        self._write()

    def _explain(self, trace: Trace) -> None:
        """Print what is unusual in the step that the configuration names, if the trace has it."""
        step = self._config.explained
        if step is None or step not in trace.steps:
            return
        for line in render_unusual(trace, unusual_operations(trace, step)).splitlines():
            sys.stderr.write(f"watchstep: {line}\n")

    def _write(self) -> None:
        """Hand the steps so far to the writer, which also converts them."""
        if not 0 <= self._first <= self._last:
            return
        size, take = self._tracer.kept_bytes, self._tracer.take()
        first, last, self._first = self._first, self._last, -1
        with self._lock:
            self._pending += size

        def encoded() -> NDArray[np.uint8]:
            try:
                trace: Trace = take()
                self._explain(trace)
                return np.frombuffer(encode_trace(trace), np.uint8)
            finally:
                with self._lock:
                    self._pending -= size

        worker = self._worker
        self._writer.offer(
            StoredFile(lambda attempt: TraceKey(attempt, worker, first, last).path, encoded, "traces")
        )
