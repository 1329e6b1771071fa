"""A watched model: which of its tensors are due at a step, and when a step begins and ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from watchstep import tensors
from watchstep.capture.session import Session
from watchstep.errors import ConfigError
from watchstep.kernels.interface import Kernel
from watchstep.pytorch import (
    backward_losses,
    clipping,
    device_kernel,
    gradient_scaler,
    optimizer_steps,
    snapshots,
)
from watchstep.pytorch.activations import ActivationHooks
from watchstep.pytorch.backward_losses import FoundLoss, LossNames, SummedLosses
from watchstep.pytorch.buffers import Buffers
from watchstep.pytorch.clipped_gradients import ClippedGradients
from watchstep.pytorch.counting_optimizer import CountingOptimizer
from watchstep.pytorch.gate import GradientGate
from watchstep.pytorch.gradient_scaler import Scaling
from watchstep.pytorch.kept_gradients import KeptGradients
from watchstep.pytorch.kernel import TorchKernel
from watchstep.pytorch.module_hook import ModuleHook
from watchstep.pytorch.names import NamedParameter, Names
from watchstep.pytorch.parameters import Parameters, Updated
from watchstep.pytorch.scalars import record_tensor
from watchstep.pytorch.scaler_metrics import ScalerMetrics
from watchstep.pytorch.unheld_parameters import UnheldParameters
from watchstep.stopping import StopTraining
from watchstep.tensors import Mode

_OBSERVED_AFTER = 3  # finished steps after which what is silent is reported as not observed
_ENDLESS = 500  # backward passes within one step


class Watch:
    """Listens to one model and the optimizers that update it. Told by hooks; tells the hook's recorder.

    Attributes:
        counts_steps: whether the primary optimizer's steps count as steps of the run. Of several watched models,
            that of the first does.
        model: unwrapped.
        summed_losses: adds up the losses of a step, where they are parts of one; None where they are not.
    """

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
        self._loss_names = LossNames()
        self.summed_losses: SummedLosses | None = None
        self._told_of_passes = False
        self._saw_closure = False
        self._backward = (-1, 0)
        self._thread: int | None = None
        self._counting = CountingOptimizer(optimizer)
        kernel: Kernel = TorchKernel()
        names = Names(model, name, session.config.chosen, session.held, replicated=replicated)
        self.model = names.model
        self._parameters = Parameters(session, names, kernel)
        self._clipped = ClippedGradients(session, self._parameters)
        self._scaler = ScalerMetrics(session)
        self._kept = KeptGradients(session, name)
        self._buffers = Buffers(session, names, self._parameters, kernel)
        self._unheld = UnheldParameters(session, self._parameters, kernel)
        snapshots.prepare(session, list(names.parameters().values()))
        self._handle = self.model.register_forward_pre_hook(ModuleHook(self._before_forward))
        self._activations = ActivationHooks(session, names, kernel, self._mode)
        optimizer_steps.listen(self)
        backward_losses.listen(self)
        gradient_scaler.listen(self)
        clipping.listen(self)
        if unseen := clipping.not_observed():
            self._health.note("clipping", f"not observed in this version of PyTorch: {', '.join(unseen)}")

    def detach(self) -> None:
        """Stop listening, and take the hooks off the model."""
        optimizer_steps.forget(self)
        backward_losses.forget(self)
        gradient_scaler.forget(self)
        clipping.forget(self)
        self._handle.remove()
        self._activations.remove()

    def backward_begins(self) -> None:
        """A backward pass is about to add to gradients."""
        try:
            if not self._captured():
                self._kept.backward_begins()
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("kept gradients", error)

    def found(self, loss: FoundLoss) -> None:
        """A loss at ``backward()``."""
        try:
            if self._captured() or self._thread not in {None, threading.get_ident()}:
                return  # another training's, in a thread beside this one's
            self._begin()
            self._activations.new_pass()
            self._clipped.after_backward()
            self._note_endless()
            if self._config.gate and self._gate.loss_is_bad(loss.value):
                self._look_at_outputs()
            name = self._loss_names.of(loss.place)
            if name is not None and self._schedule.due((tensors.LOSSES,), self._recorder.step):
                value, step = loss.value, self._recorder.step
                if self.summed_losses is not None:
                    value = self.summed_losses.of(step, name, value)
                record_tensor(self._recorder, name, value, "train", derived=True)
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("loss", error)

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The optimizer is about to update: measure gradients, and weights as they were used."""
        try:
            if self._captured():
                return
            self._saw_closure = False
            scaling = gradient_scaler.scaling_of(optimizer)
            if scaling.skips:
                self._see_skip(optimizer)
                return
            if not has_closure:
                self._measure(optimizer, scaling, updated_already=False)
            self._parameters.before_update(optimizer, self._recorder.step, scaling.updates)
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("measuring", error)

    def closure_done(self, optimizer: Optimizer) -> None:
        """A closure has computed gradients inside the optimizer's step: now they are known, and nothing is updated yet."""
        try:
            if not self._captured():
                self._saw_closure = True
                self._measure(optimizer, gradient_scaler.PLAIN, updated_already=False)
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("measuring", error)

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The optimizer has updated: the step is over, if it is the primary one's."""
        try:
            if self._captured():
                return
            if has_closure and not self._saw_closure:  # what looked like one was none
                self._measure(optimizer, gradient_scaler.PLAIN, updated_already=True)
            self._parameters.after_update(optimizer, self._recorder.step)
            self._kept.after_step(optimizer, lambda: self._parameters.of(optimizer).parameters)
            self._finish(optimizer)
        except StopTraining:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("step", error)

    def scaled(self, optimizer: Optimizer, scale: Tensor) -> None:
        """A gradient scaler is about to call the optimizer, or to leave it out."""
        try:
            if (
                not self._captured()
                and self._updated(optimizer) is not None
                and self._counting.counts(optimizer)
            ):
                self._scaler.scale(scale)
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("gradient scaler", error)

    def skipped(self, optimizer: Optimizer, scale: Tensor) -> None:
        """A gradient scaler left the optimizer out. The batch is used up: that is a step of the run all the same."""
        try:
            if self._see_skip(optimizer) and self._counting.counts(optimizer):
                self._scaler.scale(scale, skipped=True)
            self._finish(optimizer)
        except StopTraining:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("gradient scaler", error)

    def clipping(self, parameters: Sequence[Tensor]) -> None:
        """Gradients are about to be clipped."""
        try:
            if not self._captured():
                self._clipped.clipping(parameters)
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("clipping", error)

    def clipped(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """The norm of gradients that are clipped."""
        try:
            if not self._captured():
                self._clipped.clipped(parameters, norm)
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("clipping", error)

    def adopt_loss(self, losses: list[FoundLoss]) -> None:
        """Losses that were found before this model was watched belong to the step under way."""
        for loss in losses:
            self.found(loss)

    def _captured(self) -> bool:
        """Whether a CUDA graph is being captured: nothing is computed then, and nothing may be measured."""
        if not device_kernel.capturing():
            return False
        self._health.note("cuda_graphs", "steps inside a CUDA graph are not observed: a replay calls no hook")
        return True

    def _note_endless(self) -> None:
        """Say so where backward passes come and come, and nothing ends a step."""
        step, passes = self._backward
        self._backward = (self._recorder.step, passes + 1 if step == self._recorder.step else 1)
        if passes == _ENDLESS and self.counts_steps:
            self._health.note(
                "steps",
                f"no optimizer of PyTorch's updated this model in {_ENDLESS} backward passes: weights and gradients are "
                "not recorded; call hook.step() after each update, or all of it is one step",
            )

    def _begin(self) -> None:
        optimizer_steps.settle()
        if self.counts_steps:
            self._recorder.begin()

    def _mode(self) -> Mode:
        """As the program last said, else as the model is."""
        said = self._session.mode
        return "eval" if said == "train" and not self.model.training else said

    def _before_forward(self, _module: nn.Module, _inputs: Any) -> None:
        if not self._told_of_passes:
            self._pass_begins()

    def begin_pass(self) -> None:
        """A forward pass begins, also where the model itself is not called; from now on only this tells of passes."""
        self._told_of_passes = True
        self._pass_begins()

    def _pass_begins(self) -> None:
        if device_kernel.capturing():
            return
        try:
            mode, system = self._mode(), self._session.system
            self._activations.new_pass()
            if mode != "train":
                self._schedule.forward(mode, self._recorder.step)
                if system is not None:
                    system.times.other_mode()
            elif torch.is_grad_enabled():
                self._thread = threading.get_ident()
                if system is not None:
                    system.times.forward()
                self._begin()
                self._activations.live.forget()
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("begin", error)

    def _look_at_outputs(self) -> None:
        """The loss is bad: measure what is left of the forward pass, and the rest of this step."""
        self._activations.record_live()
        self._schedule.demand(self._recorder.step)
        self._saw_bad(self._recorder.step)

    def _updated(self, optimizer: Optimizer) -> Updated | None:
        """The watched parameters of an optimizer whose turn it is; None where there are none."""
        updated = self._parameters.of(optimizer)
        if not updated.parameters:
            return None
        self._counting.updates(optimizer, updated.ids)
        self._thread = threading.get_ident()
        if self.counts_steps and self._counting.counts(optimizer):
            self._recorder.begin()
        return updated

    def _finish(self, optimizer: Optimizer) -> None:
        if self.counts_steps and self._counting.counts(optimizer):
            self._recorder.begin()
            self._recorder.finish()
            self._report_unseen()

    def _see_skip(self, optimizer: Optimizer) -> bool:
        """The update is left out: its gradients are no part of the record. Whether it is one of this model's."""
        updated = self._updated(optimizer)
        if updated is None:
            return False
        self._clipped.drop(updated.ids)
        self._scaler.skipped()
        self._parameters.measure_weights(updated, self._recorder.step)
        self._parameters.measure_checksums(updated, self._recorder.step)
        return True

    def _measure(self, optimizer: Optimizer, scaling: Scaling, *, updated_already: bool) -> None:
        began = self._schedule.now()
        updated = self._updated(optimizer)
        if updated is None:
            if self.counts_steps and self._counting.counts(optimizer):
                self._unheld.measure(self._recorder.step)
            return
        step = self._recorder.step
        if scaling.is_skipped is not None:
            self._scaler.skipped(scaling.is_skipped)
        elif self._config.gate and self._holds_nonfinite(updated):
            self._schedule.demand(step)
            self._parameters.measure_again()
            self._saw_bad(step)
        self._schedule.floor(self._schedule.now() - began + self._activations.idle_seconds)
        self._parameters.measure_weights(updated, step)
        self._parameters.measure_checksums(updated, step)
        measured = self._clipped.release(updated.ids, scaling.updates)
        self._parameters.measure_gradients(updated, step, scaling, measured)
        self._buffers.measure(step)
        self._unheld.measure(step)
        state = "after the update" if updated_already else "before the update"
        self._snapshot(step, updated.parameters, state)
        self._recorder.about_to_update()

    def _holds_nonfinite(self, updated: Updated) -> bool:
        gradients = [p.parameter.grad for p in updated.parameters if p.parameter.grad is not None]
        return self._gate.holds_nonfinite(gradients, at_once=self._recorder.guarding is not None)

    def _saw_bad(self, step: int) -> None:
        if self._session.snapshots.bad(step):
            self._session.snapshot_writer.protect()

    def _snapshot(self, step: int, parameters: list[NamedParameter], state: str) -> None:
        occasion = self._session.snapshots.due(step)
        if occasion is not None:
            since = self._schedule.now()
            snapshots.take(self._session, occasion, step, parameters, state)
            self._schedule.asked(since)

    def _report_unseen(self) -> None:
        self._steps += 1
        if self._steps != _OBSERVED_AFTER:
            return
        if reason := device_kernel.reason():
            self._health.note("kernel", reason)
        if empty := self._session.empty_collections():
            self._health.note("collections", f"nothing belongs to: {', '.join(empty)}; see their selectors")
        if tensors.ACTIVATIONS in self._config.collections:
            unseen = self._activations.unseen
            if unseen:
                named = ", ".join(unseen[:5]) + (f" and {len(unseen) - 5} more" if len(unseen) > 5 else "")
                self._health.note("activations", f"not observed: {named} (compiled, or not called)")
