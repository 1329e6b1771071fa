"""A failing step, computed again in the program's own loop under the operation tracer, to name the operation and the line that failed.

The update of the step is prevented, so weights and optimizers are as they were. Nothing of the program is called: it goes on by itself. Its data loaders
yield the batches of the step again, random states and buffers are set to what they were, and no optimizer makes an update until the step was
computed again. Then the training stops.

**Which step it is.** Trainers fetch batches ahead, so that others may come first. The step has come again when passes of the model had the same arguments in the same
order, each of which also sets the random states of its pass. If the model itself is not called, as in compiled code, equal losses show it.

**Programs without a data loader** often draw their batches from the random states that are set. If they count on in their data, the model is given the arguments of the
step instead; what the loss reads besides is then another batch's, and the result is called approximate.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from watchstep.capture.health import RecorderHealth
from watchstep.capture.identity import Identity
from watchstep.capture.steps.own_work import own_work
from watchstep.capture.steps.session import Session
from watchstep.capture.tensors.snapshots import SnapshotWriter, StoredFile
from watchstep.format.layout import TraceKey
from watchstep.pytorch import internals, losses
from watchstep.pytorch.bundles.random_states import GeneratorStates
from watchstep.pytorch.bundles.step_inputs import Contents, MicroBatch, StepInputs, TensorVersions
from watchstep.pytorch.loaders import loader_batches
from watchstep.pytorch.optimizer_map import OptimizerMap
from watchstep.pytorch.outputs.passes import recomputes
from watchstep.stopping import FROM_ANOTHER_RANK, NOT_AGAIN
from watchstep.trace.online import OnlineTracing
from watchstep.trace.operations import Trace
from watchstep.trace.origins import Diagnosis, diagnose
from watchstep.trace.report import render_cause, render_diagnosis, suspects
from watchstep.trace.trace_file import encode_trace
from watchstep.trace.trace_steps import TraceSteps

_SECONDS = 60.0
"""Time of the step after which no more operations are recorded."""

_BYTES = 2 * 2**30
"""Memory of the recorded operations."""

_MOST_UPDATES = 8
"""Updates within which the step must come again: Accelerate and Lightning fetch batches ahead, which may be micro-batches of one step with the first ones that are
yielded again."""

_MOST_BATCHES = 4096
_MOST_CHARACTERS = 100


@dataclass(frozen=True)
class _YieldedBatch:
    """A batch that a data loader has yielded, the ids of its samples, and a function that sets the random states of then."""

    loader: weakref.ref[DataLoader[Any]] | None
    batch: Any
    sample_ids: Sequence[Any] | None
    versions: TensorVersions
    put_back: Callable[[], None]


@dataclass(frozen=True)
class PassInputs:
    """A pass of the model.

    Attributes:
        arguments: its arguments.
        keywords: its keyword arguments.
        put_back: sets the random states to those before it.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    put_back: Callable[[], None]


@dataclass(frozen=True)
class RecordedInputs:
    """What a step of an earlier process was computed from.

    Attributes:
        step: its number.
        batches: batches of data loaders, each with a function that sets the random states of its time.
        passes: passes of the model.
        losses: losses at ``backward()``.
        restore: sets the model and an optimizer to their states before the step.
    """

    step: int
    batches: Sequence[tuple[Any, Callable[[], None]]]
    passes: list[PassInputs]
    losses: list[Tensor]
    restore: Callable[[Optimizer], None]


@dataclass
class _SinceUpdate:
    """What has happened since the last update of an optimizer.

    Attributes:
        random: random states at its end; None before the first one.
        batches: batches of data loaders.
        losses: losses at ``backward()`` since the last update of any optimizer.
        is_dropped: whether batches were dropped, because they exceed the limits of what is referenced.
    """

    random: GeneratorStates | None = None
    batches: list[_YieldedBatch] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    is_dropped: bool = False


@dataclass
class _Again:
    """The step while it is computed again.

    Attributes:
        step: its number.
        optimizer: the optimizer whose update was prevented.
        since: what it was computed from.
        passes: its passes of the model.
        restore: sets what it changes besides random states to what it was before.
        updates: updates of the optimizer since it began.
        seen: passes since the last of them.
        matched: those of them that have come again.
        ahead: passes before the first of these.
        given: whether the model was given arguments that the program did not pass.
        notes: what could not be restored.
        first: losses of the first time that it was computed again, if they were finite.
        found: the sentence that ends the training; None until then.
    """

    step: int
    optimizer: Optimizer
    since: _SinceUpdate
    passes: list[PassInputs]
    restore: Callable[[Optimizer], None]
    updates: int = 0
    seen: int = 0
    matched: int = 0
    ahead: int = 0
    given: bool = False
    notes: list[str] = field(default_factory=list)
    first: list[Tensor] | None = None
    found: str | None = None


