"""Common decision of ranks to stop: a rank that raised alone would leave the others waiting in a collective forever.

Every rank votes before every update of a watched model, independent of the state of its recording: the vote is attached to the optimizers
and not to the hook, because errors or the end of the hook must not change how often a rank votes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NoReturn, Protocol

from torch import nn
from torch.optim import Optimizer

from watchstep.capture.health import RecorderHealth
from watchstep.pytorch import device_kernel
from watchstep.pytorch.parameters import optimizer_steps
from watchstep.pytorch.policy.host_votes import HostVotes
from watchstep.pytorch.policy.watched_optimizers import WatchedOptimizers

_CLOSED, _CONTINUE, _STOP = 0, 1, 2

_live: set[StopBarrier] = set()  # keeps them alive after their hooks


class Voter(Protocol):
    """The votes and stops of a rank's recorder."""

    def requested(self) -> str | None:
        """Return the reason to stop; empty to continue; None after the end of the recording. Does not raise."""
        ...

    def stop(self, reason: str) -> NoReturn:
        """Raise `StopTraining`."""
        ...


class StopBarrier:
    """The vote of one rank. It votes while one of its models exists, until all ranks have stopped or all are closed.

    If a vote fails (a rank makes other updates, or has ended), the rank stops voting: it continues, and no guard stops it.
    """

    def __init__(
        self, voter: Voter, health: RecorderHealth, votes: HostVotes, models: Iterable[nn.Module] = ()
    ) -> None:
        self._voter = voter
        self._health = health
        self._process = os.getpid()
        self._votes = votes
        self._watched = WatchedOptimizers()
        for model in models:
            self.watch(model)

    def watch(self, model: nn.Module) -> None:
        """Also vote before updates of this model. Call this after the measuring hooks are registered, so that the vote is last."""
        self._watched.add(model, self._end_without_models)
        _live.add(self)
        optimizer_steps.forget(self)
        optimizer_steps.listen(self)

    def before_step(self, optimizer: Optimizer, *, has_closure: bool, is_retry: bool) -> None:
        """Vote before an update. May raise `StopTraining` on all ranks. A retry has already voted."""
        if not has_closure and not is_retry:
            self._vote(optimizer)

    def closure_done(self, optimizer: Optimizer) -> None:
        """Vote when the gradients of a step with a closure are known. May raise `StopTraining` on all ranks."""
        self._vote(optimizer)

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Do nothing: the vote was before the update."""

    def failed(self, error: Exception) -> None:
        """Handle an error while a step was observed."""
        self._health.fault("stop barrier", error)

    def _vote(self, optimizer: Optimizer) -> None:
        if self not in _live or os.getpid() != self._process or device_kernel.capturing():
            return
        request = self._voter.requested()
        try:
            if optimizer not in self._watched:
                return
            highest = self._votes.highest(_CLOSED if request is None else _STOP if request else _CONTINUE)
        except Exception as error:  # noqa: BLE001 - errors of the guard never reach training
            self._health.fault("stop barrier", error)
            self._health.note(
                "guard", "the ranks no longer vote: faults are reported, but do not stop training"
            )
            self._end()
            return
        if highest != _CONTINUE:
            self._end()
        if highest == _STOP:
            self._voter.stop(request or "the guard of another rank requested the stop")

    def _end_without_models(self) -> None:
        _live.discard(self)

    def _end(self) -> None:
        """Stop voting, and close the connections, so that ranks that wait for this rank's vote fail at once."""
        _live.discard(self)
        try:
            self._votes.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("stop barrier", error)
