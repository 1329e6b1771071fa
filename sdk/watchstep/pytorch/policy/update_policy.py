"""The gate policy: skips an update by non-finite gradients, or stops before it, on all ranks alike.

It decides between the last hook before a step and the update itself, see `optimizer_steps`. The body of a skipped step does not run: nothing is
hidden, copied or undone, whatever the optimizer is, and all hooks of the program see its gradients. Learning rate schedules, callbacks and the
program's counters see an ordinary step.

A `torch.amp.GradScaler` skips updates by itself to find its scale. The policy leaves those to it.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from watchstep.capture.health import RecorderHealth
from watchstep.capture.steps.metric_names import WITHHELD
from watchstep.capture.steps.own_work import own_work
from watchstep.capture.steps.recorder import Recorder
from watchstep.pytorch import device_kernel, internals
from watchstep.pytorch.gate import any_is_nonfinite
from watchstep.pytorch.parameters import amp, optimizer_steps
from watchstep.pytorch.policy.host_votes import HostVotes
from watchstep.pytorch.policy.watched_optimizers import WatchedOptimizers
from watchstep.pytorch.running_statistics import RunningStatistics
from watchstep.stopping import OnNonfinite

_CLOSED, _FINITE, _NONFINITE, _NOT_AGAIN = 0, 1, 2, 3
"""Votes about an update. The last one: not finite, and the step cannot be computed again."""

_DONE, _WAITS = 1, 2
"""Votes while the step is computed again."""

# Keeps those of several ranks alive after their hooks: a closed rank still votes.
_live: set[UpdatePolicy] = set()

_of_parents: list[UpdatePolicy] = []
"""Policies whose recording began in the parent of this process. They stay alive, because the end of their process group waits for threads of the parent."""


class Redo(Protocol):
    """Computes a step again whose update would stop the training, see `watchstep.trace.redo`."""

    @property
    def runs(self) -> bool:
        """Whether a step is being computed again: no update is made meanwhile."""
        ...

    @property
    def step(self) -> int:
        """Number of the step that is computed again."""
        ...

    def obstacle(self, optimizer: Optimizer) -> str:
        """Return why the current step cannot be computed again; empty if it can be."""
        ...

    def begin(self, optimizer: Optimizer, step: int) -> None:
        """Begin, while the step's update by an optimizer is being prevented."""
        ...

    def begin_recorded(self, optimizer: Optimizer) -> bool:
        """Begin to compute a step of an earlier process after the first update, which is being prevented. Returns False without one."""
        ...

    def end(self, optimizer: Optimizer, *, is_nonfinite: bool) -> str | None:
        """Handle a prevented update. Returns the sentence that ends the training; None if the step has not come yet."""
        ...

    def has_bad_loss(self, optimizer: Optimizer) -> bool:
        """Return whether a loss of the next update is not finite."""
        ...

    def update_ends(self, optimizer: Optimizer) -> None:
        """Handle the end of an update, made or prevented."""
        ...

    def others_change(self) -> None:
        """Handle the end of an update of other models."""
        ...

    def failed(self, error: Exception) -> None:
        """Count a fault."""
        ...

    def close(self) -> None:
        """End, and drop the references to the program."""
        ...


@dataclass
class _Decision:
    """The last decision about an optimizer.

    Attributes:
        is_nonfinite: The gate's result for the next update, of all gradients completely; None if it is unknown.
        skips: Whether the update is not made, because gradients are non-finite.
        has_voted: Whether the ranks have voted about the update. A retry of a step that raised is the same update.
        in_a_row: Number of updates by non-finite gradients in a row.
        versions: Versions of the parameters before the closure; empty for an optimizer that changes none before.
    """

    is_nonfinite: bool | None = None
    skips: bool = False
    has_voted: bool = False
    in_a_row: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)


