"""The gate policy: skips an update by non-finite gradients, or stops before it, on all ranks alike.

Two listeners of optimizer steps, around those that measure::

    before the step   UpdateEnd ends what a failed step left   watches measure …   UpdatePolicy decides: keep, prevent, or raise
    after the step    UpdateEnd ends the prevented update      watches …

If the program has hooks of its own before the step of an optimizer, which may change gradients, the decision follows them. Learning rate schedules,
callbacks and the program's counters see an ordinary step.

A `torch.amp.GradScaler` skips updates by itself to find its scale. The policy leaves those to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from watchstep.capture.health import RecorderHealth
from watchstep.capture.steps.recorder import Recorder
from watchstep.pytorch import device_kernel
from watchstep.pytorch.gate import any_is_nonfinite
from watchstep.pytorch.observable import own_work
from watchstep.pytorch.parameters import amp, optimizer_steps
from watchstep.pytorch.policy.host_votes import HostVotes
from watchstep.pytorch.policy.prevented_update import PreventedUpdate, has_own_hooks, prevent, tolerates_none
from watchstep.pytorch.policy.watched_optimizers import WatchedOptimizers
from watchstep.stopping import OnNonfinite

SKIPPED = "updates:skipped"
"""Metric: 1 at a step with an update that the gate policy skipped."""

_CLOSED, _FINITE, _NONFINITE = 0, 1, 2

# Keeps those of several ranks alive after their hooks: a closed rank still votes.
_live: set[UpdatePolicy] = set()


class UpdateEnd:
    """Ends prevented updates, before anything else observes the end of the step."""

    def __init__(self) -> None:
        self._prevented: MutableMapping[Optimizer, PreventedUpdate] = WeakIdKeyDictionary()

    def prevent(self, optimizer: Optimizer) -> None:
        """Prevent the update that an optimizer is about to make."""
        self._prevented[optimizer] = prevent(optimizer)

    def before_step(self, optimizer: Optimizer, *, has_closure: bool, is_retry: bool) -> None:  # noqa: ARG002 - as `StepListener`
        """End an update whose step raised."""
        self._end(optimizer)

    def closure_done(self, optimizer: Optimizer) -> None:
        """Do nothing: the gradients are the program's."""

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:  # noqa: ARG002 - as `StepListener`
        """End a prevented update."""
        self._end(optimizer)

    def failed(self, error: Exception) -> None:
        """Do nothing: the policy counts the fault."""

    def _end(self, optimizer: Optimizer) -> None:
        prevented = self._prevented.pop(optimizer, None)
        if prevented is not None:
            prevented.end()


@dataclass
class _Decision:
    """The last decision about an optimizer.

    Attributes:
        is_nonfinite: The gate's result for the next update, of all gradients completely; None if it is unknown.
        skips: Whether the update was skipped.
        in_a_row: Number of skipped updates in a row.
        versions: Versions of the parameters before a closure ran inside the step; empty without a closure.
        handle: Removes the hook that decides after the program's own; None if there is none.
    """

    is_nonfinite: bool | None = None
    skips: bool = False
    in_a_row: int = 0
    versions: list[int] = field(default_factory=list)
    handle: Any = None


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
        self, policy: OnNonfinite, recorder: Recorder, health: RecorderHealth, *, votes: HostVotes | None
    ) -> None:
        self._policy = policy
        self._recorder = recorder
        self._health = health
        self._votes = votes
        self._votes_failed = False
        self._closed = False
        self._process = os.getpid()
        self._watched = WatchedOptimizers()
        self._decisions: MutableMapping[Optimizer, _Decision] = WeakIdKeyDictionary()
        self.restores: list[Callable[[], int]] = []
        self._end = UpdateEnd()
        optimizer_steps.listen(self._end)

    def watch(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Also decide about updates of this model, and of an optimizer that has other parameters, such as copies in higher precision.

        Call this after the measuring hooks are registered, so that the decision is last.
        """
        self._watched.add(model, self._forget)
        if optimizer is not None:
            self._watched.include(optimizer)
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
        """Decide about an update. May raise `StopTraining`, on all ranks. A retry is checked again, without a vote."""
        decision = self._decision_of(optimizer)
        if has_closure:
            decision.versions = [] if tolerates_none(optimizer) else _versions_of(optimizer)
        elif has_own_hooks(optimizer, before_only=True):
            decision.is_nonfinite = None  # the program's hooks may change the gradients
            self._decide_after_hooks(optimizer, decision, is_retry=is_retry)
        else:
            self._decide(optimizer, votes=not is_retry)

    def closure_done(self, optimizer: Optimizer) -> None:
        """Decide when the gradients of a step with a closure are known. May raise `StopTraining` on all ranks."""
        self._decide(optimizer, votes=True)

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Do nothing: `UpdateEnd` ends the update."""

    def failed(self, error: Exception) -> None:
        """Count a fault in the observation of a step."""
        self._health.fault("update policy", error)

    def _decide_after_hooks(self, optimizer: Optimizer, decision: _Decision, *, is_retry: bool) -> None:
        """Register a hook of the optimizer behind all others. PyTorch calls those of the optimizer after the global ones."""
        if decision.handle is not None:
            decision.handle.remove()

        def decide(*_: Any) -> None:
            decision.handle.remove()
            decision.handle = None
            try:
                self._decide(optimizer, votes=not is_retry)
            except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training; `StopTraining` is no Exception
                self._health.fault("update policy", error)

        decision.handle = optimizer.register_step_pre_hook(decide)

    def _decide(self, optimizer: Optimizer, *, votes: bool) -> None:
        if self not in _live or os.getpid() != self._process or device_kernel.capturing():
            return
        if optimizer not in self._watched:
            return
        decision = self._decision_of(optimizer)
        own_work.depth += 1
        try:
            local = not self._closed and self._is_nonfinite(optimizer, decision)
            nonfinite = self._agreed(local) if votes else decision.skips or local
        finally:
            own_work.depth -= 1
            decision.is_nonfinite = None
        if nonfinite is None:
            self._forget()
            return
        is_repeated = not votes and decision.skips
        decision.skips = nonfinite
        if not nonfinite:
            decision.in_a_row = 0
            return
        if not is_repeated:
            decision.in_a_row += 1
            if not self._votes_failed and votes and self._policy.stops_at(decision.in_a_row):
                self._stop(decision.in_a_row)
        self._skip(optimizer, decision, counts=not is_repeated)

    def _skip(self, optimizer: Optimizer, decision: _Decision, *, counts: bool) -> None:
        if decision.versions and decision.versions != _versions_of(optimizer):
            self._health.note(
                "updates",
                f"{type(optimizer).__name__} changes parameters before its closure ends, so its updates cannot be skipped; "
                'use Hook(on_nonfinite="stop")',
            )
            return
        self._end.prevent(optimizer)
        for restore in self.restores:
            if restored := restore():
                self._health.count("restored_buffers", restored)
        if counts:
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


def _versions_of(optimizer: Optimizer) -> list[int]:
    return [
        parameter._version  # noqa: SLF001 - has no public name
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
