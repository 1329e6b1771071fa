"""The gate policy: skips an update by non-finite gradients, or stops before it, on all ranks alike.

Two listeners of optimizer steps, around those that measure::

    before the step   GradientRestorer   watches measure …   UpdatePolicy decides: keep, hide the gradients, or raise
    after the step    GradientRestorer restores them   watches …   UpdatePolicy verifies

An update is skipped by hiding the gradients of the optimizer's parameters during its step: an optimizer of PyTorch leaves a parameter
without a gradient, its momentum and its step count as they are, and does not decay its weight. Learning rate schedules, callbacks and
the program's counters see an ordinary step.

A `torch.amp.GradScaler` skips updates by itself to find its scale. The policy leaves those to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from watchstep.capture.health import RecorderHealth
from watchstep.capture.steps.recorder import Recorder
from watchstep.pytorch import device_kernel
from watchstep.pytorch.gate import any_is_nonfinite
from watchstep.pytorch.observable import own_work
from watchstep.pytorch.parameters import amp, optimizer_steps
from watchstep.pytorch.policy.host_votes import HostVotes
from watchstep.pytorch.policy.watched_optimizers import WatchedOptimizers
from watchstep.stopping import OnNonfinite

SKIPPED = "updates:skipped"
"""Metric: 1 at a step with an update that the gate policy skipped."""

_CLOSED, _FINITE, _NONFINITE = 0, 1, 2

_live: set[UpdatePolicy] = (
    set()
)  # keeps those of several ranks alive after their hooks: a closed rank still votes


@dataclass
class _HiddenGradients:
    """Gradients of an optimizer that are hidden during its step, and the versions of its parameters."""

    gradients: list[tuple[Tensor, Tensor]]
    versions: list[int] = field(default_factory=list)

    @classmethod
    def hide(cls, optimizer: Optimizer) -> _HiddenGradients:
        hidden = cls([])
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    hidden.gradients.append((parameter, parameter.grad))
                    hidden.versions.append(parameter._version)  # noqa: SLF001 - has no public name
                    parameter.grad = None
        return hidden

    def restore(self) -> None:
        for parameter, gradient in self.gradients:
            if parameter.grad is None:
                parameter.grad = gradient

    @property
    def are_unchanged(self) -> bool:
        """Whether no parameter has been changed in place since."""
        return all(
            parameter._version == version  # noqa: SLF001 - as above
            for (parameter, _), version in zip(self.gradients, self.versions, strict=True)
        )


class GradientRestorer:
    """Makes the gradients of a skipped update visible again, before anything else observes the end of the step.

    Attributes:
        hidden: The hidden gradients, by optimizer.
    """

    def __init__(self) -> None:
        self.hidden: MutableMapping[Optimizer, _HiddenGradients] = WeakIdKeyDictionary()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool, is_retry: bool) -> None:  # noqa: ARG002 - as `StepListener`
        """Restore gradients that a step which raised has left hidden."""
        self.restore(optimizer)

    def closure_done(self, optimizer: Optimizer) -> None:
        """Do nothing: the gradients are the program's."""

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:  # noqa: ARG002 - as `StepListener`
        """Restore the gradients of a skipped update."""
        self.restore(optimizer)

    def failed(self, error: Exception) -> None:
        """Do nothing: the policy counts the fault."""

    def restore(self, optimizer: Optimizer) -> None:
        """Restore the hidden gradients of an optimizer."""
        hidden = self.hidden.get(optimizer)
        if hidden is not None:
            hidden.restore()


@dataclass
class _Decision:
    """The last decision about an optimizer.

    Attributes:
        is_nonfinite: The gate's result for the next update, of all gradients completely; None if it is unknown.
        skips: Whether the update was skipped.
        in_a_row: Number of skipped updates in a row.
    """

    is_nonfinite: bool | None = None
    skips: bool = False
    in_a_row: int = 0


