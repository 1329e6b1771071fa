"""Attach to a program that knows nothing of Watchstep: at the first step of an optimizer, in one process a rank.

``sitecustomize`` runs in every Python process of the job: also in torchrun's agent, in DataLoader workers and in
compiler subprocesses, which inherit the rank. None of these steps an optimizer; and a claim on this machine keeps a
second process of the same rank out.
"""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import tempfile
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import get_worker_info

from watchstep.capture.identity import ATTEMPT
from watchstep.capture.process_end import live
from watchstep.errors import WatchstepError
from watchstep.hook import Hook
from watchstep.pytorch import backward_losses, gradient_scaler, optimizer_steps
from watchstep.pytorch.backward_losses import FoundLoss
from watchstep.pytorch.watch import Watch

_log = logging.getLogger("watchstep")
_MOST_LOSSES = 8
_waiting: list[Attachment] = []


class Attachment:
    """Waits for the first step, then hands over to a `Hook`."""

    def __init__(self) -> None:
        self._losses: list[FoundLoss] = []
        optimizer_steps.listen(self)
        backward_losses.listen(self)
        gradient_scaler.listen(self)

    def backward_begins(self) -> None:
        """Nothing yet."""

    def found(self, loss: FoundLoss) -> None:
        """Keep the losses of the step under way."""
        self._losses = [*self._losses[-_MOST_LOSSES + 1 :], loss]

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """The first step: start to record, unless the program does so itself."""
        watch = self._start(optimizer)
        if watch is not None:
            watch.before_step(optimizer, has_closure=has_closure)

    def closure_done(self, optimizer: Optimizer) -> None:
        """Nothing: the hook that the step has begun listens itself."""

    def after_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Nothing: from the first step on the hook listens itself."""

    def scaled(self, optimizer: Optimizer, scale: Tensor) -> None:
        """Nothing yet: the optimizer steps or is skipped."""

    def skipped(self, optimizer: Optimizer, scale: Tensor) -> None:
        """The first step is one that a gradient scaler leaves out: start with that."""
        watch = self._start(optimizer)
        if watch is not None:
            watch.skipped(optimizer, scale)

    def _start(self, optimizer: Optimizer) -> Watch | None:
        self._leave()
        losses, self._losses = self._losses, []
        if live() or get_worker_info() is not None or not _claim():
            return None
        try:
            hook = Hook()
            hook.watch(_model_of(optimizer), optimizer)
            watch = hook._watches[0]  # noqa: SLF001 - the first watch learns what came before it
            watch.adopt_loss(losses)
        except WatchstepError as error:
            _log.error("watchstep: not recording: %s", error)
            return None
        return watch

    def _leave(self) -> None:
        gradient_scaler.forget(self)
        optimizer_steps.forget(self)
        backward_losses.forget(self)
        _waiting.clear()


def wait_for_first_step() -> None:
    """Called once, when the program has imported PyTorch."""
    _waiting.append(Attachment())


def _claim() -> bool:
    """Claim this rank of this attempt on this machine, for as long as the process lives."""
    folder = Path(tempfile.gettempdir()) / f"watchstep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    name = f"{os.environ.get(ATTEMPT, 'none')}-{os.environ.get('RANK', '0')}.claim"
    handle = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return False
    return True


def _model_of(optimizer: Optimizer) -> nn.Module:
    """The outermost module that holds the most of an optimizer's parameters, for the names its author knows.

    Looks at every object once; parameters that no module holds are watched under a module of their own.
    """
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    best, score = _Loose(optimizer), (0, 0)
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), nn.Module) or isinstance(candidate, _Loose):
            continue
        try:
            held = sum(id(p) in wanted for p in candidate.parameters())
            size = sum(1 for _ in candidate.modules())
        except (AttributeError, RuntimeError, ReferenceError):
            continue  # a module that its constructor has not finished, or that is being torn down
        if held and (held, size) > score:
            best, score = candidate, (held, size)
    return best


class _Loose(nn.Module):
    """Parameters that belong to no module, named by their place in the optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if isinstance(parameter, nn.Parameter):
                    self.register_parameter(f"group{number}_{place}", parameter)