class _StepTracing(OnlineTracing):
    """Traces single steps, and keeps the trace of the last one in memory. It is made before the steps, because it adds hooks to optimizers."""

    def __init__(self, model: nn.Module, worker: int, health: RecorderHealth, writer: SnapshotWriter) -> None:
        super().__init__(_steps(0), model, worker, health, writer)
        self.trace: Trace | None = None
        self._timer: threading.Timer | None = None

    def begin(self, step: int) -> None:
        """Begin to record a step."""
        self.trace = None
        self._config = _steps(step)
        self._timer = threading.Timer(_SECONDS, self._tracer.stop)
        self._timer.daemon = True
        self._timer.start()
        self.start(step)

    def end(self, *, discards: bool = False) -> None:
        """End, so that `trace` has what was recorded; None if nothing was, or it is discarded."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        if discards:
            self._tracer.stop(discards=True)
        self.finished(self._running)
        if discards:
            self.trace = None

    def _write(self) -> None:
        if self._first >= 0:
            self._first = -1
            self.trace = self._tracer.take()()

    def keep(self, step: int) -> None:
        """Write the trace to the run."""
        trace, worker = self.trace, self._worker
        if trace is None:
            return
        self._writer.offer(
            StoredFile(
                lambda attempt: TraceKey(attempt, worker, step, step).path,
                lambda: np.frombuffer(encode_trace(trace), np.uint8),
                "traces",
            )
        )


def _steps(step: int) -> TraceSteps:
    return TraceSteps(str(step), max_bytes=_BYTES)


class StepRedo:
    """Computes the failing step of one watched model again. Used on the training thread; its faults never reach training."""

    def __init__(
        self, session: Session, model: nn.Module, inputs: StepInputs, identity: Identity, run_url: str
    ) -> None:
        """Start to note what steps are computed from.

        Args:
            session: The recording.
            model: The watched model.
            inputs: Notes the passes of its steps.
            identity: The rank.
            run_url: The run.
        """
        assert session.config.bundles is not None
        self._session, self._model, self._inputs = session, model, inputs
        self._worker, self._world_size = identity.worker, identity.world_size
        self._run_url = run_url
        self._limit = session.config.bundles.reference_bytes
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._start = _SinceUpdate()
        self._since: OptimizerMap[_SinceUpdate] = OptimizerMap()
        self._again: _Again | None = None
        self._tracing = _StepTracing(model, self._worker, session.health, session.snapshot_writer)
        self._is_traced = False
        self._handle: RemovableHandle | None = None
        self.recorded: RecordedInputs | None = None
        """A step of an earlier process that is computed in place of the second one; None without one."""
        loader_batches.listen(self)
        losses.listen(self)

    @property
    def runs(self) -> bool:
        """Whether the step is being computed again, so that no update is made."""
        return self._again is not None

    @property
    def step(self) -> int:
        """Number of the step that is computed again."""
        assert self._again is not None
        return self._again.step

    def close(self) -> None:
        """End, and drop the references to the program."""
        loader_batches.forget(self)
        losses.forget(self)
        self._leave()
        self._start, self._since = _SinceUpdate(), OptimizerMap()

    # --- What steps are computed from -------------------------------------------------------------------------------------------

    def batch_yielded(
        self,
        loader: DataLoader[Any] | None,
        batch: Any,
        sample_ids: Sequence[Any] | None,
        epoch: int,  # noqa: ARG002 - the listener's signature
        number: int,  # noqa: ARG002 - as above
    ) -> None:
        """Note a batch. See `BatchListener`."""
        if self._again is not None or threading.get_ident() != self._thread:
            return
        versions = TensorVersions()
        versions.note(batch)
        reference = None if loader is None else weakref.ref(loader)
        yielded = _YieldedBatch(reference, batch, sample_ids, versions, GeneratorStates.capture().put_back)
        for since in self._all_since():
            if since.is_dropped:
                continue
            since.batches.append(yielded)
            if not self._has_room(since):
                since.batches.clear()
                since.is_dropped = True

    def _has_room(self, since: _SinceUpdate) -> bool:
        """Return whether the batches may stay referenced. Those of one pass are in memory anyway; shared memory of loader workers is scarce."""
        batches = since.batches
        if len(batches) == 1:
            return True
        size = sum(each.versions.bytes for each in batches)
        is_counted = all(each.versions.is_complete and not each.versions.shared for each in batches)
        return is_counted and size <= self._limit and len(batches) <= _MOST_BATCHES

    def backward_begins(self) -> None:
        """Do nothing. See `LossListener`."""

    def found(self, loss: losses.BackwardLoss) -> None:
        """Note a loss. See `LossListener`."""
        if threading.get_ident() == self._thread:
            for since in self._all_since():
                if len(since.losses) < _MOST_BATCHES:
                    since.losses.append(loss.value)

    def failed(self, error: Exception) -> None:
        """Count a fault."""
        self._session.health.fault("explain", error)

    def _all_since(self) -> list[_SinceUpdate]:
        return [self._start, *self._since.values()]

    # --- The step again ---------------------------------------------------------------------------------------------------------

    def obstacle(self, optimizer: Optimizer) -> str:
        """Return why the step whose update is prevented cannot be computed again; empty if it can be."""
        if threading.get_ident() != self._thread or os.getpid() != self._process:
            return "it was computed in another thread than the model was watched in"
        if lacking := internals.lacks_for_traces():
            return f"PyTorch {torch.__version__} has no {lacking[0]}"
        since = self._since_of(optimizer)
        if since.is_dropped or any(each.is_dropped for each in self._passes()):
            return "its micro-batches exceed Bundles.reference_bytes, or are in the shared memory of loader workers"
        if any(_is_changed(each.versions, each.batch) for each in since.batches):
            return "the program has changed its batch, or replaced entries of it"
        if any(
            _is_changed(each.argument_versions, (each.arguments, each.keywords)) for each in self._passes()
        ):
            return "the program has changed the arguments of the model, or replaced entries of them"
        if not (since.batches or since.losses or self._passes()):
            return "nothing of it was observed: the recording began at its update"
        return ""

    def begin(self, optimizer: Optimizer, step: int) -> None:
        """Compute a step again, whose update by an optimizer is being prevented."""
        notes = [f"buffer {name} was not restored" for name in sorted(self._inputs.buffers.left_out)[:3]]
        buffers = {name: copy.clone() for name, copy in self._inputs.buffers.values().items()}
        passes = [
            PassInputs(each.arguments or (), dict(each.keywords or {}), each.random.put_back)
            for each in self._passes()
        ]
        restore = functools.partial(_restore_buffers, self._model, buffers)
        self._go_back(_Again(step, optimizer, self._since_of(optimizer), passes, restore, notes=notes))
        sys.stderr.write(f"watchstep: step {step} is not finite, and is computed again under a trace\n")

    def begin_recorded(self, optimizer: Optimizer) -> bool:
        """Compute the step of `recorded` after the first update, which is being prevented. Returns False without one."""
        recorded, self.recorded = self.recorded, None
        if recorded is None:
            return False
        batches = [
            _YieldedBatch(None, batch, None, TensorVersions(), put_back)
            for batch, put_back in recorded.batches
        ]
        since = _SinceUpdate(None, batches, recorded.losses)
        self._go_back(_Again(recorded.step, optimizer, since, recorded.passes, recorded.restore))
        return True

    def _go_back(self, again: _Again) -> None:
        self._again = again
        self._since[again.optimizer] = _SinceUpdate()
        self._handle = self._model.register_forward_pre_hook(self._pass_begins, with_kwargs=True)

    def has_bad_loss(self, optimizer: Optimizer) -> bool:
        """Return whether a loss of the update that an optimizer is about to make is not finite. Waits for devices."""
        return any(not bool(loss.isfinite().all()) for loss in self._since_of(optimizer).losses)

    def update_ends(self, optimizer: Optimizer) -> None:
        """Handle the end of an update: note that a new step begins, or restore the one that is computed again."""
        again = self._again
        self.others_change()
        if again is None:
            self._since[optimizer] = _SinceUpdate(GeneratorStates.capture())
            self._start = _SinceUpdate()
            return
        if optimizer is not again.optimizer or again.found is not None:
            return
        self._restore(again)
        if not self._is_traced:
            self._is_traced = True
            self._tracing.begin(again.step)

    def others_change(self) -> None:
        """Forget the losses: they are of weights that are other ones now, or of the update that ends."""
        for since in self._all_since():
            since.losses = []

    def end(self, optimizer: Optimizer, *, is_nonfinite: bool) -> str | None:
        """Handle a prevented update while the step is computed again.

        Args:
            optimizer: The optimizer.
            is_nonfinite: Whether gradients of this rank or of another one are not finite.

        Returns:
            The sentence about the step that ends the training; None if it has not come yet.
        """
        again = self._again
        if again is None or optimizer is not again.optimizer:
            return None
        if again.found is not None:
            return again.found
        if not self._is_traced:  # a fault at the end of the prevented update
            again.found = NOT_AGAIN
            return again.found
        again.updates += 1
        losses_now = self._losses_now(optimizer)
        has_come = (
            again.matched >= len(again.passes) if again.passes else _are_equal(losses_now, again.since.losses)
        )
        goes_on = not has_come and again.updates < _MOST_UPDATES
        self._is_traced = False
        self._tracing.end(discards=goes_on)
        if not goes_on:
            again.found = self._sentence(again, losses_now, has_come=has_come, is_nonfinite=is_nonfinite)
        if again.found is not None:
            self._remove()
        return again.found

    def _sentence(
        self, again: _Again, losses_now: list[Tensor], *, has_come: bool, is_nonfinite: bool
    ) -> str | None:
        if not has_come:
            return f"{NOT_AGAIN}: the program went on with other batches"
        is_equal = _are_equal(losses_now, again.since.losses)
        if not is_nonfinite:
            return self._finite(again, losses_now)
        trace = self._tracing.trace
        if trace is None:
            return (
                f"it could not be traced: {self._session.health.counted()['notes'].get('trace', 'unknown')}"
            )
        diagnosis = diagnose(trace, again.step)
        self._tracing.keep(again.step)
        if self._world_size > 1 and (diagnosis.first is None or _came_in(diagnosis)):
            return f"the first NaN or infinity {FROM_ANOTHER_RANK}: all is finite on rank {self._worker} before gradients are reduced"
        lines = render_diagnosis(trace, diagnosis).splitlines()
        sys.stderr.write("".join(f"watchstep: {line}\n" for line in lines))
        sample = _sample(again.since.batches, trace, diagnosis)
        if sample:
            sys.stderr.write(
                f"watchstep: to resume without the samples of the step: watchstep skip-list {self._run_url} --step {again.step} -o skip.json\n"
            )
        cause = render_cause(trace, diagnosis) + sample
        notes = list(again.notes)
        if again.given:
            notes.append(
                "the model was given its arguments again, but what the loss reads besides may be of another batch"
            )
        elif not is_equal:
            notes.append("its losses differ from those of the first time")
        return f"{cause}{' (approximate: ' + '; '.join(notes) + ')' if notes else ''}"

    def _finite(self, again: _Again, losses_now: list[Tensor]) -> str | None:
        """Return what a finite result means; None to compute the step once more, to compare both."""
        if again.given or again.notes or not again.passes:
            unknown = "no data loader of PyTorch yielded its batch" if again.given else "; ".join(again.notes)
            return f"it is finite when it is computed again, but not all of it was restored: {unknown or 'the model was not called'}"
        if again.first is None:
            again.first = [each.clone() for each in losses_now]
            again.updates = 0
            return None
        if not _are_equal(losses_now, again.first):
            return "it is finite when it is computed again, with other losses each time: it depends on what was not restored"
        values = ", ".join(f"{each.float().item():.6g}" for each in losses_now[:4])
        return (
            f"not reproducible: computed again twice from the same inputs, it is finite with equal losses ({values}); "
            f"{suspects(self._worker)}"
        )

    def _pass_begins(
        self, _module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Set the random states of a pass that has come again. Returns its arguments if the program passes others, and has no data loader."""
        again = self._again
        is_training = self._model.training and torch.is_grad_enabled() and self._session.mode == "train"
        if again is None or not is_training or recomputes() or threading.get_ident() != self._thread:
            return None
        again.seen += 1
        if again.matched >= len(again.passes):
            return None
        expected = again.passes[again.matched]
        own_work.depth += 1
        try:
            now, then = _tensors_of(arguments, keywords), _tensors_of(expected.arguments, expected.keywords)
            is_same = _are_equal(now, then)
            if not is_same and (again.since.batches or not _are_alike(now, then)):
                return None
            expected.put_back()
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self.failed(error)
            return None
        finally:
            own_work.depth -= 1
        if not again.matched:
            again.ahead = again.seen - 1
        again.matched += 1
        if is_same:
            return None
        again.given = True
        return expected.arguments, dict(expected.keywords)

    def _restore(self, again: _Again) -> None:
        """Set everything to what it was before the step, at the end of the prevented update."""
        again.restore(again.optimizer)
        for group in again.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._yield_batches(again)
        again.seen = again.matched = again.ahead = 0
        random = again.since.random
        if random is not None:
            random.put_back()
        elif not again.since.batches and again.passes:
            again.passes[0].put_back()

    def _yield_batches(self, again: _Again) -> None:
        """Let data loaders yield the batches again, and anew once all were fetched and the step has not come.

        Batches that were fetched ahead may be micro-batches of one step with the first ones. Then as many come before as complete that step.
        """
        if again.updates and loader_batches.yields_again():
            return
        batches = again.since.batches
        if 0 < again.ahead < len(batches) == len(again.passes):
            batches = [batches[0]] * (len(batches) - again.ahead) + batches
        waiting: dict[int | None, deque[loader_batches.RepeatedBatch]] = {}
        for each in batches:
            loader = None if each.loader is None else each.loader()
            key = None if loader is None else id(loader)
            waiting.setdefault(key, deque()).append(loader_batches.RepeatedBatch(each.batch, each.put_back))
        loader_batches.yield_again(waiting)

    def _passes(self) -> list[MicroBatch]:
        """Return the passes of the model in this step, without those of which the model itself was not called."""
        if self._inputs.step != self._session.recorder.step:
            return []
        return [each for each in self._inputs.micro_batches if each.arguments is not None or each.is_dropped]

    def _since_of(self, optimizer: Optimizer) -> _SinceUpdate:
        return self._since.get(optimizer, self._start)

    def _losses_now(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the losses since the update that was prevented last."""
        return list(self._since_of(optimizer).losses)

    def _remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        loader_batches.yield_again({})

    def _leave(self) -> None:
        self._remove()
        self._tracing.end(discards=True)
        self._tracing.close()
        self._again = None


@torch.no_grad()
def _restore_buffers(model: nn.Module, buffers: Mapping[str, Tensor], _optimizer: Optimizer) -> None:
    own = dict(model.named_buffers())
    for name, copy in buffers.items():
        buffer = own.get(name)
        if buffer is not None and buffer.shape == copy.shape and buffer.dtype == copy.dtype:
            buffer.copy_(copy)


def _came_in(diagnosis: Diagnosis) -> bool:
    """Return whether the first bad tensor is one that no traced operation wrote and that has no name: a gradient of all ranks."""
    first = diagnosis.first
    return (
        first is not None and first.cause == "tensor" and first.tensor is not None and not first.tensor.name
    )


def _sample(batches: Sequence[_YieldedBatch], trace: Trace, diagnosis: Diagnosis) -> str:
    """Return which sample had the first NaN or infinity, with a separator; empty if that is not known.

    The first bad tensor has a row for each sample of its batch, of which most are finite, and every batch has one loss.
    """
    origin = diagnosis.first
    if origin is None or origin.tensor is None or origin.tensor.health is None:
        return ""
    ended = sum(after < origin.operation.index for _, after in trace.losses)
    number = ended - (origin.operation.phase != "forward")
    if len(batches) == 1:
        number = 0
    elif len(trace.losses) != len(batches) or not 0 <= number < len(batches):
        return ""
    health = origin.tensor.health
    if origin.cause == "tensor" and origin.tensor.name and not origin.tensor.name.startswith("input["):
        return ""  # a parameter, buffer or state of an optimizer
    ids, shape, place = batches[number].sample_ids, origin.tensor.shape, health.first_bad
    if not ids or not place or not shape or shape[0] != len(ids) or len(ids) == 1:
        return ""
    if health.bad_rows is None or 2 * health.bad_rows > len(ids):
        return ""  # not the fault of a sample
    more = f", and {health.bad_rows - 1} more" if health.bad_rows > 1 else ""
    return f"; sample {str(ids[place[0]])[:_MOST_CHARACTERS]} (row {place[0]} of its batch{more})"


def _tensors_of(arguments: tuple[Any, ...] | None, keywords: Mapping[str, Any] | None) -> list[Tensor]:
    return Contents.of(arguments or (), dict(keywords or {})).tensors


def _is_changed(versions: TensorVersions, value: Any) -> bool:
    return any(map(versions.is_changed, Contents.of(value).tensors)) or not versions.are_of(value)


def _are_alike(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether tensors have the same shapes and types, in order."""
    return [(each.shape, each.dtype, each.device) for each in first] == [
        (each.shape, each.dtype, each.device) for each in second
    ]


@torch.no_grad()
def _are_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether tensors have the same values, in order; NaN equals NaN. Waits for devices."""
    return _are_alike(first, second) and all(
        one is other or bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - true for NaN, of any dtype
        for one, other in zip(first, second, strict=True)
    )
