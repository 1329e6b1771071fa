"""Attaching to an unmodified program at the first step of an optimizer, in one process per rank.

``sitecustomize`` runs in every Python process of the job, including torchrun's agent, DataLoader workers and
compiler subprocesses, which inherit the rank. None of these steps an optimizer, and a claim on this machine excludes
a second process of the same rank.
"""

from __future__ import annotations

import gc
import logging
import os
import time
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import get_worker_info

from watchstep.capture.steps.metric_names import IN_PROCESS
from watchstep.hook import Hook
from watchstep.hook_arguments import AUDIT
from watchstep.pytorch import internals, losses
from watchstep.pytorch.loaders.loader_samples import EarlySamples
from watchstep.pytorch.losses import BackwardLoss
from watchstep.pytorch.parameters import amp, optimizer_steps
from watchstep.pytorch.parameters.updates import UpdatesOfOthers
from watchstep.pytorch.watch import Watch
from watchstep.unattended import start_hook

_log = logging.getLogger("watchstep")
_MAX_LOSSES = 8
_MAX_MODELS = 4
_PAUSE = 100
"""Look-ups of new optimizers that begin no recording take a hundredth of the time: a program may make an optimizer for each step."""
_MAX_TRAININGS = 32
"""Trainings of a process that are recorded one after another. Each start and end of a recording takes some 50 ms."""

_END_SECONDS = 2.0
"""Limit of the wait for the store at the end of a training that another one follows. What is not written then goes to disk."""

_waiting: list[Attachment] = []
_trainings: list[Trainings] = []


