"""Ranks that decide together: one that raised alone would leave the others waiting in a collective for ever.

Every rank votes before every update of a watched model, whatever became of its recording: the vote hangs on the optimizers
and not on the hook, whose faults and whose end must not change how often a rank votes.
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

PATIENCE = timedelta(minutes=5)
"""How long a vote waits for the other ranks; below the ten minutes that NCCL's own collectives wait for them."""

_CLOSED, _GO_ON, _STOP = 0, 1, 2

_live: set[Agreement] = set()  # which keeps them beyond their hooks


class Voter(Protocol):
    """What a rank's recorder says and does where ranks agree."""

    def requested(self) -> str | None:
        """Why it wants to stop; nothing to go on; None once it records no more. Raises nothing."""
        ...

    def stop(self, reason: str) -> NoReturn:
        """Raise `StopTraining`."""
        ...


class Agreement:
    """One rank's part: it votes as long as a model it was given lives, until all have stopped or all are closed.

    The votes have a process group of their own, of gloo and thus on the host: they never mix with the training's collectives.
    Where a vote fails (a rank that makes other updates, or is gone) the rank gives up: it goes on, and no guard stops it.
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
        """Vote before updates of this model too. Call it after what measures it listens, so that this is asked last."""
        self._models.append(weakref.ref(model, self._gone))
        _live.add(self)
        optimizer_steps.forget(self)
        optimizer_steps.listen(self)

    def before_step(self, optimizer: Optimizer, *, has_closure: bool, is_retry: bool) -> None:
        """An update comes next. May raise `StopTraining`, on all ranks. A retry has voted already."""
        if not has_closure and not is_retry:
            self._agree(optimizer)

    def closure_done(self, optimizer: Optimizer) -> None:
        """The gradients of a step with a closure are known. May raise `StopTraining`, on all ranks."""
        self._agree(optimizer)

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Nothing: the vote was before."""

    def failed(self, error: Exception) -> None:
        """Observing a step failed."""
        self._health.fault("agreement", error)

    def _agree(self, optimizer: Optimizer) -> None:
        if self not in _live or os.getpid() != self._process or device_kernel.capturing():
            return
        request = self._voter.requested()
        try:
            if not self._is_watched(optimizer):
                return
            most = self._most(_CLOSED if request is None else _STOP if request else _GO_ON)
        except Exception as error:  # noqa: BLE001 - the guard's faults never reach training
            self._health.fault("agreement", error)
            self._health.note("guard", "the ranks agree no more: what it finds is told, and stops nothing")
            self._end()
            return
        if most != _GO_ON:
            self._end()
        if most == _STOP:
            self._voter.stop(request or "the guard of another rank asked for it")

    def _most(self, vote: int) -> int:
        """The highest vote of all ranks; the own one where no process group is set up."""
        if not distributed.is_available() or not distributed.is_initialized():
            return vote
        number = torch.tensor([vote], dtype=torch.int32, device="cpu")
        distributed.all_reduce(number, op=distributed.ReduceOp.MAX, group=self._own_group())
        return int(number.item())

    def _own_group(self) -> ProcessGroup:
        """Made at the first vote, which all ranks reach; and again where the program has set up its groups anew."""
        world = distributed.group.WORLD
        assert world is not None
        if self._group is None or self._world is None or self._world() is not world:
            self._world = weakref.ref(world)
            self._group = distributed.new_group(backend="gloo", timeout=PATIENCE)
        return self._group

    def _is_watched(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer updates a watched model; once it does, it counts for good."""
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

    def _gone(self, model: weakref.ref[nn.Module]) -> None:
        self._models.remove(model)
        if not self._models:
            _live.discard(self)

    def _end(self) -> None:
        """Vote no more, and let ranks that still wait for this one's vote know at once: its connections are closed."""
        _live.discard(self)
        group, self._group = self._group, None
        try:
            if group is not None and distributed.is_initialized():
                distributed.destroy_process_group(group)
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault("agreement", error)
