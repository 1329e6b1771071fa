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
import re
from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import get_worker_info

from watchstep.capture.identity import ATTEMPT
from watchstep.capture.shutdown.ending import live
from watchstep.hook import Hook
from watchstep.platform.folders import PrivateFolder
from watchstep.pytorch import losses
from watchstep.pytorch.losses import FoundLoss
from watchstep.pytorch.parameters import amp, optimizer_steps
from watchstep.pytorch.watch import Watch

_log = logging.getLogger("watchstep")
_MOST_LOSSES = 8
_waiting: list[Attachment] = []


class Attachment:
    """Waits for the first step, then hands over to a `Hook`."""

    def __init__(self) -> None:
        self._losses: list[FoundLoss] = []
        optimizer_steps.listen(self)
        losses.listen(self)
        amp.listen(self)

    def backward_begins(self) -> None:
        """Nothing yet."""

    def found(self, loss: FoundLoss) -> None:
        """Keep the losses of the step under way."""
        self._losses = [*self._losses[-_MOST_LOSSES + 1 :], loss]

    def before_step(self, optimizer: Optimizer, *, has_closure: bool, is_retry: bool) -> None:
        """The first step: start to record, unless the program does so itself."""
        watch = self._start(optimizer)
        if watch is not None:
            watch.before_step(optimizer, has_closure=has_closure, is_retry=is_retry)

    def closure_done(self, optimizer: Optimizer) -> None:
        """Nothing: the hook that the step has begun listens itself."""

    def failed(self, error: Exception) -> None:
        """Nothing: the hook that listens from the first step on counts it."""

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
        """Start to record. Raises nothing: the program did not ask for a recorder, and goes on without one."""
        hook: Hook | None = None
        try:
            self._detach()
            losses, self._losses = self._losses, []
            if live() or get_worker_info() is not None:
                return None
            faults: list[OSError] = []
            if not _claim(faults.append):
                return None
            hook = Hook()
            for fault in faults:
                hook._health.fault("claim", fault)  # noqa: SLF001 - as below
            hook.watch(_model_of(optimizer), optimizer)
            watch = hook._watches[0]  # noqa: SLF001 - the first watch learns what came before it
            watch.adopt_loss(losses)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the program
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


def wait_for_first_step() -> None:
    """Called once, when the program has imported PyTorch."""
    _waiting.append(Attachment())


def _claim(report: Callable[[OSError], None]) -> bool:
    """Claim this rank of this attempt on this machine, for as long as the process lives.

    Args:
        report: called with what kept the claim from being made where it belongs. Without a claim, the rank records all the
            same: a second process of the rank would be recorded as well, which is less of a loss than no recording.

    Returns:
        Whether this process records; False where another process of the rank does.
    """
    attempt, rank = os.environ.get(ATTEMPT) or "none", os.environ.get("RANK") or "0"
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{attempt}-{rank}")[:200] + ".claim"
    try:
        folder = PrivateFolder.open()
        if folder.refused:
            report(PermissionError(f"{folder.refused}; using {folder.path}"))
        try:
            handle = folder.open_file(name)
        finally:
            folder.close()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            _log.warning("watchstep: not recording: another process records rank %s of this attempt", rank)
            return False
    except OSError as error:
        report(error)
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
            watched = sum(id(p) in wanted for p in candidate.parameters())
            size = sum(1 for _ in candidate.modules())
        except Exception:  # noqa: BLE001, S112 - not finished, being torn down, or abstract: it is not the one that is trained
            continue
        if watched and (watched, size) > score:
            best, score = candidate, (watched, size)
    return best


class _Loose(nn.Module):
    """Parameters that belong to no module, named by their place in the optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if isinstance(parameter, nn.Parameter):
                    self.register_parameter(f"group{number}_{place}", parameter)
