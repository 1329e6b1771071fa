"""Computes a recorded step again, and compares its losses and gradients with the recorded ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from watchstep.capture.steps.own_work import own_work
from watchstep.errors import ConfigError, FormatError, WatchstepError
from watchstep.format.bundle import DIGESTS, GRADIENTS, Bundle
from watchstep.pytorch.bundles import random_states
from watchstep.pytorch.bundles.bundler import digest
from watchstep.pytorch.bundles.program import restore_precision
from watchstep.pytorch.names import unwrap
from watchstep.replay.model_state import ModelState
from watchstep.replay.recorded_step import RecordedStep
from watchstep.replay.replay_step import ReplayStep
from watchstep.trace.operations import Trace
from watchstep.trace.origins import Diagnosis, diagnose
from watchstep.trace.tracer import TraceConfig, Tracer

Precision = Literal["captured", "fp32", "fp64"]
Captured = Literal["", "finite", "fails again"]
_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class GradientDifference:
    """The parameter whose gradient differs most.

    Attributes:
        name: the parameter.
        relative: largest difference of an element, divided by the largest magnitude of the recorded gradient; infinite if an element is NaN or
            infinite in one of them, and another value or finite in the other.
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
        is_other_failure: whether a loss is finite, NaN or infinite in one of them only, or other gradients are not finite. In another precision a
            loss may be NaN in one and infinite in the other.
        update_is_nonfinite: whether the update makes a parameter non-finite; None if it was not made.
        problems: what could not be set as recorded.
        has_before_update: whether the program states what it does with gradients before the update.
        unrestored: parameters, buffers, random states and modes whose recorded values were not set, as noun phrases.
        uncompared: losses and gradients that the bundle lacks, as noun phrases.
        has_finite: whether a finite value other than zero was compared. Equality of other values shows little: most failing steps end in NaN.
        has_drawn: whether random numbers were drawn, which may be others in another precision.
        captured: of a replay in another precision: what the step does in the captured one. ``fails again``: it fails in the same values, each time.
            Empty if that is not known.
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
    has_drawn: bool = False
    captured: Captured = ""
    trace: Trace | None = None
    trace_difference: str = ""
    diagnosis: Diagnosis | None = field(default=None, repr=False)

    @property
    def has_compared(self) -> bool:
        """Whether any loss or gradient was compared."""
        has_gradient = self.equal_gradients > 0 or self.largest is not None
        return has_gradient or any(before is not None for before, _ in self.losses)

    @property
    def losses_are_equal(self) -> bool:
        """Whether all losses that were observed are equal bit for bit."""
        return all(before is None or _are_equal(before, after) for before, after in self.losses)

    @property
    def are_equal(self) -> bool:
        """Whether all losses and gradients that were compared are equal bit for bit; False if nothing was compared."""
        return self.has_compared and self.equal_gradients == self.gradients and self.losses_are_equal

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

        A failure is reproduced only if all compared values are nearly equal; and if something was not restored, only if some of them are finite.
        """
        if self.has_failed:
            return self.fails_again and self.are_near and (self.has_finite or not self.unrestored)
        return self.are_near

    @property
    def are_near(self) -> bool:
        """Whether all compared values are equal, or differ little: NaN and infinities are in the same places."""
        return self.are_equal or self.difference is not None

    @property
    def difference(self) -> float | None:
        """Largest relative difference of losses and gradients, if all are compared and it is small; else None."""
        if self.uncomputed or self.undetermined or not self.has_compared:
            return None
        if any(before is not None and _kind(before) != _kind(after) for before, after in self.losses):
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


def _kind(value: float) -> float:
    """Return 0 for a finite value, and 1, 2 or 3 for NaN, infinity and minus infinity."""
    return 0 if math.isfinite(value) else 1 if math.isnan(value) else 2 if value > 0 else 3


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
    If no finite value is recorded, with which two computations could be told apart, the one that is compared is traced.

    A replay in another precision is preceded by two in the captured one, to find out whether the step fails in that one.

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
            "'watchstep run' records from the first update on, after its forward pass: create a watchstep.Hook in the program to bundle that step; "
            "models that are compiled as a whole are not observed: watch the model before torch.compile",
        )
    chosen = torch.device(device or _recorded_device(bundle))
    recorded = RecordedStep(bundle, chosen)
    try:
        recorded.problems.update(dict.fromkeys(restore_precision(bundle.document.precision)))
    except ValueError as error:
        raise FormatError(f"bundle {bundle.name}: {error}", "use another bundle") from error
    captured: Captured = "" if precision == "captured" else _in_captured_precision(bundle, step, chosen)
    run = _Replay(recorded, step, chosen, precision)
    with run.fixed_precision():
        result = run.traced_and_compared() if traces and not recorded.has_finite() else None
        if result is None:
            result = run.compared_and_traced() if traces else run.computed()[1]
    return dataclasses.replace(
        result,
        problems=tuple(recorded.problems),
        unrestored=tuple(recorded.unrestored),
        has_drawn=recorded.has_drawn,
        captured=captured,
        diagnosis=None if result.trace is None or result.trace_difference else diagnose(result.trace),
    )


def _in_captured_precision(bundle: Bundle, step: ReplayStep, device: torch.device) -> Captured:
    """Return what a step does in the captured precision; empty if that is not known. State of the program outside of the model may change.

    It is computed twice if it fails: a failure that state of the program causes may not come again.
    """
    try:
        run = _Replay(RecordedStep(bundle, device), step, device, "captured")
        outcome, result = run.computed()
        if not (result.is_nonfinite or result.update_is_nonfinite):
            return "finite"
        if not (result.has_failed and result.is_reproduced):
            return ""
        difference = run.computed()[0].difference(outcome)
    except Exception:  # noqa: BLE001 - this device may lack operations of that precision; another fault occurs in the replay itself, too
        return ""
    return "" if difference else "fails again"


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
        self._scaled = recorded.scaled_parameters()
        self._scale = recorded.scale() if precision == "captured" or self._scaled else 1.0
        self._dtype = _DTYPES.get(precision)

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

    def set_state(self) -> None:
        """Set the recorded state of the model."""
        self._recorded.set_model(self._model, checks_dtypes=self._precision == "captured")
        if self._dtype is not None:
            self._model.to(self._dtype)

    def saved_state(self) -> ModelState:
        """Return the state of the model that `set_state` does not set."""
        return ModelState(self._inner, self._recorded.unrecorded(self._model))

    def compute(self) -> list[tuple[float | None, float]]:
        """Compute all micro-batches and their gradients. Returns recorded and replayed losses."""
        count = len(self._recorded.bundle.document.micro_batches)
        batches = self._first_batches(count)
        losses = [self._micro_batch(number, batches.get(number)) for number in range(count)]
        self._unscale(lambda name: name not in self._scaled)
        if self._step.before_update is not None:
            self._step.before_update(self._model)
        return losses

    def _unscale(self, is_chosen: Callable[[str], bool]) -> None:
        """Divide the gradients of chosen parameters by the scale, as a gradient scaler does."""
        if self._scale == 1.0:
            return
        inverse = torch.tensor(self._scale).double().reciprocal().float()
        for name, parameter in self._inner.named_parameters():
            if parameter.grad is not None and is_chosen(name):
                parameter.grad.mul_(inverse.to(parameter.device))

    def _first_batches(self, count: int) -> dict[int, Any]:
        """Return the first recorded batches, as many as take no more memory than the bundle, as those of a sound bundle do.

        They are in memory before the step begins, so that a tracer names them. A damaged bundle may refer to a tensor in any number of batches.
        """
        batches: dict[int, Any] = {}
        room = self._recorded.bundle.size
        with _unobserved():
            for number in range(count):
                batches[number] = self._batch(number)
                room -= self._recorded.memory
                if room < 0:
                    break
        return batches

    def _batch(self, number: int) -> Any:
        batch = self._recorded.batch(number)
        return batch if self._dtype is None else _converted(batch, self._dtype)

    def _micro_batch(self, number: int, batch: Any) -> tuple[float | None, float]:
        """Compute a micro-batch. Returns its recorded and replayed loss."""
        recorded = self._recorded
        has_begun = False

        def begin_pass(*_: Any) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                with _unobserved():
                    recorded.begin_pass(number)
                    self._check_autocast(number)

        with ExitStack() as stack:
            if not recorded.syncs(number) and isinstance(self._model, nn.parallel.DistributedDataParallel):
                stack.enter_context(self._model.no_sync())
            with _unobserved():
                batch = self._batch(number) if batch is None else batch
                recorded.begin_micro_batch(number)
            for module in self._observed_modules(number):
                stack.callback(module.register_forward_pre_hook(begin_pass).remove)
            try:
                loss = self._step.loss(self._model, batch)
            except Exception as error:
                if has_begun or recorded.has_batch(number):
                    raise
                raise ConfigError(
                    f"ReplayStep.loss raised {type(error).__name__} before it called the model: {error}; the program has not named its batch, so "
                    f"that it gets the arguments of the model: {_shown(batch)}",
                    "call hook.batch((inputs, labels)) before each forward pass of the program, and record again; or let ReplayStep.loss take the arguments",
                ) from error
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ConfigError(
                    f"ReplayStep.loss returned {type(loss).__name__}",
                    "return the loss, a tensor with one element",
                )
            scaled = loss if self._scale == 1.0 else loss * self._scale
            scaled.backward()
        with _unobserved():
            if not has_begun:
                recorded.begin_pass(number)
            recorded.note_draws()
        return self._recorded_loss(number), float(loss.detach())

    def _observed_modules(self, number: int) -> Iterable[nn.Module]:
        """Return the modules whose first call begins the pass: the model, or its parts if the program called only those."""
        calls_model = "arguments" in self._recorded.bundle.document.micro_batches[number]
        return (self._inner,) if calls_model else self._inner.modules()

    def _recorded_loss(self, number: int) -> float | None:
        recorded = self._recorded
        before = recorded.losses(number)
        if not before:
            self._uncompared[f"loss of micro-batch {number}"] = None
        if len(before) > 1:
            self._uncompared[f"other losses of micro-batch {number}"] = None
            recorded.problems[
                f"the program called backward() for {len(before)} losses of micro-batch {number}; the replay computes the last of them"
            ] = None
        return before[-1] if before else None

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
        is_captured = self._precision == "captured"
        with _unobserved():
            comparison = _GradientComparison(recorded, dict(self._inner.named_parameters()))
            gradients_finite = all(
                bool(_elements(parameter.grad).isfinite().all())
                for parameter in self._inner.parameters()
                if parameter.grad is not None
            )
        other_loss = any(
            before is not None
            and (
                _kind(before) != _kind(after)
                if is_captured
                else math.isfinite(before) != math.isfinite(after)
            )
            for before, after in losses
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
            has_drawn=recorded.has_drawn,
        )

    def outcome(self, losses: list[tuple[float | None, float]]) -> _Outcome:
        """Return what a computation has made, before the update."""
        with _unobserved():
            gradients = {
                name: _fingerprint(parameter.grad)
                for name, parameter in self._inner.named_parameters()
                if parameter.grad is not None
            }
        return _Outcome(tuple(after for _, after in losses), gradients)

    def _update(self) -> bool | None:
        """Make the update. Returns whether it makes a parameter non-finite; None if that is not known."""
        if self._step.optimizer is None or self._precision != "captured":
            return None
        if not self._parameters_are_finite():
            self._recorded.problems["a parameter was not finite before the step: the update was not made"] = (
                None
            )
            return None
        optimizer = self._step.optimizer(self._model)
        with _unobserved():
            is_set = self._recorded.set_optimizer(optimizer)
            self._unscale(lambda name: name in self._scaled)  # their optimizer would do so in its step
        if not is_set:
            self._recorded.problems[
                "the bundle has no state of such an optimizer: the update was not made"
            ] = None
            return None
        try:
            optimizer.step()
        except Exception as error:
            raise FormatError(
                f"bundle {self._recorded.bundle.name}: {type(optimizer).__name__}.step() with the recorded state raised "
                f"{type(error).__name__}: {str(error)[:200]}",
                "the state is damaged, or that of another optimizer: give a ReplayStep without an optimizer, which ends with the gradients",
            ) from error
        return not self._parameters_are_finite()

    def _parameters_are_finite(self) -> bool:
        with _unobserved():
            return all(bool(parameter.isfinite().all()) for parameter in self._inner.parameters())

    def computed(self) -> tuple[_Outcome, ReplayResult]:
        """Set the recorded state, compute the step, and compare it. Then the rest of the model's state and the generators are as before."""
        self.set_state()
        state = self.saved_state()
        try:
            with random_states.unchanged():
                losses = self.compute()
                return self.outcome(losses), self.compared(losses)
        finally:
            state.restore()

    def compared_and_traced(self) -> ReplayResult:
        """Compute the step, compare it, and compute it again under a tracer if it made non-finite values."""
        outcome, result = self.computed()
        if not (result.is_nonfinite or result.update_is_nonfinite):
            return result
        trace, difference = self._traced(outcome, result.update_is_nonfinite)
        return dataclasses.replace(result, trace=trace, trace_difference=difference)

    def traced_and_compared(self) -> ReplayResult | None:
        """Compute the step under a tracer, and compare it; None if that raises."""
        self.set_state()
        state = self.saved_state()
        tracer = self._tracer()
        try:
            with tracer.step(self._recorded.bundle.document.step):
                result = self.compared(self.compute())
        except WatchstepError:
            raise
        except Exception:  # noqa: BLE001 - the program's own exceptions come again without the tracer
            state.restore()
            return None
        is_bad = result.is_nonfinite or result.update_is_nonfinite
        return dataclasses.replace(result, trace=tracer.trace() if is_bad else None)

    def _tracer(self) -> Tracer:
        return Tracer(self._inner, TraceConfig(ring_bytes=2 * 2**30))

    def _traced(self, first: _Outcome, update_is_nonfinite: bool | None) -> tuple[Trace, str]:
        """Compute the step again under a tracer.

        Args:
            first: What the first computation has made.
            update_is_nonfinite: Whether its update made a parameter non-finite.

        Returns:
            The trace, and how this computation differs from the first; empty if it does not.
        """
        tracer = self._tracer()
        self.set_state()
        try:
            with tracer.step(self._recorded.bundle.document.step):
                difference = self.outcome(self.compute()).difference(first)
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
    """Return the largest difference of two gradients: see `GradientDifference`."""
    first, second = _doubles(before), _doubles(after)
    for is_of_kind in (torch.isnan, torch.isposinf, torch.isneginf):
        if not torch.equal(is_of_kind(first), is_of_kind(second)):
            return math.inf
    finite = first.isfinite()
    difference = (first[finite] - second[finite]).abs()
    if not difference.numel() or not float(difference.max()):
        return 0.0
    return float(difference.max() / first[finite].abs().max().clamp_min(torch.finfo(torch.float64).tiny))


def _doubles(gradient: Tensor) -> Tensor:
    """Return a gradient in float64 on the host; of complex numbers their parts."""
    detached = gradient.detach()
    return (torch.view_as_real(detached.resolve_conj()) if detached.is_complex() else detached).double().cpu()


@contextmanager
def _unobserved() -> Iterator[None]:
    """Run operations that are not of the program: a tracer leaves them out."""
    own_work.depth += 1
    try:
        yield
    finally:
        own_work.depth -= 1


def _shown(batch: Any) -> str:
    """Return the structure of a batch in words."""
    if isinstance(batch, Tensor):
        return f"a {str(batch.dtype).removeprefix('torch.')} tensor of shape {list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key!r}: {_shown(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, list | tuple):
        return f"({', '.join(map(_shown, batch))})"
    return type(batch).__name__


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
