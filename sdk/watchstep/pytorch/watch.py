"""A watched model: which of its tensors are due at a step, and when a step begins and ends."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from watchstep import tensors
from watchstep.capture.bounded_queue import PendingSnapshot
from watchstep.capture.record import Group
from watchstep.capture.session import Session
from watchstep.errors import ConfigError
from watchstep.kernels.interface import Kernel
from watchstep.layout import SnapshotKey
from watchstep.pytorch import backward_losses, optimizer_steps
from watchstep.pytorch.activations import ActivationHooks
from watchstep.pytorch.backward_losses import FoundLoss, LossNames
from watchstep.pytorch.gate import GradientGate
from watchstep.pytorch.kernel import TorchKernel
from watchstep.pytorch.names import NamedParameter, name_parameters, placements, unwrap
from watchstep.pytorch.scalars import record_tensor
from watchstep.pytorch.snapshots import encode_parameters
from watchstep.stopping import StopTraining
from watchstep.tensors import Mode

_OBSERVED_AFTER = 2  # finished steps after which a silent module is reported as not observed


class Watch:
    """Listens to one model and the optimizers that update it. Told by hooks; tells the hook's recorder.

    Attributes:
        counts_steps: whether the primary optimizer's steps count as steps of the run. Of several watched models,
            that of the first does.
    """

    def __init__(self, session: Session, model: Any, optimizer: Any, *, counts_steps: bool) -> None:
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"watch(…, {type(optimizer).__name__})", "give a torch.optim.Optimizer, or leave it out"
            )
        self.counts_steps = counts_steps
        self._session = session
        self._recorder = session.recorder
        self._health = session.health
        self._config = session.config
        self._schedule = session.schedule
        self._gate = GradientGate()
        self._loss_names = LossNames()
        self._kernel: Kernel = TorchKernel()
        self._model = unwrap(model)
        self._own_place, self._gradient_place = placements(model)
        self._parameters = name_parameters(self._model)
        self._primary: Optimizer | None = optimizer
        self._updated: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[NamedParameter]]]
        self._updated = weakref.WeakKeyDictionary()
        self._groups: dict[str, Group] = {}
        self._handle = self._model.register_forward_pre_hook(self._before_forward)
        self._activations = ActivationHooks(
            self._model, self._own_place, self._activations_due, self._observe_activations
        )
        optimizer_steps.listen(self)
        backward_losses.listen(self)

    def detach(self) -> None:
        """Stop listening, and take the hooks off the model."""
        optimizer_steps.forget(self)
        backward_losses.forget(self)
        self._handle.remove()
        self._activations.remove()

    def found(self, loss: FoundLoss) -> None:
        """A loss at ``backward()``."""
        try:
            self._begin()
            on_host = loss.value.device.type == "cpu"
            if self._config.gate and on_host and not torch.isfinite(loss.value).all():
                self._look_at_outputs()
            name = self._loss_names.of(loss.place)
            if name is not None and self._schedule.due(tensors.LOSSES, self._recorder.step):
                record_tensor(self._recorder, name, loss.value, "train", derived=True)
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("loss", error)

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The optimizer is about to update: measure gradients, and weights as they were used."""
        if has_closure:
            return
        try:
            self._measure(optimizer)
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("measuring", error)

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The optimizer has updated: the step is over, if it is the primary one's."""
        try:
            if has_closure:
                self._measure(optimizer)
            if optimizer is self._primary and self.counts_steps:
                self._recorder.begin()
                self._recorder.finish()
                self._report_unseen()
        except StopTraining:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("step", error)

    def adopt_loss(self, losses: list[FoundLoss]) -> None:
        """Losses that were found before this model was watched belong to the step under way."""
        for loss in losses:
            self.found(loss)

    def _begin(self) -> None:
        optimizer_steps.settle()
        if self.counts_steps:
            self._recorder.begin()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module.training and torch.is_grad_enabled():
            try:
                self._begin()
                self._activations.live.forget()
            except Exception as error:  # noqa: BLE001 - as above
                self._health.fault("begin", error)

    def _activations_due(self) -> bool:
        return self._schedule.due(tensors.ACTIVATIONS, self._recorder.step)

    def _observe_activations(self, group: Group, found: list[Tensor], mode: Mode) -> None:
        try:
            since = self._schedule.now()
            self._recorder.add(group, self._kernel.measure(found), mode)
            self._schedule.spent(tensors.ACTIVATIONS, since)
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("activations", error)

    def _look_at_outputs(self) -> None:
        """The loss is bad: measure what is left of the forward pass, and the rest of this step."""
        step = self._recorder.step
        if (
            not self._schedule.due(tensors.ACTIVATIONS, step)
            and tensors.ACTIVATIONS in self._config.collections
        ):
            for group, outputs in self._activations.live.alive():
                self._recorder.add(group, self._kernel.measure(outputs))
        self._schedule.demand(step)

    def _measure(self, optimizer: Optimizer) -> None:
        began = self._schedule.now()
        updated = self._updated_by(optimizer)
        if not updated:
            return
        if self._primary is None:
            self._primary = optimizer
        if optimizer is self._primary and self.counts_steps:
            self._recorder.begin()
        step = self._recorder.step
        with_gradient = [p for p in updated if p.parameter.grad is not None]
        gradients = [p.parameter.grad for p in with_gradient if p.parameter.grad is not None]
        if self._config.gate and self._gate.holds_nonfinite(gradients):
            self._schedule.demand(step)
        self._schedule.floor(self._schedule.now() - began + self._activations.idle_seconds)
        for collection in (tensors.WEIGHTS, tensors.BIASES):
            if self._schedule.due(collection, step):
                chosen = [p for p in updated if collection in p.weight.collections]
                self._record(collection, [p.weight for p in chosen], [p.parameter for p in chosen])
        if self._schedule.due(tensors.GRADIENTS, step):
            self._record(tensors.GRADIENTS, [p.gradient for p in with_gradient], gradients)
        if self._snapshot_due(step):
            self._snapshot(step, updated)

    def _record(self, collection: str, infos: list[tensors.TensorInfo], found: list[Tensor]) -> None:
        since = self._schedule.now()
        if not infos:
            self._schedule.spent(collection, since)
            return
        measured = tuple(infos)
        group = self._groups.get(collection)
        if group is None or group.tensors != measured:
            place = self._gradient_place if collection == tensors.GRADIENTS else self._own_place
            group = self._groups[collection] = Group.of(measured, place)
        self._recorder.add(group, self._kernel.measure(found))
        self._schedule.spent(collection, since)

    def _updated_by(self, optimizer: Optimizer) -> list[NamedParameter]:
        """The watched parameters among the optimizer's; looked up anew when it holds others than before."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = self._updated.get(optimizer)
        ids = list(map(id, held))
        if known is not None and known[0] == ids:
            return known[1]
        if any(i not in self._parameters for i in ids):
            self._parameters = name_parameters(self._model)  # some were added since
        updated = [self._parameters[i] for i in ids if i in self._parameters]
        self._updated[optimizer] = (ids, updated)
        return updated

    def _snapshot_due(self, step: int) -> bool:
        every = self._config.snapshot_every
        return self._session.snapshot_asked or (every is not None and step % every == 0)

    def _snapshot(self, step: int, parameters: list[NamedParameter]) -> None:
        self._session.snapshot_asked = False
        key = SnapshotKey("unclaimed", self._recorder.worker, step, "train")
        snapshot = PendingSnapshot(key, encode_parameters(parameters))
        if not self._session.queue.offer(snapshot, urgent=True):
            self._health.count("dropped_snapshots")

    def _report_unseen(self) -> None:
        if self._recorder.step == _OBSERVED_AFTER and tensors.ACTIVATIONS in self._config.collections:
            unseen = self._activations.unseen
            if unseen:
                named = ", ".join(unseen[:5]) + (f" and {len(unseen) - 5} more" if len(unseen) > 5 else "")
                self._health.note("activations", f"not observed: {named} (compiled, or not called)")