class Attachment:
    """Waits for the first step, then creates a `Hook`."""

    def __init__(self) -> None:
        self._losses: list[BackwardLoss] = []
        self._samples = EarlySamples()
        optimizer_steps.listen(self)
        losses.listen(self)
        amp.listen(self)

    def backward_begins(self) -> None:
        """Do nothing yet."""

    def found(self, loss: BackwardLoss) -> None:
        """Keep the losses of the current step, without their graphs."""
        self._losses = [*self._losses[-_MAX_LOSSES + 1 :], replace(loss, root=None)]

    def before_step(self, optimizer: Optimizer, *, has_closure: bool, is_retry: bool) -> None:
        """Start recording at the first step, unless the program records itself."""
        watch = self._start(optimizer)
        if watch is not None:
            watch.before_step(optimizer, has_closure=has_closure, is_retry=is_retry)

    def closure_done(self, optimizer: Optimizer) -> None:
        """Do nothing: the hook created at the step listens itself."""

    def failed(self, error: Exception) -> None:
        """Do nothing: the hook counts faults from the first step on."""

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Do nothing: the hook listens from the first step on."""

    def scaled(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Do nothing yet: the optimizer steps or is skipped."""

    def skipped(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Start recording at a first step that a gradient scaler skips."""
        watch = self._start(optimizer)
        if watch is not None:
            watch.skipped(optimizer, scale)

    def _start(self, optimizer: Optimizer) -> Watch | None:
        """Start recording. Never raises, because the program did not request a recorder and must continue without one."""
        hook: Hook | None = None
        try:
            self._detach()
            losses, self._losses = self._losses, []
            if get_worker_info() is not None or (hook := start_hook("PyTorch")) is None:
                return None
            # It listens before the watch does: an optimizer of the next training is none without parameters of this model.
            trainings = Trainings(hook, optimizer)
            watch = _first_watch(hook, _model_of(optimizer), optimizer)
            if watch is None:
                return None
            _trainings.append(trainings)
            watch.adopt_loss(losses)
            self._samples.pass_to(hook._session)  # noqa: SLF001 - part of the SDK
        except Exception as error:  # noqa: BLE001 - no fault may end the program
            if hook is None:
                _log.error("watchstep: not recording: %s", error)
            else:
                hook._health.fault("attach", error)  # noqa: SLF001 - as above
            return None
        return watch

    def _detach(self) -> None:
        amp.forget(self)
        optimizer_steps.forget(self)
        losses.forget(self)
        _waiting.clear()


class Trainings:
    """Follows further optimizers of a process: those beside the first one, and those of later trainings.

    The model of an optimizer that steps while the program keeps the first one, such as a generator beside a discriminator, becomes a part of the
    recording. A training that begins when the optimizers of the last one are gone, as in cross-validation or a search of hyperparameters, is
    recorded as the next attempt of the run.
    """

    def __init__(self, hook: Hook, first: Optimizer) -> None:
        self._number = 1
        self._next_look = 0.0
        self._begin(hook, first)
        optimizer_steps.listen(self)

    def _begin(self, hook: Hook, first: Optimizer) -> None:
        self._hook, self._first = weakref.ref(hook), weakref.ref(first)
        self._recorded: weakref.WeakSet[Optimizer] = weakref.WeakSet((first,))
        self._left_out: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._others = UpdatesOfOthers()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool, is_retry: bool) -> None:
        """Watch the model of an optimizer that is new, in this recording or in the next one."""
        if optimizer in self._recorded:
            self._count(optimizer)
        elif optimizer not in self._left_out and (began := time.perf_counter()) >= self._next_look:
            watches = self._watches_of(optimizer)
            if not watches:
                ended = time.perf_counter()
                self._next_look = ended + _PAUSE * (ended - began)
            for watch in watches:
                watch.before_step(optimizer, has_closure=has_closure, is_retry=is_retry)

    def _watches_of(self, optimizer: Optimizer) -> list[Watch]:
        """Return the watches of a new optimizer's model that do not listen to this step yet."""
        hook = self._hook()
        if hook is None or hook._ending.ended:  # noqa: SLF001 - part of the SDK
            self._end()
            return []
        try:
            if any(_updates(optimizer, watch) for watch in hook._watches):  # noqa: SLF001 - as above
                self._recorded.add(optimizer)
                return []
            if self._is_over():
                return self._next(hook, optimizer)
            if len(hook._watches) < _MAX_MODELS:  # noqa: SLF001 - as above
                self._recorded.add(optimizer)
                number = len(hook._watches)  # noqa: SLF001 - as above
                hook.watch(_model_of(optimizer), optimizer)
                return hook._watches[number:]  # noqa: SLF001 - as above
            self._leave_out(
                hook, optimizer, f"is of a further model; {_MAX_MODELS} are recorded beside each other"
            )
        except Exception as error:  # noqa: BLE001 - no fault may end the program
            hook._health.fault("attach", error)  # noqa: SLF001 - as above
        return []

    def _count(self, optimizer: Optimizer) -> None:
        """Let another optimizer count the steps of the run if the first one is gone, as that of an inner loop, or steps no more."""
        first = self._first()
        self._others.add(is_own=optimizer is first)
        if first is not None and not self._others.has_ended:
            return
        self._first, self._others, hook = weakref.ref(optimizer), UpdatesOfOthers(own=1), self._hook()
        watches = [] if hook is None else hook._watches  # noqa: SLF001 - part of the SDK
        counting = [watch for watch in watches if _updates(optimizer, watch)]
        if counting:
            for watch in watches:
                watch.counts_steps = watch is counting[0]

    def _is_over(self) -> bool:
        """Whether the recorded optimizers are gone. A scheduler and its optimizer refer to each other until they are collected."""
        if self._recorded and self._number < _MAX_TRAININGS:
            gc.collect()
        return not self._recorded

    def _next(self, hook: Hook, optimizer: Optimizer) -> list[Watch]:
        """End the recording, and begin that of the next training."""
        ranks = hook._identity.world_size  # noqa: SLF001 - as above
        if ranks > 1 or self._number >= _MAX_TRAININGS:
            limit = (
                "with several ranks, one training is recorded"
                if ranks > 1
                else f"{_MAX_TRAININGS} are recorded"
            )
            self._leave_out(hook, optimizer, f"begins another training; {limit}")
            return []
        model, earlier = _model_of(optimizer), hook._watches[0].model  # noqa: SLF001 - as above
        # With the weights of the last training this is a resume, whose steps follow.
        first_step = hook._recorder.last_finished + 1 if _has_weights_of(model, earlier) else 0  # noqa: SLF001 - as above
        losses = hook._recorder.take_derived()  # noqa: SLF001 - as above
        ending = hook._ending  # noqa: SLF001 - as above
        ending.close_seconds = min(ending.close_seconds, _END_SECONDS)
        hook.close()
        following = start_hook("PyTorch", later_from=first_step)
        if following is None:
            self._end()
            return []
        watch = _first_watch(following, model, optimizer)
        self._number += 1
        self._begin(following, optimizer)
        if watch is None:
            return []
        following._recorder.adopt_derived(losses)  # noqa: SLF001 - as above
        following._recorder.scalar(IN_PROCESS, 1.0)  # noqa: SLF001 - as above
        return [watch]

    def _leave_out(self, hook: Hook, optimizer: Optimizer, reason: str) -> None:
        self._left_out.add(optimizer)
        hook._health.note(  # noqa: SLF001 - as above
            "trainings",
            f"a {type(optimizer).__name__} {reason}: its model is not recorded, and no stop comes from it",
        )

    def _end(self) -> None:
        optimizer_steps.forget(self)
        if self in _trainings:
            _trainings.remove(self)

    def closure_done(self, optimizer: Optimizer) -> None:
        """Do nothing: the watch created at the step listens itself."""

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Do nothing, as above."""

    def failed(self, error: Exception) -> None:
        """Do nothing: the hook counts faults."""


def _updates(optimizer: Optimizer, watch: Watch) -> bool:
    """Whether an optimizer updates parameters of a watched model."""
    watched = {id(parameter) for parameter in watch.model.parameters()}
    return any(id(parameter) in watched for group in optimizer.param_groups for parameter in group["params"])


def _has_weights_of(model: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters of two models are equal, in their order. Those that cannot be compared are not."""

    def kind(tensor: Tensor) -> tuple[Any, ...]:
        return tensor.shape, tensor.dtype, tensor.device, tensor.layout

    own, others = (list(each.parameters()) for each in (model, other))
    return len(own) == len(others) and all(
        kind(mine) == kind(theirs)
        and mine.layout is torch.strided
        and not mine.is_meta
        and torch.equal(mine, theirs)
        for mine, theirs in zip(own, others, strict=True)
    )


def _first_watch(hook: Hook, model: nn.Module, optimizer: Optimizer) -> Watch | None:
    """Watch the model of a new recording; None if that failed: the fault is logged, and health states it."""
    hook.watch(model, optimizer)
    return hook._watches[0] if hook._watches else None  # noqa: SLF001 - part of the SDK


def wait_for_first_step() -> None:
    """Start waiting; called once, when the program has imported PyTorch."""
    _waiting.append(Attachment())
    if AUDIT in os.environ:
        from watchstep.wrapper.audit.observer import observe

        observe(os.environ)


def _model_of(optimizer: Optimizer) -> nn.Module:
    """Return the outermost module with most of an optimizer's parameters, for names that its author knows.

    Inspects every object once; parameters without a module are watched as a separate module. Modules are inspected without a call of their
    methods, because those of a module that is not trained yet may make its layers from random numbers.
    """
    parameter_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    best, score = _Loose(optimizer), (0, 0)
    kinds = _subclasses(nn.Module) - {_Loose}
    for candidate in gc.get_objects():
        if type(candidate) not in kinds:
            continue
        try:
            modules = internals.modules_of(candidate)
            own = {id(p) for module in modules.values() for p in internals.parameters_of(module).values()}
        except Exception:  # noqa: BLE001, S112 - incomplete or abstract modules are not the trained one
            continue
        watched, size = len(own & parameter_ids), len(modules)
        if watched and (watched, size) > score:
            best, score = candidate, (watched, size)
    return best


def _subclasses(kind: type) -> set[type]:
    """Return a class and all classes below it."""
    found, waiting = {kind}, [kind]
    while waiting:
        new: set[type] = set(type.__subclasses__(waiting.pop())) - found
        found |= new
        waiting += new
    return found


class _Loose(nn.Module):
    """Parameters without a module, named by their position in the optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if isinstance(parameter, nn.Parameter):
                    self.register_parameter(f"group{number}_{index}", parameter)