class UpdatePolicy:
    """Decides before each update of a watched model, on every rank, whether it is made.

    With several ranks each update has one vote: an update is skipped on all ranks if the gradients of any are non-finite. If a vote
    fails, because a rank has ended or makes other updates, each rank decides for itself from then on, and none raises: the others
    would wait for it forever.

    Attributes:
        restores: Functions that set buffers which the forward passes of a skipped update have made non-finite to what they were before, as
            running statistics, and return their number.
    """

    def __init__(
        self, policy: OnNonfinite, recorder: Recorder, health: RecorderHealth, *, ranks: int
    ) -> None:
        self._policy = policy
        self._recorder = recorder
        self._health = health
        self._votes = HostVotes() if ranks > 1 else None
        self._votes_failed = False
        self._closed = False
        self._process = os.getpid()
        self._watched = WatchedOptimizers()
        self._decisions: MutableMapping[Optimizer, _Decision] = WeakIdKeyDictionary()
        self.restores: list[Callable[[], int]] = []
        self._restorer = GradientRestorer()
        optimizer_steps.listen(self._restorer)

    def watch(self, model: nn.Module) -> None:
        """Also decide about updates of this model. Call this after the measuring hooks are registered, so that the decision is last."""
        self._watched.add(model, self._forget)
        _live.add(self)
        optimizer_steps.forget(self)
        optimizer_steps.listen(self)

    def close(self) -> None:
        """End the recording: updates are no longer skipped, once all ranks have closed."""
        self._closed = True
        self.restores.clear()
        if self._votes is None or self._votes_failed:
            self._forget()

    def note_check(self, optimizer: Optimizer, *, is_nonfinite: bool) -> None:
        """Note the gate's result of a complete check of the gradients of the next update."""
        self._decision_of(optimizer).is_nonfinite = is_nonfinite

    def before_step(self, optimizer: Optimizer, *, has_closure: bool, is_retry: bool) -> None:
        """Decide about an update. May raise `StopTraining`, on all ranks. A retry repeats the decision without a vote."""
        if has_closure:
            return
        decision = self._decisions.get(optimizer)
        if is_retry and decision is not None:
            decision.is_nonfinite = None
            if decision.skips:
                self._hide(optimizer)
            return
        self._decide(optimizer)

    def closure_done(self, optimizer: Optimizer) -> None:
        """Decide when the gradients of a step with a closure are known. May raise `StopTraining` on all ranks."""
        self._decide(optimizer)

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:  # noqa: ARG002 - as `StepListener`
        """Verify that a skipped update has changed nothing."""
        hidden = self._restorer.hidden.pop(optimizer, None)
        if hidden is not None and not hidden.are_unchanged:
            self._health.note(
                "updates",
                f"{type(optimizer).__name__} changes parameters that have no gradient: its updates cannot be skipped; "
                'use Hook(on_nonfinite="stop")',
            )

    def failed(self, error: Exception) -> None:
        """Count a fault in the observation of a step."""
        self._health.fault("update policy", error)

    def _decide(self, optimizer: Optimizer) -> None:
        if self not in _live or os.getpid() != self._process or device_kernel.capturing():
            return
        if optimizer not in self._watched:
            return
        decision = self._decision_of(optimizer)
        own_work.depth += 1
        try:
            local = not self._closed and self._is_nonfinite(optimizer, decision)
            nonfinite = self._agreed(local)
        finally:
            own_work.depth -= 1
            decision.is_nonfinite = None
        if nonfinite is None:
            self._forget()
            return
        decision.skips = nonfinite
        decision.in_a_row = decision.in_a_row + 1 if nonfinite else 0
        if not nonfinite:
            return
        may_stop = not self._votes_failed
        if may_stop and self._policy.stops_at(decision.in_a_row):
            self._stop(decision.in_a_row)
        self._hide(optimizer)
        for restore in self.restores:
            if restored := restore():
                self._health.count("restored_buffers", restored)
        self._health.count("skipped_updates")
        self._recorder.scalar(SKIPPED, 1.0)

    def _is_nonfinite(self, optimizer: Optimizer, decision: _Decision) -> bool:
        """Return whether this rank's gradients are non-finite, and no gradient scaler decides about them."""
        scaling = amp.scaling_of(optimizer)
        if scaling.skips or scaling.is_skipped is not None:
            return False
        if decision.is_nonfinite is not None:
            return decision.is_nonfinite
        return any_is_nonfinite(
            [
                parameter.grad
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]
        )

    def _agreed(self, local: bool) -> bool | None:
        """Return whether the gradients of any rank are non-finite; None once all ranks have closed."""
        if self._votes is None or self._votes_failed:
            return None if self._closed else local
        try:
            highest = self._votes.highest(_CLOSED if self._closed else _NONFINITE if local else _FINITE)
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("update policy", error)
            self._health.note(
                "updates", "the ranks no longer vote: each skips its own non-finite updates, and none stops"
            )
            self._votes_failed = True
            return None if self._closed else local
        return None if highest == _CLOSED else highest == _NONFINITE

    def _hide(self, optimizer: Optimizer) -> None:
        self._restorer.hidden[optimizer] = _HiddenGradients.hide(optimizer)

    def _stop(self, in_a_row: int) -> None:
        """Raise `StopTraining`; the update is not made."""
        skipped = f", after {in_a_row - 1} skipped updates" if in_a_row > 1 else ""
        self._forget()
        self._recorder.stop(
            f"the gradients of step {self._recorder.step} are not finite{skipped}", source="gate policy"
        )

    def _decision_of(self, optimizer: Optimizer) -> _Decision:
        decision = self._decisions.get(optimizer)
        if decision is None:
            decision = self._decisions[optimizer] = _Decision()
        return decision

    def _forget(self) -> None:
        """End the policy, and close the connections, so that ranks that wait for this rank's vote fail at once."""
        _live.discard(self)
        optimizer_steps.forget(self)
        try:
            if self._votes is not None:
                self._votes.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("update policy", error)