class UpdatePolicy:
    """Decides before each update of a watched model, on every rank, whether it is made.

    With several ranks each update has one vote: an update is skipped on all ranks if the gradients of any are non-finite. If a vote
    fails, because a rank has ended or makes other updates, each rank decides for itself from then on, and none raises: the others
    would wait for it forever.
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
        self._decisions: MutableMapping[Optimizer, _Decision] = internals.weak_id_dictionary.value()
        self._statistics: list[RunningStatistics] = []
        self._skipped_at = -1
        self.redo: Redo | None = None
        """Computes the step that would stop the training again; None without it."""

    def watch(self, model: nn.Module, optimizer: Optimizer | None = None) -> RunningStatistics:
        """Also decide about updates of this model, and of an optimizer that has other parameters, such as copies in higher precision.

        Returns:
            Its running statistics, which are to be notified of the model's passes.
        """
        self._watched.add(model, self._forget)
        if optimizer is not None:
            self._watched.include(optimizer)
        if self not in _live:
            _live.add(self)
            optimizer_steps.decide(self)
        statistics = RunningStatistics(model)
        self._statistics.append(statistics)
        return statistics

    def close(self) -> None:
        """End the recording: updates are no longer skipped, once all ranks have closed."""
        if os.getpid() != self._process:
            _of_parents.append(self)
            return
        self._closed = True
        self._statistics = []
        if self.redo is not None:
            if self.redo.runs and self._recorder.stopped is None:
                self._recorder.end_early("the program ended before its step could be computed again")
            self.redo.close()
        if self._votes is None or self._votes_failed:
            self._forget()

    def note_check(self, optimizer: Optimizer, *, is_nonfinite: bool) -> None:
        """Note the gate's result of a complete check of the gradients of the next update."""
        self._decision_of(optimizer).is_nonfinite = is_nonfinite

    def before_step(self, optimizer: Optimizer, *, has_closure: bool, is_retry: bool) -> None:
        """Note what a closure is compared with."""
        decision = self._decision_of(optimizer)
        decision.has_voted &= is_retry
        changes_early = has_closure and not _is_of_pytorch(optimizer)
        decision.versions = _versions_of(optimizer) if changes_early else []

    def closure_done(self, optimizer: Optimizer) -> None:
        """Do nothing: `prevents` is called next."""

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:  # noqa: ARG002 - as `StepListener`
        """Handle the end of an update, which the next passes follow."""
        if not self._statistics or device_kernel.capturing():
            return
        if optimizer not in self._watched:
            if self.redo is not None:
                self.redo.others_change()
            return
        own_work.depth += 1
        try:
            for statistics in self._statistics:
                statistics.update_ends()
            if self.redo is not None:
                self.redo.update_ends(optimizer)
        finally:
            own_work.depth -= 1

    def failed(self, error: Exception) -> None:
        """Count a fault in the observation of a step."""
        self._health.fault("update policy", error)

    def prevents(self, optimizer: Optimizer, *, is_possible: bool) -> bool:
        """Decide about an update. May raise `StopTraining`, on all ranks. A retry is checked again, without a vote."""
        if self not in _live or os.getpid() != self._process or device_kernel.capturing():
            return False
        is_again = self.redo is not None and self.redo.runs and not self._closed
        if optimizer not in self._watched:
            return is_again  # it may update what the step is computed from
        decision = self._decision_of(optimizer)
        if self.redo is not None and is_again:
            return self._prevents_again(self.redo, optimizer, decision)
        if self.redo is not None and self._begins_recorded(self.redo, optimizer):
            return True
        is_repeated = decision.has_voted and decision.skips
        own_work.depth += 1
        obstacle = ""
        try:
            local = not self._closed and (
                self._is_nonfinite(optimizer, decision) or self._has_scaled_fault(optimizer)
            )
            if local:
                obstacle = self._obstacle_to_redo(optimizer, decision, is_possible=is_possible)
            vote = (_NOT_AGAIN if obstacle else _NONFINITE) if local else _FINITE
            highest = _NONFINITE if decision.skips else vote
            if not decision.has_voted:
                highest = self._agreed(vote)
            nonfinite = None if highest == _CLOSED else highest > _FINITE
            if nonfinite:
                self._restore_statistics()
        finally:
            own_work.depth -= 1
            decision.is_nonfinite = None
        if nonfinite is None:
            self._forget()
            return False
        is_late, decision.has_voted, decision.skips = decision.has_voted, True, nonfinite
        if not nonfinite:
            decision.in_a_row = 0
            self._note_update()
            return False
        if not is_repeated:
            decision.in_a_row += 1
            if not (self._votes_failed or is_late) and self._policy.stops_at(decision.in_a_row):
                if self.redo is not None and highest != _NOT_AGAIN:
                    self._begin_again(self.redo, optimizer, decision)
                    return True
                self._stop(decision.in_a_row, obstacle and f"it was not computed again: {obstacle}")
        if obstacle := self._obstacle(optimizer, decision, is_possible=is_possible):
            self._health.note("updates", f"{type(optimizer).__name__} {obstacle}")
            return False
        if not is_repeated:
            self._health.count("skipped_updates")
            self._skipped_at = self._recorder.step
            self._recorder.scalar(WITHHELD, 1.0)
        return True

    def _obstacle_to_redo(self, optimizer: Optimizer, decision: _Decision, *, is_possible: bool) -> str:
        """Return why this rank cannot compute the step again; empty if it can, or is not asked to."""
        if self.redo is None or not self._policy.stops_at(decision.in_a_row + 1):
            return ""
        try:
            if obstacle := self._obstacle(optimizer, decision, is_possible=is_possible):
                return f"{type(optimizer).__name__} {obstacle}"
            return self.redo.obstacle(optimizer)
        except Exception as error:  # noqa: BLE001 - the training stops without it
            self.redo.failed(error)
            return f"{type(error).__name__}: {error}"[:200]

    def scaler_skips(self, optimizer: Optimizer) -> None:
        """Handle an update that a gradient scaler has left out without calling the optimizer. May raise `StopTraining`, on all ranks.

        A scaler leaves out updates to find its scale. Only where the step that stops the training is computed again, a loss that is not finite before
        scaling stops it.
        """
        redo = self.redo
        if (
            redo is None
            or self not in _live
            or os.getpid() != self._process
            or optimizer not in self._watched
        ):
            return
        decision = self._decision_of(optimizer)
        if redo.runs:
            self._prevents_again(redo, optimizer, decision)
        elif (vote := self._vote_of_skip(redo, optimizer, decision)) > _FINITE:
            decision.in_a_row += 1
            if vote == _NOT_AGAIN:
                self._stop(decision.in_a_row, "it was not computed again")
            self._begin_again(redo, optimizer, decision)
        own_work.depth += 1
        try:
            redo.update_ends(optimizer)
        finally:
            own_work.depth -= 1

    def _vote_of_skip(self, redo: Redo, optimizer: Optimizer, decision: _Decision) -> int:
        own_work.depth += 1
        try:
            vote = _FINITE
            if redo.has_bad_loss(optimizer) and self._policy.stops_at(decision.in_a_row + 1):
                vote = _NOT_AGAIN if redo.obstacle(optimizer) else _NONFINITE
        finally:
            own_work.depth -= 1
        return self._agreed(vote)

    def _has_scaled_fault(self, optimizer: Optimizer) -> bool:
        """Return whether a gradient scaler leaves out the update of a fused optimizer whose loss is not finite, if that is to be computed again."""
        return self.redo is not None and amp.scaling_of(optimizer).skips and self.redo.has_bad_loss(optimizer)

    def _begin_again(self, redo: Redo, optimizer: Optimizer, decision: _Decision) -> None:
        """Begin to compute the step again, or stop."""
        step = self._recorder.step
        own_work.depth += 1
        try:
            redo.begin(optimizer, step)
        except Exception as error:  # noqa: BLE001 - the training stops without it
            redo.failed(error)
            self._stop(decision.in_a_row, f"it was not computed again: {type(error).__name__}: {error}"[:300])
        finally:
            own_work.depth -= 1
        self._recorder.last_recorded = step

    def _begins_recorded(self, redo: Redo, optimizer: Optimizer) -> bool:
        """Begin to compute a step of an earlier process, if there is one. All ranks have one, or none."""
        own_work.depth += 1
        try:
            begins = redo.begin_recorded(optimizer)
        finally:
            own_work.depth -= 1
        if begins:
            self._recorder.last_recorded = self._recorder.step
        return begins

    def _prevents_again(self, redo: Redo, optimizer: Optimizer, decision: _Decision) -> bool:
        """Prevent an update while a step is computed again, and stop once all ranks have computed it."""
        own_work.depth += 1
        try:
            is_nonfinite = self._is_nonfinite(optimizer, decision) or redo.has_bad_loss(optimizer)
            found = redo.end(optimizer, is_nonfinite=is_nonfinite)
        except Exception as error:  # noqa: BLE001 - the training stops nevertheless
            redo.failed(error)
            found = f"it could not be computed again: {type(error).__name__}: {error}"[:300]
        finally:
            decision.is_nonfinite = None
            own_work.depth -= 1
        if self._agreed(_WAITS if found is None else _DONE) != _WAITS:
            self._restore_statistics()
            self._stop(decision.in_a_row, found or "")
        return True

    def _note_update(self) -> None:
        """Record that updates are made again, at the first step after a skipped one."""
        if 0 <= self._skipped_at < self._recorder.step:
            self._skipped_at = -1
            self._recorder.scalar(WITHHELD, 0.0)

    def _obstacle(self, optimizer: Optimizer, decision: _Decision, *, is_possible: bool) -> str:
        """Return why an update cannot be skipped; empty if it can."""
        if not is_possible:
            return 'calls hooks by itself, so its updates cannot be skipped; use Hook(on_nonfinite="stop")'
        if decision.versions and decision.versions != _versions_of(optimizer):
            return (
                "changes parameters before its closure ends, so its updates cannot be skipped; "
                'use Hook(on_nonfinite="stop")'
            )
        if self._votes_failed and not _is_of_pytorch(optimizer):
            return "may wait for other ranks in its updates, so they are not skipped now that the ranks no longer vote"
        return ""

    def _restore_statistics(self) -> None:
        """Restore running statistics that the forward passes have made non-finite: the update is not the only damage of a bad batch."""
        try:
            for statistics in self._statistics:
                restored = statistics.restore()
                if restored.number:
                    self._health.count("restored_buffers", restored.number)
                if restored.nonfinite:
                    names = ", ".join(restored.nonfinite[:5])
                    self._health.note(
                        "buffers", f"not finite after a non-finite step, and without a finite copy: {names}"
                    )
        except Exception as error:  # noqa: BLE001 - the update is skipped nevertheless
            self._health.fault("running statistics", error)

    def _is_nonfinite(self, optimizer: Optimizer, decision: _Decision) -> bool:
        """Return whether this rank's gradients are non-finite, and no gradient scaler skips their update.

        A scaler whose optimizer is fused decides on the device, by gradients from before the program's clipping.
        """
        scaling = amp.scaling_of(optimizer)
        if scaling.skips or (scaling.is_skipped is not None and scaling.is_skipped.is_met()):
            return False
        if decision.is_nonfinite is not None and not internals.has_step_hooks(optimizer):
            return decision.is_nonfinite
        return any_is_nonfinite(
            [
                parameter.grad
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]
        )

    def _agreed(self, vote: int) -> int:
        """Return the highest vote of all ranks, of which closed ones vote `_CLOSED`."""
        vote = _CLOSED if self._closed else vote
        if self._votes is None or self._votes_failed:
            return vote
        try:
            return self._votes.highest(vote)
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._health.fault("update policy", error)
            self._health.note(
                "updates", "the ranks no longer vote: each skips its own non-finite updates, and none stops"
            )
            self._votes_failed = True
            return vote

    def _stop(self, in_a_row: int, explanation: str = "") -> None:
        """Raise `StopTraining`; the update is not made."""
        step = self._recorder.step if self.redo is None or not self.redo.runs else self.redo.step
        self._forget()
        self._recorder.stop(self._policy.reason(step, in_a_row, explanation), source="gate policy", step=step)

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


def _is_of_pytorch(optimizer: Optimizer) -> bool:
    """Return whether a step of an optimizer runs nothing but PyTorch's own code, within this process."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _versions_of(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Return the numbers of changes in place of the parameters, and the addresses of their values, which a program may replace."""
    return [
        (
            0 if parameter.is_inference() else internals.version(parameter),
            parameter.data_ptr() if type(parameter) is nn.Parameter else 0,
        )
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
