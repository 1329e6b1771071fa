"""Computes a recorded step again, and compares its losses and gradients with the recorded ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from watchstep.errors import ConfigError
from watchstep.format.bundle import DIGESTS, GRADIENTS, Bundle
from watchstep.pytorch.bundles import random_states
from watchstep.pytorch.bundles.bundler import digest
from watchstep.pytorch.bundles.program import restore_precision
from watchstep.pytorch.names import unwrap
from watchstep.pytorch.observable import own_work
from watchstep.replay.model_state import ModelState
from watchstep.replay.recorded_step import RecordedStep
from watchstep.replay.replay_step import ReplayStep
from watchstep.trace.operations import Trace
from watchstep.trace.origins import Diagnosis, diagnose
from watchstep.trace.tracer import TraceConfig, Tracer

Precision = Literal["captured", "fp32", "fp64"]
_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class GradientDifference:
    """The parameter whose gradient differs most.

    Attributes:
        name: the parameter.
        relative: largest difference of an element, divided by the largest magnitude of the recorded gradient; infinite if one is
            non-finite where the other is finite.
    """

    name: str
    relative: float


@dataclass(frozen=True)
class ReplayResult:
    """Result of a replay.

    Attributes:
        bundle: the bundle.
        device: device of the replay.
        precision: precision of the replay.
        losses: of each micro-batch: the recorded one, None if it was not observed, and that of the replay.
        gradients: number of recorded gradients.
        equal_gradients: number of those that are equal bit for bit.
        uncomputed: names of recorded gradients that the replay did not compute.
        undetermined: names of gradients that differ, by an unknown amount: the bundle has only their digests.
        largest: the gradient that differs most, among those that are recorded in full; None if none differs.
        was_nonfinite: whether a recorded loss or gradient is NaN or infinite.
        is_nonfinite: whether one of the replay is.
        is_other_failure: whether a loss is finite in one of them only, or other gradients are not finite.
        update_is_nonfinite: whether the update makes a parameter non-finite; None if it was not made.
        problems: what could not be set as recorded.
        has_before_update: whether the program states what it does with gradients before the update.
        unrestored: parameters, buffers, random states and modes whose recorded values were not set, as noun phrases.
        uncompared: losses and gradients that the bundle lacks, as noun phrases.
        has_finite: whether a finite value other than zero was compared. Equality of other values shows little: most failing steps end in NaN.
        trace: operations of the replay; None if it was not traced.
        trace_difference: how the computation that was traced differs from the one that was compared; empty if it does not.
        diagnosis: of the trace; None if that computation differs.
    """

    bundle: Bundle
    device: str
    precision: Precision
    losses: tuple[tuple[float | None, float], ...] = ()
    gradients: int = 0
    equal_gradients: int = 0
    uncomputed: tuple[str, ...] = ()
    undetermined: tuple[str, ...] = ()
    largest: GradientDifference | None = None
    was_nonfinite: bool = False
    is_nonfinite: bool = False
    is_other_failure: bool = False
    update_is_nonfinite: bool | None = None
    problems: tuple[str, ...] = ()
    has_before_update: bool = False
    unrestored: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    has_finite: bool = False
    trace: Trace | None = None
    trace_difference: str = ""
    diagnosis: Diagnosis | None = field(default=None, repr=False)

    @property
    def losses_are_equal(self) -> bool:
        """Whether all losses that were observed are equal bit for bit."""
        return all(before is None or _are_equal(before, after) for before, after in self.losses)

    @property
    def are_equal(self) -> bool:
        """Whether all losses and gradients that were compared are equal bit for bit; False if nothing was compared."""
        compared = self.gradients > 0 or any(before is not None for before, _ in self.losses)
        return compared and self.equal_gradients == self.gradients and self.losses_are_equal

    @property
    def is_exact(self) -> bool:
        """Whether all was restored and compared, and all losses and gradients are equal bit for bit."""
        return self.are_equal and not self.unrestored and not self.uncompared

    @property
    def has_failed(self) -> bool:
        """Whether the recorded step failed."""
        return self.was_nonfinite or self.bundle.document.is_failing

    @property
    def fails_again(self) -> bool:
        """Whether the replay is not finite either, in the same losses and in a gradient that was not finite, if there was one."""
        return (self.is_nonfinite or bool(self.update_is_nonfinite)) and not self.is_other_failure

    @property
    def is_reproduced(self) -> bool:
        """Whether the step failed again in the same losses and gradients, if it had failed; else whether they are nearly equal.

        If something was not restored, a failure is reproduced only if finite values were compared, and all are nearly equal.
        """
        nearly = self.are_equal or self.difference is not None
        if self.has_failed:
            return self.fails_again and (not self.unrestored or (self.has_finite and nearly))
        return nearly

    @property
    def difference(self) -> float | None:
        """Largest relative difference of losses and gradients, if all are compared and it is small; else None."""
        if self.uncomputed or self.undetermined or not (self.gradients or self.losses):
            return None
        differences = [
            abs(after - before) / max(abs(before), _SMALLEST)
            for before, after in self.losses
            if before is not None and not _are_equal(before, after)
        ]
        if self.largest is not None:
            differences.append(self.largest.relative)
        largest = max(differences, default=0.0)
        return largest if largest < _NEARLY else None


_NEARLY = 1e-2
"""Largest relative difference of losses and gradients that counts as reproduced. Half-precision passes of other kernels differ by as much."""

_SMALLEST = 1e-30


def _are_equal(before: float, after: float) -> bool:
    return before == after or (math.isnan(before) and math.isnan(after))


def replay(
    bundle: Bundle,
    step: ReplayStep,
    *,
    device: str | None = None,
    precision: Precision = "captured",
    traces: bool = True,
) -> ReplayResult:
    """Replay a bundle. Sets flags and random states of the process.

    The step is computed once as recorded, and compared; and once more under a tracer, if it made non-finite values. The second computation begins
    with the same state, also of Python attributes of the model's modules. If its losses or gradients differ from the first, there is no diagnosis.

    Args:
        bundle: The bundle.
        step: The program's step.
        device: Device of the replay, as ``cpu``. Default: that of the recording if this machine has it, else ``cpu``.
        precision: ``captured``: as recorded, with autocast where the program uses it; ``fp32`` or ``fp64``: parameters, buffers and batches
            are converted, and autocast is disabled.
        traces: Whether the step is traced.

    Raises:
        ConfigError: the program's model does not fit the bundle, or the bundle lacks what is needed.
        FormatError: the bundle is damaged.
    """
    if not bundle.document.micro_batches:
        raise ConfigError(
            f"bundle {bundle.name} has no forward pass",
            "models that are compiled as a whole are not observed; watch the model before torch.compile",
        )
    chosen = torch.device(device or _recorded_device(bundle))
    recorded = RecordedStep(bundle, chosen)
    recorded.problems.update(dict.fromkeys(restore_precision(bundle.document.precision)))
    run = _Replay(recorded, step, chosen, precision)
    trace, difference = None, ""
    with run.fixed_precision():
        batches = run.set_state()
        state = run.saved_state() if traces else None
        with random_states.unchanged():
            losses = run.compute(batches)
            outcome = run.outcome(losses) if traces else None
            result = run.compared(losses)
        is_bad = result.is_nonfinite or result.update_is_nonfinite
        if state is not None and outcome is not None and is_bad:
            state.restore()
            trace, difference = run.traced(outcome, result.update_is_nonfinite)
    return dataclasses.replace(
        result,
        problems=tuple(recorded.problems),
        trace=trace,
        trace_difference=difference,
        diagnosis=None if trace is None or difference else diagnose(trace),
    )


def _recorded_device(bundle: Bundle) -> str:
    devices = bundle.document.program.get("devices")
    return "cuda" if devices and torch.cuda.is_available() else "cpu"


class _Replay:
    """One replay."""

    def __init__(
        self, recorded: RecordedStep, step: ReplayStep, device: torch.device, precision: Precision
    ) -> None:
        self._recorded = recorded
        self._step = step
        self._device = device
        self._precision = precision
        self._model = step.model.to(device)
        self._inner = unwrap(self._model)
        self._uncompared: dict[str, None] = {}
        self._scale = recorded.scale() if precision == "captured" else 1.0

    @contextmanager
    def fixed_precision(self) -> Iterator[None]:
        """Disable autocast if the precision is fixed."""
        if self._precision == "captured":
            yield
            return
        autocast = cast("Any", torch.amp.autocast_mode.autocast)
        original = autocast.__init__

        def disabled(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **{**kwargs, "enabled": False})

        autocast.__init__ = disabled
        try:
            yield
        finally:
            autocast.__init__ = original

    def set_state(self) -> list[Any]:
        """Set the recorded state of the model. Returns the batches."""
        self._recorded.set_model(self._model, checks_dtypes=self._precision == "captured")
        batches = [
            self._recorded.batch(number)
            for number in range(len(self._recorded.bundle.document.micro_batches))
        ]
        dtype = _DTYPES.get(self._precision)
        if dtype is None:
            return batches
        self._model.to(dtype)
        return [_converted(batch, dtype) for batch in batches]

    def saved_state(self) -> ModelState:
        """Return the state of the model that `set_state` does not set."""
        return ModelState(self._inner, self._recorded.unrecorded(self._model))

    def compute(self, batches: list[Any]) -> list[tuple[float | None, float]]:
        """Compute all micro-batches and their gradients. Returns recorded and replayed losses."""
        losses = [self._micro_batch(number, batch) for number, batch in enumerate(batches)]
        if self._scale != 1.0:
            inverse = torch.tensor(self._scale).double().reciprocal().float()
            for parameter in self._inner.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse.to(parameter.device))
        if self._step.before_update is not None:
            self._step.before_update(self._model)
        return losses

    def _micro_batch(self, number: int, batch: Any) -> tuple[float | None, float]:
        """Compute a micro-batch. Returns its recorded and replayed loss."""
        recorded = self._recorded
        with ExitStack() as stack:
            if not recorded.syncs(number) and isinstance(self._model, nn.parallel.DistributedDataParallel):
                stack.enter_context(self._model.no_sync())
            own_work.depth += 1
            try:
                recorded.set_random_states(number)
            finally:
                own_work.depth -= 1
            hook = self._inner.register_forward_pre_hook(self._before_forward(number))
            stack.callback(hook.remove)
            loss = self._step.loss(self._model, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ConfigError(
                    f"ReplayStep.loss returned {type(loss).__name__}",
                    "return the loss, a tensor with one element",
                )
            scaled = loss if self._scale == 1.0 else loss * self._scale
            scaled.backward()
            recorded.note_draws()
        before = recorded.losses(number)
        if not before:
            self._uncompared[f"loss of micro-batch {number}"] = None
        if len(before) > 1:
            self._uncompared[f"other losses of micro-batch {number}"] = None
            recorded.problems[
                f"the program called backward() for {len(before)} losses of micro-batch {number}; the replay computes the last of them"
            ] = None
        return (before[-1] if before else None, float(loss.detach()))

    def _before_forward(self, number: int) -> Callable[..., None]:
        """Return a hook for the first forward pass of a micro-batch: the random states were recorded there."""
        is_first = True

        def before(*_: Any) -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                own_work.depth += 1  # no operations of the program
                try:
                    self._set_pass(number)
                finally:
                    own_work.depth -= 1

        return before

    def _set_pass(self, number: int) -> None:
        self._recorded.note_draws()  # by the loss function, before the model
        self._recorded.set_random_states(number)
        self._check_autocast(number)

    def _check_autocast(self, number: int) -> None:
        kind = self._device.type
        was, dtype = self._recorded.autocast(number, kind)
        now = torch.is_autocast_enabled(kind)
        if self._precision == "captured" and (
            was != now or (was and str(torch.get_autocast_dtype(kind)) != dtype)
        ):
            state = f"enabled with {dtype}" if was else "disabled"
            self._recorded.problems[
                f"autocast was {state} at the forward pass; use the same in ReplayStep.loss"
            ] = None

    def compared(self, losses: list[tuple[float | None, float]]) -> ReplayResult:
        """Compare gradients, and make the update if the program states its optimizer."""
        recorded = self._recorded
        comparison = _GradientComparison(recorded, dict(self._inner.named_parameters()))
        other_loss = any(
            before is not None and math.isfinite(before) != math.isfinite(after) for before, after in losses
        )
        gradients_finite = all(
            bool(_elements(parameter.grad).isfinite().all())
            for parameter in self._inner.parameters()
            if parameter.grad is not None
        )
        has_finite_loss = any(
            before is not None and math.isfinite(before) and before != 0.0 for before, _ in losses
        )
        update_is_nonfinite = self._update()
        self._uncompared.update(dict.fromkeys(f"gradient {name!r}" for name in comparison.unrecorded))
        return ReplayResult(
            recorded.bundle,
            str(self._device),
            self._precision,
            tuple(losses),
            gradients=len(recorded.gradient_names()),
            equal_gradients=comparison.equal,
            uncomputed=tuple(comparison.uncomputed),
            undetermined=tuple(comparison.undetermined),
            largest=comparison.largest,
            was_nonfinite=comparison.was_nonfinite
            or any(before is not None and not math.isfinite(before) for before, _ in losses),
            is_nonfinite=not gradients_finite or any(not math.isfinite(after) for _, after in losses),
            is_other_failure=other_loss or comparison.is_other_failure,
            update_is_nonfinite=update_is_nonfinite,
            has_before_update=self._step.before_update is not None,
            unrestored=tuple(recorded.unrestored),
            uncompared=tuple(self._uncompared),
            has_finite=has_finite_loss or comparison.has_finite,
        )

    def outcome(self, losses: list[tuple[float | None, float]]) -> _Outcome:
        """Return what a computation has made, before the update."""
        own_work.depth += 1
        try:
            gradients = {
                name: _fingerprint(parameter.grad)
                for name, parameter in self._inner.named_parameters()
                if parameter.grad is not None
            }
        finally:
            own_work.depth -= 1
        return _Outcome(tuple(after for _, after in losses), gradients)

    def _update(self) -> bool | None:
        """Make the update. Returns whether it makes a parameter non-finite; None if that is not known."""
        if self._step.optimizer is None or self._precision != "captured":
            return None
        if not all(bool(parameter.isfinite().all()) for parameter in self._inner.parameters()):
            self._recorded.problems["a parameter was not finite before the step: the update was not made"] = (
                None
            )
            return None
        optimizer = self._step.optimizer(self._model)
        if not self._recorded.set_optimizer(optimizer):
            self._recorded.problems[
                "the bundle has no state of such an optimizer: the update was not made"
            ] = None
            return None
        optimizer.step()
        return not all(bool(parameter.isfinite().all()) for parameter in self._inner.parameters())

    def traced(self, first: _Outcome, update_is_nonfinite: bool | None) -> tuple[Trace, str]:
        """Compute the step again under a tracer.

        Args:
            first: What the first computation has made.
            update_is_nonfinite: Whether its update made a parameter non-finite.

        Returns:
            The trace, and how this computation differs from the first; empty if it does not.
        """
        tracer = Tracer(self._inner, TraceConfig(ring_bytes=2 * 2**30))
        batches = self.set_state()
        try:
            with tracer.step(self._recorded.bundle.document.step):
                difference = self.outcome(self.compute(batches)).difference(first)
                if self._update() != update_is_nonfinite:
                    difference = difference or "its update differs"
        except Exception as error:  # noqa: BLE001 - the first computation did not raise: this is a difference
            difference = f"it raised {type(error).__name__}: {str(error)[:200]}"
        trace = tracer.trace()
        if difference:
            note = f"this computation is not the one that was compared with the bundle: {difference}"
            trace = dataclasses.replace(trace, notes=(note, *trace.notes))
        return trace, difference


@dataclass(frozen=True)
class _Outcome:
    """What one computation of the step has made: its losses, and fingerprints of its gradients by name."""

    losses: tuple[float, ...]
    gradients: Mapping[str, bytes]

    def difference(self, first: _Outcome) -> str:
        """Return how this computation differs from the first; empty if it does not."""
        for number, (before, after) in enumerate(zip(first.losses, self.losses, strict=True)):
            if not _are_equal(before, after):
                return f"loss of micro-batch {number} is {after:.9g}, and was {before:.9g}"
        names = {*first.gradients, *self.gradients}
        other = sorted(name for name in names if first.gradients.get(name) != self.gradients.get(name))
        return f"{len(other)} of {len(names)} gradients differ, as {other[0]}" if other else ""


def _elements(gradient: Tensor) -> Tensor:
    """Return the elements of a gradient; of a sparse one those that it has."""
    if gradient.layout is torch.strided:
        return gradient
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient.values()


def _fingerprint(gradient: Tensor) -> bytes:
    """Return a digest of a gradient in which all NaN are equal: their bits depend on the order of operands, as in sums over ranks."""
    elements = _elements(gradient.detach())
    if elements.is_floating_point() and elements.dtype.itemsize > 1:
        elements = elements.masked_fill(elements.isnan(), math.nan)
    if gradient.layout is torch.sparse_coo:
        return digest(elements) + digest(gradient.coalesce().indices())
    return digest(elements)


class _GradientComparison:
    """The recorded gradients against those of the replay.

    Attributes:
        equal: number of gradients that are equal bit for bit.
        uncomputed, undetermined, largest: see `ReplayResult`.
        unrecorded: names of gradients that were not compared, because the bundle lacks them.
        has_finite: whether a finite element other than zero was compared.
        was_nonfinite: whether a recorded gradient is not finite.
        is_other_failure: whether gradients are not finite in both, and none of them is the same.
    """

    def __init__(self, recorded: RecordedStep, parameters: Mapping[str, nn.Parameter]) -> None:
        self.equal = 0
        self.uncomputed: list[str] = []
        self.undetermined: list[str] = []
        self.largest: GradientDifference | None = None
        self.has_finite = False
        bad_before, bad_after = set(), set()
        names = recorded.gradient_names()
        digests = recorded.tensor(DIGESTS) if names else None
        lost = [
            each.path.removeprefix(GRADIENTS)
            for each in recorded.bundle.document.lost
            if each.path.startswith(GRADIENTS)
        ]
        computed = [name for name, parameter in parameters.items() if parameter.grad is not None]
        self.unrecorded = [name for name in dict.fromkeys([*lost, *computed]) if name not in set(names)]
        for place, name in enumerate(names):
            before = recorded.gradient(name)
            parameter = parameters.get(name)
            after = None if parameter is None else parameter.grad
            if before is not None and not bool(before.isfinite().all()):
                bad_before.add(name)
            elements = None if after is None else _elements(after)
            if elements is not None and not bool(elements.isfinite().all()):
                bad_after.add(name)
            if after is None or elements is None or digests is None:
                self.uncomputed.append(name)
                continue
            self.has_finite = self.has_finite or bool((elements.isfinite() & (elements != 0)).any())
            if after.layout is not torch.strided:
                self.unrecorded.append(name)  # recorded with another layout
            elif digest(after) == bytes(digests[place].numpy()):
                self.equal += 1
            elif before is None:
                self.undetermined.append(name)
            else:
                self._add(name, before, after)
        self.was_nonfinite = bool(bad_before)
        self.is_other_failure = bool(bad_before) and bool(bad_after) and bad_before.isdisjoint(bad_after)

    def _add(self, name: str, before: Tensor, after: Tensor) -> None:
        relative = _relative(before, after)
        if self.largest is None or relative > self.largest.relative:
            self.largest = GradientDifference(name, relative)


def _relative(before: Tensor, after: Tensor) -> float:
    first, second = before.double().cpu(), after.detach().double().cpu()
    if not torch.equal(first.isfinite(), second.isfinite()):
        return math.inf
    finite = first.isfinite()
    difference = (first[finite] - second[finite]).abs()
    if not difference.numel() or not float(difference.max()):
        return 0.0
    return float(difference.max() / first[finite].abs().max().clamp_min(torch.finfo(torch.float64).tiny))


def _converted(value: Any, dtype: torch.dtype) -> Any:
    """Return a batch with its floating-point tensors converted."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        converted = {key: _converted(entry, dtype) for key, entry in value.items()}
        return converted if type(value) is dict else type(value)(converted)
    if isinstance(value, (list, tuple)):
        return type(value)(_converted(entry, dtype) for entry in value)
    return value
