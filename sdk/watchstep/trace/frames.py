"""Frames: the magnitudes of everything that each module computed, as Hugging Face's ``DebugUnderflowOverflow`` prints them.

A frame is one call of a module, or its backward pass: its class, and the smallest and largest magnitude of the result of each operation in
it. Frames come from an operation trace. So outputs in dicts and lists, keyword arguments, functional operations, gradients, empty tensors,
booleans, fp8 and compiled modules are included, and a mask with -inf is no alarm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from watchstep.errors import ConfigError, WatchstepError
from watchstep.platform.terminal_text import printable
from watchstep.trace.operations import Operation, TensorHealth, Trace, TracedTensor, TraceMode
from watchstep.trace.origins import BadOrigin, diagnose
from watchstep.trace.report import render_diagnosis
from watchstep.trace.tensor_health import health_of
from watchstep.trace.tracer import TraceConfig, Tracer

_TITLE = "abs min  abs max  metadata"


class OverflowDetectedError(WatchstepError):
    """NaN or infinity reached a loss, a gradient, a parameter or an output of the model."""


@dataclass(frozen=True)
class ModuleFrame:
    """One call of a module, or its backward pass.

    Attributes:
        step: number of the batch.
        module: path of the module; empty for operations of the whole model itself and outside of it.
        module_type: class of the module; empty for these.
        phase: as in `Operation`.
        operations: its own operations, without those of inner modules.
    """

    step: int
    module: str
    module_type: str
    phase: str
    operations: tuple[Operation, ...]


def frames_of(trace: Trace, module_types: dict[str, str] | None = None) -> list[ModuleFrame]:
    """Group the operations of a trace by calls of modules.

    Args:
        trace: The trace, in mode ``statistics``.
        module_types: path → class of the modules of the model.
    """
    frames: list[ModuleFrame] = []
    group: list[Operation] = []
    for operation in trace.operations:
        if group and _call(group[-1]) != _call(operation):
            frames.append(_frame(group, module_types or {}))
            group = []
        group.append(operation)
    if group:
        frames.append(_frame(group, module_types or {}))
    return frames


def _call(operation: Operation) -> tuple[int, str, str]:
    return operation.step, operation.module, operation.phase


def _frame(operations: Sequence[Operation], module_types: dict[str, str]) -> ModuleFrame:
    first = operations[0]
    kind = module_types.get(first.module, "") if first.module else ""
    return ModuleFrame(first.step, first.module, kind, first.phase, tuple(operations))


def render_frames(frames: Iterable[ModuleFrame]) -> str:
    """Render frames as a table: magnitudes, and what they belong to."""
    return "".join(f"{printable(line)}\n" for line in (_TITLE, *_frame_lines(frames)))


def _frame_lines(frames: Iterable[ModuleFrame]) -> Iterator[str]:
    for frame in frames:
        title = f"{frame.module or '(program)'} {frame.module_type}".rstrip()
        yield f"{'':18}{title}{'' if frame.phase == 'forward' else f', {frame.phase}'}"
        for operation in frame.operations:
            if operation.is_view and not any(
                output.name.endswith(":gradient") for output in operation.outputs
            ):
                continue
            short = operation.name.removeprefix("aten.").removesuffix(".default")
            for place, output in enumerate(operation.outputs):
                position = f"[{place}]" if len(operation.outputs) > 1 else ""
                name = f" ({output.name})" if output.name else ""
                yield f"{_magnitudes(output)} {short}{position}{name}{_counts(output.health)}"


def _magnitudes(tensor: TracedTensor) -> str:
    health = tensor.health
    smallest = None if health is None else health.abs_minimum
    largest = None if health is None else health.abs_maximum
    if health is None:
        reason = "empty" if 0 in tensor.shape else tensor.dtype[:8]
        return f"{reason:>8} {'':>8}"
    return f"{_number(smallest)} {_number(largest)}"


def _number(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{value:8.2e}"


def _counts(health: TensorHealth | None) -> str:
    return "" if health is None or health.is_finite else f" <- {health}"


@dataclass(frozen=True)
class FramesConfig:
    """What `OverflowFrames` prints, and when it ends the training.

    Attributes:
        max_frames: number of frames before and including the first bad one that are printed.
        batches: numbers of batches, from 0, whose frames are all printed, bad or not.
        abort_after_batch: number of a batch after which the training is ended; None for no limit.
        raises: whether `OverflowDetectedError` is raised at the end of a bad batch.
    """

    max_frames: int = 21
    batches: tuple[int, ...] = ()
    abort_after_batch: int | None = None
    raises: bool = True

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: the number of frames is not positive.
        """
        if self.max_frames < 1:
            raise ConfigError(f"FramesConfig(max_frames={self.max_frames})", "use a number from 1")


class OverflowFrames:
    """Prints the last frames of a batch in which something overflowed, and ends the training.

    Every batch is traced with statistics of each operation, so this is a tool for debugging.

    Example::

        frames = OverflowFrames(model)
        for batch in batches:
            with frames.batch():
                train(batch)
    """

    def __init__(self, model: nn.Module, config: FramesConfig | None = None) -> None:
        """Create the tool; nothing is observed until a batch begins."""
        self.config = config or FramesConfig()
        self.model = model
        self.trace: Trace | None = None
        self._batch = 0
        self._module_types = {path: type(module).__name__ for path, module in model.named_modules()}

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Observe one batch: forward and backward passes and updates.

        Raises:
            OverflowDetectedError: something overflowed, and ``raises`` is set.
            SystemExit: this was the batch ``abort_after_batch``.
        """
        number, self._batch = self._batch, self._batch + 1
        tracer = Tracer(self.model, TraceConfig(TraceMode.STATISTICS, ring_steps=1))
        try:
            with tracer.step(number):
                yield
        finally:
            self.trace = tracer.trace()
        diagnosis = diagnose(self.trace)
        frames = frames_of(self.trace, self._module_types)
        if number in self.config.batches:
            _print(f"All frames of batch {number}\n{render_frames(frames)}")
        first = diagnosis.first
        if first is not None:
            chosen = self._until(frames, first)
            _print(
                f"NaN or infinity in batch {number}. The last {len(chosen)} frames until it began:\n{render_frames(chosen)}"
                f"{render_diagnosis(self.trace, diagnosis)}"
            )
            if self.config.raises:
                raise OverflowDetectedError(
                    f"batch {number}: {first.operation.name} in {first.operation.module or 'the program'} made NaN or infinity",
                    "the frames and the source line are printed above; OverflowFrames.trace has the whole batch",
                )
        if self.config.abort_after_batch is not None and number >= self.config.abort_after_batch:
            raise SystemExit(f"ended after batch {number}, as FramesConfig(abort_after_batch=…) requests")

    def _until(self, frames: list[ModuleFrame], first: BadOrigin) -> list[ModuleFrame]:
        last = next(
            place for place, frame in enumerate(frames) if frame.operations[-1].index >= first.operation.index
        )
        return frames[max(0, last + 1 - self.config.max_frames) : last + 1]


def detect_overflow(tensor: Tensor, name: str) -> bool:
    """Print what is not finite in a tensor, and return whether anything is.

    Args:
        tensor: A tensor of any dtype, shape and device. One without floating-point elements is finite.
        name: Printed with it.
    """
    health = health_of(tensor, counts=False)
    if health is None or health.is_finite:
        return False
    _print(f"{printable(name)}: {health}\n")
    return True


def _print(text: str) -> None:
    sys.stdout.write(text)
