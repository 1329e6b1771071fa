"""Common decision of ranks to stop: a rank that raised alone would leave the others waiting in a collective forever.

Every rank votes before every update of a watched model, independent of the state of its recording: the vote is attached to the optimizers
and not to the hook, because errors or the end of the hook must not change how often a rank votes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, MutableMapping
from datetime import timedelta
from typing import NoReturn, Protocol

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from watchstep.capture.health import RecorderHealth
from watchstep.pytorch import device_kernel
from watchstep.pytorch.parameters import optimizer_steps

VOTE_TIMEOUT = timedelta(minutes=5)
"""Timeout of a vote for the other ranks, shorter than the ten minutes of NCCL's own collectives."""

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

    The votes use their own process group, with gloo and therefore on the host: they do not mix with the training's collectives.
    If a vote fails (a rank makes other updates, or has ended), the rank stops voting: it continues, and no guard stops it.
    """

    def __init__(self, voter: Voter, health: RecorderHealth, models: Iterable[nn.Module] = ()) -> None:
        self._voter = voter
        self._health = health
        self._process = os.getpid()
        self._models: list[weakref.ref[nn.Module]] = []
        self._updating: MutableMapping[Optimizer, bool] = WeakIdKeyDictionary()
        self._world: weakref.ref[ProcessGroup] | None = None
        self._group: ProcessGroup | None = None
        for model in models:
            self.watch(model)

    def watch(self, model: nn.Module) -> None:
        """Also vote before updates of this model. Call this after the measuring hooks are registered, so that the vote is last."""
        self._models.append(weakref.ref(model, self._forget))
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
            if not self._is_watched(optimizer):
                return
            highest = self._highest(_CLOSED if request is None else _STOP if request else _CONTINUE)
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

    def _highest(self, vote: int) -> int:
        """Return the highest vote of all ranks, or this rank's vote without a process group."""
        if not distributed.is_available() or not distributed.is_initialized():
            return vote
        number = torch.tensor([vote], dtype=torch.int32, device="cpu")
        distributed.all_reduce(number, op=distributed.ReduceOp.MAX, group=self._own_group())
        return int(number.item())

    def _own_group(self) -> ProcessGroup:
        """Return the process group, created at the first vote, which all ranks reach, and again after the program recreates its groups."""
        world = distributed.group.WORLD
        assert world is not None
        if self._group is None or self._world is None or self._world() is not world:
            self._world = weakref.ref(world)
            self._group = distributed.new_group(backend="gloo", timeout=VOTE_TIMEOUT)
        return self._group

    def _is_watched(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer updates, or has updated, a watched model."""
        if optimizer in self._updating:
            return True
        models = [model for watched_model in self._models if (model := watched_model()) is not None]
        ids = {id(parameter) for model in models for parameter in model.parameters()}
        watched = any(
            id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"]
        )
        if watched:
            self._updating[optimizer] = True
        return watched

    def _forget(self, model: weakref.ref[nn.Module]) -> None:
        self._models.remove(model)
        if not self._models:
            _live.discard(self)

    def _end(self) -> None:
        """Stop voting, and close the connections, so that ranks that wait for this rank's vote fail at once."""
        _live.discard(self)
        group, self._group = self._group, None
        try:
            if group is not None and distributed.is_initialized():
                distributed.destroy_process_group(group)
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("stop barrier", error)
