"""A watched model: measures the tensors that are due at a step, and detects where steps begin and end."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from watchstep.capture.steps.metric_names import LOADED, NONFINITE_APPLIED
from watchstep.capture.steps.own_work import own_work
from watchstep.capture.steps.session import Session
from watchstep.errors import ConfigError
from watchstep.format import tensors
from watchstep.format.tensors import Mode
from watchstep.kernels.measurement import Kernel
from watchstep.pytorch import device_kernel, internals, losses
from watchstep.pytorch.buffers import Buffers
from watchstep.pytorch.bundles.bundler import Bundler
from watchstep.pytorch.gate import FewestGradients, GradientGate
from watchstep.pytorch.kernel import TorchKernel
from watchstep.pytorch.losses import (
    AccumulatedLosses,
    BackwardLoss,
    LossNames,
    SummedLosses,
    record_tensor,
    save_tensor,
)
from watchstep.pytorch.names import NamedParameter, Names
from watchstep.pytorch.observable import ModuleHook, leave_hooks_out_of_scripts
from watchstep.pytorch.optimizer_map import OptimizerMap
from watchstep.pytorch.outputs.activations import ActivationHooks
from watchstep.pytorch.outputs.function_calls import FunctionCalls
from watchstep.pytorch.outputs.layer_hooks import EVALUATES_FASTER, Sentinel, sees_passes_of
from watchstep.pytorch.outputs.pass_hooks import PassHook
from watchstep.pytorch.outputs.passes import ForwardPasses, PartPasses
from watchstep.pytorch.parameters import amp, clipping, optimizer_steps
from watchstep.pytorch.parameters.amp import ScalerMetrics, Scaling
from watchstep.pytorch.parameters.clipping import ClippedGradients
from watchstep.pytorch.parameters.finite_checks import FiniteChecks
from watchstep.pytorch.parameters.hyperparameters import Hyperparameters
from watchstep.pytorch.parameters.parameters import Parameters, Updated
from watchstep.pytorch.parameters.updates import (
    CountingOptimizer,
    MissingUpdates,
    OverdueUpdates,
    ParametersNotInOptimizer,
    StaleGradients,
    UpdatesInStep,
)
from watchstep.pytorch.policy.update_policy import UpdatePolicy
from watchstep.pytorch.running_statistics import RunningStatistics
from watchstep.pytorch.structure import Structure
from watchstep.pytorch.tensors import snapshots

_STEPS_UNTIL_REPORT = (
    3  # number of finished steps after which tensors without rows are reported as not observed
)
_MAX_CHANGES = 20
"""Number of steps before which the program may replace modules of the model so that the new ones are observed."""

_MAX_PASSES = 500  # number of backward passes without an update after which a warning is reported


@dataclass(frozen=True)
class _Attempt:
    """An update that has been measured, but not made yet.

    Attributes:
        update: Number of the update.
        ids: Ids of the parameters.
        numbered: Number of gradient norms of the step before it, as counted by `ClippedGradients`.
        nonfinite: Whether a gradient is NaN or infinite: of this update in host memory, of an earlier one on a device.
    """

    update: int
    ids: list[int]
    numbered: tuple[int, int]
    nonfinite: bool = False


_NO_KEYWORDS: Mapping[str, Any] = {}
"""The keywords of a hook that another thread removed meanwhile: PyTorch leaves them out."""

_P = ParamSpec("_P")
_Observer: TypeAlias = "Callable[Concatenate[Watch, _P], None]"


def observes(
    where: str, *, in_graphs: bool = False, is_timed: bool = False
) -> Callable[[_Observer[_P]], _Observer[_P]]:
    """Decorate a method of `Watch` that hooks call, so that its faults are counted in health and never reach training.

    `StopTraining`, a `SystemExit`, is not caught. While a CUDA graph is captured nothing is computed, so the method is not called.

    Args:
        where: Kind of fault in the health report.
        in_graphs: Whether to call the method also while a graph is captured.
        is_timed: Whether the caller adds its time to the recorder's own work.
    """
    if is_timed:
        return functools.partial(_contains, where)

    def decorate(method: _Observer[_P]) -> _Observer[_P]:
        @functools.wraps(method)
        def call(watch: Watch, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            own_work.enter()
            try:
                if in_graphs or not watch._captured():  # noqa: SLF001 - this decorates methods of the class
                    method(watch, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
                watch._health.fault(where, error)  # noqa: SLF001 - this decorates methods of the class
            finally:
                own_work.leave()

        return call

    return decorate


def _contains(where: str, method: _Observer[_P]) -> _Observer[_P]:
    """Count the faults of a method, which is called also while a graph is captured."""

    @functools.wraps(method)
    def call(watch: Watch, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(watch, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            watch._health.fault(where, error)  # noqa: SLF001 - this decorates methods of the class

    return call


class Watch:
    """Observes one model and the optimizers that update it. PyTorch's hooks call it, and it calls the recorder.

    Attributes:
        counts_steps: Whether the primary optimizer's steps count as steps of the run. With several watched models,
            only those of the first one count.
        model: The unwrapped model.
        loss_names: Names of the observed losses.
        loss_divisor: Returns the number by which the program divides each loss before ``backward()``. Losses are recorded undivided.
        summed_losses: Adds up the losses of a step if they are parts of one; else None.
        update_policy: Decides about updates by non-finite gradients; None if they are only recorded.
        running_statistics: Copies those of the model for the policy; None without one.
        bundler: Takes bundles of steps; None if there are none, or it belongs to another watch.
    """

    running_statistics: RunningStatistics | None = None
    _handed_over = _looked_at = -1
    _changes = 0

    def __init__(
        self,
        session: Session,
        model: Any,
        optimizer: Any,
        *,
        counts_steps: bool,
        name: str = "",
        replicated: bool = False,
    ) -> None:
        """Start to observe.

        Raises:
            ConfigError: The model or the optimizer cannot be watched.
        """
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"watch(…, {type(optimizer).__name__})", "give a torch.optim.Optimizer, or leave it out"
            )
        self.counts_steps = counts_steps
        self._steps = 0
        self._session = session
        self._recorder = session.recorder
        self._health = session.health
        self._config = session.config
        self._schedule = session.schedule
        self._gate = GradientGate()
        self.loss_names = LossNames()
        self.summed_losses: SummedLosses | None = None
        self.loss_divisor: Callable[[], float] = _no_divisor
        self.update_policy: UpdatePolicy | None = None
        self.bundler: Bundler | None = None
        self._in_closure: set[str] | None = None
        self._passes_declared = False
        self._closure_called = False
        self._backward = (-1, 0)
        self._attempts: OptimizerMap[_Attempt] = OptimizerMap()
        self._counting, self._others = CountingOptimizer(optimizer), UpdatesInStep()
        kernel: Kernel = TorchKernel()
        names = Names(model, name, session.config.chosen, session.used_collections, replicated=replicated)
        self.model = names.model
        self._parameters = Parameters(session, names, kernel)
        self._clipped = ClippedGradients(session, self._parameters)
        self._scaler = ScalerMetrics(session)
        self._stale = StaleGradients(session, name)
        self._fewest = FewestGradients()
        self._accumulated = AccumulatedLosses(session.recorder)
        self._hyperparameters = Hyperparameters(session, name)
        self._checks = FiniteChecks(session, names, kernel)
        self._missing = MissingUpdates(session, name)
        self._overdue = OverdueUpdates(
            session, [each.parameter for each in names.parameters().values()], name
        )
        self._applied = f"{name}.{NONFINITE_APPLIED}" if name else NONFINITE_APPLIED
        self._applies_nonfinite = False
        self._records_applied = tensors.METRICS in session.config.chosen
        self._buffers = Buffers(session, names, self._parameters, kernel)
        self._not_in_optimizer = ParametersNotInOptimizer(session, self._parameters, kernel)
        self._passes = ForwardPasses(session, names.model)
        self._parts = PartPasses(session.recorder)
        self._calls = FunctionCalls(session, names, kernel)
        self._pass_hooks: list[PassHook] = []
        self._handles: list[RemovableHandle] = []
        try:
            self._listen(names, kernel)
        except BaseException:
            self.detach()
            raise

    def _listen(self, names: Names, kernel: Kernel) -> None:
        internals.report_to(self._health)
        self._schedule.measure_floor(own_work)
        snapshots.pin_memory(self._session, list(names.parameters().values()))
        leave_hooks_out_of_scripts()
        self._structure = Structure(self.model)
        if sees_passes_of(self.model):
            before = ModuleHook(self._before_forward)
            register = functools.partial(self.model.register_forward_pre_hook, before, with_kwargs=True)
            self._pass_hooks.append(PassHook(register, of_layer=False))
        self._handles.append(self.model.register_load_state_dict_post_hook(ModuleHook(self._weights_loaded)))
        self._activations = ActivationHooks(
            self._session, names, kernel, self._passes, self._pass_hooks, self._part_called
        )
        if sees_passes_of(self.model):
            # After the hooks of its own output and input, which belong to the pass.
            after = ModuleHook(self._after_forward)
            register = functools.partial(self.model.register_forward_hook, after, always_call=True)
            self._pass_hooks.append(PassHook(register, of_layer=False))
        if isinstance(self.model, EVALUATES_FASTER):
            self._health.note(
                "activations",
                f"not observed: a {EVALUATES_FASTER.__name__} evaluates otherwise if it has hooks; watch a module that contains it",
            )
        optimizer_steps.listen(self)
        losses.listen(self)
        amp.listen(self)
        clipping.listen(self)

    def detach(self) -> None:
        """Stop observing, and remove the hooks from the model."""
        optimizer_steps.forget(self)
        losses.forget(self)
        amp.forget(self)
        clipping.forget(self)
        for handle in self._handles:
            handle.remove()
        for hook in self._pass_hooks:
            hook.detach()
        self._activations.detach()

    @observes("bundle")
    def end_bundles(self) -> None:
        """Bundle a failing step whose update was not made, and drop the references to the program."""
        if self.bundler is not None:
            step, optimizers = self._recorder.step, self._parameters.optimizers()
            self.bundler.before_update(step, optimizers, is_complete=False)
            self.bundler.forget()
            self.bundler = None

    @observes("stale gradients")
    def backward_begins(self) -> None:
        """Handle the start of a backward pass, which adds to gradients."""
        if not self._passes.owns_backward():
            return  # PyTorch may replace the gradients meanwhile, without Python's lock: to read them here could crash the process
        self._stale.backward_begins()

    @observes("loss")
    def found(self, loss: BackwardLoss) -> None:
        """Handle a loss at ``backward()``."""
        if not self._passes.owns_backward():
            return  # it belongs to another training in a concurrent thread
        self._begin()
        self._parts.ended()
        self._activations.new_pass()
        self._activations.end_turn()
        self._clipped.after_backward()
        self._report_missing_steps()
        name = self.loss_names.of(loss.place)
        if self.bundler is not None:
            self.bundler.inputs.backward(loss.value)
        is_bad = self._config.gate and self._gate.loss_is_bad(loss.value, loss.number, name or "")
        if is_bad:
            self._measure_bad_pass(loss)
            self._suspect()
        else:
            self._activations.learn(loss.root)
        self._missing.backward_begins(finite=not is_bad)
        if self.counts_steps and not is_bad:  # a program may skip the update of a non-finite loss
            self._overdue.backward_begins()
        if self.loss_names.is_new(loss):
            bursts = self._schedule.bursts
            self._detect_onsets(loss)
            self._record_loss(loss, name)
            if self._schedule.bursts > bursts:
                self._measure_live(loss.root)

    def failed(self, error: Exception) -> None:
        """Count a fault in the observation of losses, steps or closures outside this watch."""
        self._health.fault("observing", error)

    def _detect_onsets(self, loss: BackwardLoss) -> None:
        """Pass arrived losses of a device to the onset detection. The recorder passes those in host memory."""
        if self._session.onsets is None or loss.value.device.type == "cpu":
            return
        for name, value in self._gate.late_losses():
            self._session.onsets.add(name, value, derived=True)

    def _measure_live(self, root: Any) -> None:
        """Measure outputs that still exist at an onset: they are of the batch of the loss with this backward function."""
        since = self._schedule.now()
        self._activations.record_live(root)
        self._schedule.report_extra(since)

    def _record_loss(self, loss: BackwardLoss, name: str | None) -> None:
        step, capture = self._recorder.step, self._session.full_tensors
        is_measured = self._schedule.due((tensors.LOSSES,), step) is not None
        is_saved = capture.active and capture.due((tensors.LOSSES,), step) is not None
        if name is None or not (is_measured or is_saved):
            return
        if self._in_closure is not None:
            if name in self._in_closure:
                return  # of several calls of a closure in a step, the first one has the loss of the weights before the update
            self._in_closure.add(name)
        divisor = self.loss_divisor()
        if divisor == 1 and self.summed_losses is None and self._in_closure is None:
            self._accumulated.found(name, loss.divisor)
        value = loss.value if divisor == 1 else loss.value * divisor
        if self.summed_losses is not None:
            value = self.summed_losses.of(step, name, value)
        is_sum = self.summed_losses is not None
        if not is_measured:
            save_tensor(self._recorder, name, value, "train", derived=True, replaces=is_sum)
            return
        self._recorder.note_function(name, "train", loss.function if divisor == 1 else "")
        if value is loss.value and isinstance(loss.number, float):
            self._recorder.scalar(name, loss.number, derived=True)
            return
        record_tensor(self._recorder, name, value, "train", derived=True, replaces=is_sum)

    @observes("measuring")
    def before_step(
        self,
        optimizer: Optimizer,
        *,
        has_closure: bool,
        is_retry: bool,  # noqa: ARG002 - measurements of a failed step are always withdrawn
    ) -> None:
        """Measure gradients, and weights as the passes used them. The optimizer is about to update."""
        self._closure_called = False
        self._in_closure = set() if has_closure else None
        self._activations.measure_waiting()  # where a forward pass updates
        self._withdraw_failed(optimizer)
        scaling = amp.scaling_of(optimizer)
        if scaling.skips:
            self._handle_skip(optimizer)
            return
        updated = self._parameters.of(optimizer)
        self._checks.before_update(optimizer, updated)
        if not has_closure:
            self._measure(optimizer, updated, scaling, updated_already=False)
        if self._schedule.any_due(self._session.used_collections, self._recorder.step):
            self._parameters.before_update(optimizer, updated, self._recorder.step, scaling.updates)
        else:
            self._parameters.forget_before(optimizer)

    @observes("measuring")
    def closure_done(self, optimizer: Optimizer) -> None:
        """Measure gradients that a closure has computed inside the optimizer's step. Nothing is updated yet."""
        self._closure_called = True
        self._measure(optimizer, self._parameters.of(optimizer), amp.PLAIN, updated_already=False)

    @observes("step", in_graphs=True)
    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Handle the end of an update, which ends the step if the optimizer is the primary one."""
        self._in_closure = None
        if self._captured():
            return
        self._activations.end_pass()
        self._overdue.step_ends()
        updated = self._parameters.of(optimizer)
        if has_closure and not self._closure_called:  # the argument was not a closure
            self._measure(optimizer, updated, amp.PLAIN, updated_already=True)
        attempt = self._attempts.pop(optimizer, None)
        if attempt is not None:
            self._clipped.updated(attempt.ids)
            self._check_update(optimizer, updated, is_nonfinite=attempt.nonfinite)
        self._parameters.after_update(optimizer, updated, self._recorder.step)
        self._stale.after_step(optimizer, updated.parameters)
        if not self._ends_step(optimizer):
            self._others.add(self._recorder.step)
            if attempt is not None and attempt.nonfinite:
                self._hand_over_bad()
        self._finish(optimizer)

    @observes("loaded weights")
    def _weights_loaded(self, *_arguments: Any) -> None:
        """Record that weights were loaded between two steps, and measure the next steps, so that alerts about the old weights resolve."""
        if self._steps:
            self._recorder.scalar(LOADED, 1.0)
            self._schedule.onset(self._recorder.step + 1, 1.0)

    @observes("gradient scaler")
    def scaled(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Handle a scaler's step before it calls or skips the optimizer."""
        if self._begin_update(optimizer, self._parameters.of(optimizer)) and self._counting.counts(optimizer):
            self._scaler.scale(scale)

    @observes("gradient scaler", in_graphs=True)
    def skipped(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Handle a step in which a scaler skipped the optimizer. It consumed the batch, so it counts as a step of the run."""
        self._overdue.step_ends()
        if self._handle_skip(optimizer) and self._counting.counts(optimizer):
            self._scaler.scale(scale, skipped=True)
        if self.update_policy is not None:
            self.update_policy.scaler_skips(optimizer)
        self._finish(optimizer)

    @observes("clipping")
    def clipping(self, parameters: Sequence[Tensor]) -> None:
        """Measure gradients that are about to be clipped."""
        self._clipped.clipping(parameters)

    @observes("clipping")
    def clipped(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Record the norm of clipped gradients."""
        self._clipped.clipped(parameters, norm)
        if self._is_bad_norm(parameters, norm):
            self._suspect()
            self._missing.pass_is_bad()

    def adopt_loss(self, found: list[BackwardLoss]) -> None:
        """Add losses of the current step that were observed before this model was watched."""
        for loss in found:
            self.found(loss)

    def _captured(self) -> bool:
        """Return whether a CUDA graph is being captured: then nothing is computed, and nothing can be measured."""
        if not device_kernel.capturing():
            return False
        self._health.note("cuda_graphs", "steps inside a CUDA graph are not observed: a replay calls no hook")
        return True

    def _report_missing_steps(self) -> None:
        """Report a step with many backward passes and no end."""
        step, passes = self._backward
        self._backward = (self._recorder.step, passes + 1 if step == self._recorder.step else 1)
        if passes == _MAX_PASSES and self.counts_steps:
            self._health.note(
                "steps",
                f"no optimizer of PyTorch's updated this model in {_MAX_PASSES} backward passes: weights and gradients are "
                "not recorded; call hook.step() after each update, or all of it is one step",
            )

    def _begin(self) -> None:
        optimizer_steps.pass_begins()
        if self.counts_steps:
            self._recorder.begin()

    @observes("begin", in_graphs=True, is_timed=True)
    def _before_forward(
        self, _module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any] = _NO_KEYWORDS
    ) -> None:
        mode = self._passes.enter()
        if mode == "train":
            is_left_out = self._activations.model_called()
        else:
            is_left_out = self._activations.other_pass(mode, self._watch_for_training)
        if is_left_out:
            self._passes.leave()
            return
        if not self._passes_declared:
            self._pass_begins(mode)
        if mode == "train" and self.bundler is not None:
            self.bundler.inputs.called(arguments, keywords)
        self._calls.enter(mode)
        self._activations.enter(None if device_kernel.capturing() else mode)

    def _watch_for_training(self) -> RemovableHandle:
        return self.model.register_forward_pre_hook(Sentinel(self._training_resumes), with_kwargs=True)

    def _training_resumes(self, module: nn.Module, *given: Any) -> None:
        """Observe a pass again, the first one with gradients after many without."""
        self._activations.resume()
        self._before_forward(module, *given)

    def _after_forward(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._passes.leave()
        self._activations.leave()
        self._calls.leave()

    def _part_called(self, path: str, mode: Mode) -> None:
        """Handle a direct call of a module. It may begin a pass, unless the program declares where passes begin."""
        if self._passes_declared or not self._parts.begins(path, mode, counts_steps=self.counts_steps):
            return
        if mode == "train":
            self._passes.set_training_thread()
        self._schedule.dispatched(self._activations.dispatch_seconds)
        self._pass_begins(mode)

    @observes("begin", in_graphs=True)
    def begin_pass(self) -> None:
        """Begin a forward pass, also without a call of the model. From now on only this method begins passes."""
        self._passes_declared = True
        self._pass_begins(self._passes.mode_of_call())

    def step_by_hand(self) -> None:
        """Handle the end of a step that the program reports, from its training thread. From now on no optimizer's steps count."""
        self.counts_steps = False
        self._activations.end_pass()
        self._passes.set_training_thread()

    def _pass_begins(self, mode: Mode | None) -> None:
        """Handle the start of a forward pass in a mode; None if it is not recorded."""
        if mode is None or device_kernel.capturing():
            return
        system = self._session.system
        self._activations.new_pass()
        if mode != "train":
            self._session.samples.pass_begins(mode, self._recorder.last_finished + 1)
            if self.bundler is not None:
                self.bundler.inputs.other_pass()
            self._schedule.forward(mode, self._recorder.step)
            if system is not None:
                system.times.other_mode()
            return
        if system is not None:
            system.times.forward()
        self._begin()
        if self._looked_at != self._recorder.step:
            self._looked_at = self._recorder.step
            self._look_at_modules()
        self._session.samples.pass_begins(mode, self._recorder.last_finished + 1)
        self._parts.began()
        self._activations.live.forget()
        if self.running_statistics is not None:
            self.running_statistics.pass_begins()
        if self.bundler is not None:
            self.bundler.inputs.begin_pass(self._recorder.step)
        if logged_nan := self._recorder.logged_nan:
            self._suspect()
        self._missing.pass_begins(logged_nan=logged_nan)

    def _look_at_modules(self) -> None:
        """Observe the modules that the program has put into the model since the last step."""
        if self._changes >= _MAX_CHANGES or not self._structure.has_changed():
            return
        self._changes += 1
        if self._changes == _MAX_CHANGES:
            self._health.note(
                "modules",
                f"the program has replaced modules before {_MAX_CHANGES} steps; those that it replaces from step {self._recorder.step} on are not "
                "observed, nor are their buffers",
            )
        self._activations.list_modules()
        self._buffers.list_layers()
        self._checks.list_buffers()
        if self.running_statistics is not None:
            self.running_statistics.list_statistics()
        if self.bundler is not None:
            self.bundler.inputs.modules_changed(self.model)

    def _suspect(self) -> None:
        """Handle a non-finite loss or gradient norm: check buffers, which this pass has changed, now and updated tensors later."""
        self._recorder.logged_nan = False
        self._checks.suspect(self._recorder.step)
        self._checks.check_buffers(self._recorder.step)

    def _is_bad_norm(self, parameters: Sequence[Tensor], norm: Tensor) -> bool:
        """Return whether a norm of this model's gradients is in host memory and not finite."""
        if not self._config.gate or norm.device.type != "cpu" or norm.numel() != 1:
            return False
        return not math.isfinite(norm.detach().item()) and bool(self._parameters.watched(parameters))

    def _check_update(self, optimizer: Optimizer, updated: Updated, *, is_nonfinite: bool) -> None:
        """Check whether the tensors that the optimizer updated are finite, if there is a reason to."""
        step = self._recorder.step
        if self._recorder.logged_nan:
            self._suspect()
        if not is_nonfinite:
            self._missing.updated()
            if self._applies_nonfinite:
                self._record_applied(0.0)
                self._schedule.demand(step + 1)  # so that recorded gradients show that they are finite again
        else:
            self._checks.suspect(step)
            self._missing.left_out()
            if self._checks.checks(updated) and self._checks.has_damage(optimizer, updated) is False:
                self._record_applied(0.0)  # the optimizer handles such gradients itself
        self._checks.after_update(optimizer, updated, step)

    def _record_applied(self, value: float) -> None:
        self._applies_nonfinite = value > 0
        if self._records_applied:
            self._recorder.scalar(self._applied, value)

    def _measure_bad_pass(self, loss: BackwardLoss) -> None:
        """Measure remaining outputs of the forward pass, and the rest of this step, because a loss is not finite, if limits permit.

        The loss in host memory is of this pass, that of a device of an earlier one.
        """
        if self._schedule.demand(self._recorder.step):
            since = self._schedule.now()
            self._activations.record_live(loss.root)
            self._schedule.spent(tensors.ACTIVATIONS, since)
        self._note_nonfinite(self._recorder.step, is_late=loss.value.device.type != "cpu")

    def _begin_update(self, optimizer: Optimizer, updated: Updated) -> bool:
        """Handle an optimizer that is about to update. Returns whether it has watched parameters."""
        if not updated.parameters:
            return False
        self._counting.updates(optimizer, updated.ids)
        self._passes.set_training_thread()
        if self._ends_step(optimizer):
            self._recorder.begin()
        return True

    def _ends_step(self, optimizer: Optimizer) -> bool:
        """Return whether an update by this optimizer ends a step of the run."""
        return self.counts_steps and self._counting.counts(optimizer)

    def _finish(self, optimizer: Optimizer) -> None:
        if self._ends_step(optimizer):
            self._recorder.begin()
            self._recorder.finish()
            self._report_unseen()

    def _hand_over_bad(self) -> None:
        """Pass the rows of the first bad update in a step that may never end: the optimizer of a first stage, which counts the steps, steps no more."""
        if self._others.is_overdue and self._handed_over != self._recorder.step:
            self._handed_over = self._recorder.step
            self._recorder.hand_over_unfinished()

    def _handle_skip(self, optimizer: Optimizer) -> bool:
        """Discard the gradients of an update that a scaler skips, and bundle the step if its loss is not finite. Returns whether it is of this model."""
        self._accumulated.undivide()
        updated = self._parameters.of(optimizer)
        if not self._begin_update(optimizer, updated):
            return False
        if self.bundler is not None:
            self.bundler.before_update(self._recorder.step, self._parameters.optimizers(), is_complete=False)
        self._clipped.drop(updated.ids)
        self._scaler.skipped()
        self._suspect()
        self._missing.left_out()
        self._parameters.measure_weights(updated, self._recorder.step)
        self._parameters.measure_checksums(updated, self._recorder.step)
        return True

    def _withdraw_failed(self, optimizer: Optimizer) -> None:
        """Withdraw the measurements of an optimizer's last step if it raised: that update was not made."""
        attempt = self._attempts.pop(optimizer, None)
        if attempt is None:
            return
        self._recorder.withdraw(attempt.update)
        gradients = [named.gradient for named in self._parameters.of(optimizer).parameters]
        self._session.full_tensors.discard(gradients, "train")
        if attempt.nonfinite:
            self._record_applied(0.0)
        self._parameters.measure_again()
        self._clipped.take_back(attempt.ids, attempt.numbered)
        self._health.count("retried_updates")

    def _measure(
        self, optimizer: Optimizer, updated: Updated, scaling: Scaling, *, updated_already: bool
    ) -> None:
        self._recorder.begin_update()
        try:
            self._measure_update(optimizer, updated, scaling, updated_already=updated_already)
        finally:
            self._recorder.update = 0

    def _measure_update(
        self, optimizer: Optimizer, updated: Updated, scaling: Scaling, *, updated_already: bool
    ) -> None:
        self._accumulated.undivide()
        if not self._begin_update(optimizer, updated):
            if (
                self._ends_step(optimizer) or self._counting.is_gone
            ):  # another optimizer without parameters of the model has replaced it
                self._not_in_optimizer.measure(self._recorder.step)
            return
        step = self._recorder.step
        attempt = self._attempts[optimizer] = _Attempt(
            self._recorder.update, updated.ids, self._clipped.numbered
        )
        if updated.is_recorded:
            self._hyperparameters.before_update(optimizer)
        if scaling.is_skipped is not None:
            self._scaler.skipped(scaling.is_skipped)
        elif self._config.gate and self._has_nonfinite(optimizer, updated):
            if self._schedule.demand(step):
                self._parameters.measure_again()
            on_device = updated.parameters[0].parameter.device.type != "cpu"
            at_once = self._recorder.guarding is not None or self.update_policy is not None
            self._note_nonfinite(step, is_late=on_device and not at_once)
            self._attempts[optimizer] = replace(attempt, nonfinite=True)
            if not on_device and self._checks.checks(updated):  # on a device it may be of an earlier update
                self._record_applied(1.0)
        self._schedule.check_floor()
        is_any_due = self._schedule.any_due(self._session.used_collections, step)
        if is_any_due:
            self._parameters.measure_weights(updated, step)
            self._parameters.measure_checksums(updated, step)
        measured = self._clipped.release(updated.ids, scaling.updates)
        if self._clipped.released_nonfinite and not self._attempts[optimizer].nonfinite:
            self._record_applied(0.0)  # clipping made it finite
        if is_any_due:
            self._parameters.measure_gradients(updated, step, scaling, measured)
            self._buffers.measure(step)
            self._not_in_optimizer.measure(step)
        self._parameters.keep(updated, step, scaling, measured)
        if self._session.full_tensors.any_due(step):
            self._parameters.save(updated, step, scaling)
            self._buffers.save(step)
        state = "after the update" if updated_already else "before the update"
        self._snapshot(step, updated.parameters, state)
        if self.bundler is not None and not updated_already:
            self.bundler.before_update(step, self._parameters.optimizers())
        self._recorder.about_to_update()

    def _has_nonfinite(self, optimizer: Optimizer, updated: Updated) -> bool:
        gradients = [grad for p in updated.parameters if (grad := p.parameter.grad) is not None]
        if self._fewest.is_fewer(optimizer, len(gradients)):
            self._schedule.onset(self._recorder.step, 1.0)
        at_once = self._recorder.guarding is not None or self.update_policy is not None
        nonfinite = self._gate.has_nonfinite(gradients, at_once=at_once)
        is_complete = sum(len(group["params"]) for group in optimizer.param_groups) == len(updated.parameters)
        if self.update_policy is not None and is_complete:
            self.update_policy.note_check(optimizer, is_nonfinite=nonfinite)
        return nonfinite

    def _note_nonfinite(self, step: int, *, is_late: bool) -> None:
        self._session.bundles.bad(step, is_late=is_late)
        if self._session.snapshots.bad(step):
            self._session.snapshot_writer.protect()
            self._session.samples.request_upload()
            self._session.full_tensors.protect(step)

    def _snapshot(self, step: int, parameters: list[NamedParameter], state: str) -> None:
        occasion = self._session.snapshots.due(step)
        if occasion is not None:
            since = self._schedule.now()
            snapshots.take(self._session, occasion, step, parameters, state)
            self._schedule.report_extra(since)

    def _report_unseen(self) -> None:
        self._steps += 1
        if self._steps != _STEPS_UNTIL_REPORT:
            return
        if reason := device_kernel.reason():
            self._health.note("kernel", reason)
        if empty := self._session.empty_collections():
            self._health.note("collections", f"nothing belongs to: {', '.join(empty)}; see their selectors")
        unseen = self._activations.take_unseen()
        if unseen and tensors.ACTIVATIONS in self._config.collections:
            names = ", ".join(unseen[:5]) + (f" and {len(unseen) - 5} more" if len(unseen) > 5 else "")
            self._health.note("activations", f"not observed: {names} (compiled, or not called)")


def _no_divisor() -> float:
    return 1.0
