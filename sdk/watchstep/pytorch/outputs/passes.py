"""Forward passes: which of them, and which calls of modules, are recorded, and with which calls a pass begins.

In mode train only training passes are recorded: on the training thread, with gradients enabled when the model's
``forward`` began. A pass under ``torch.no_grad`` or ``torch.inference_mode`` and a pass of another thread train nothing and
are not recorded. Other modes are recorded as the program sets them.

Frozen parts that the model's ``forward`` runs without gradients belong to its training pass. So does the first pass of
reentrant activation checkpointing, which disables gradients inside an autograd function; its second pass, inside the
backward pass, is not recorded.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from watchstep.capture.steps.recorder import Recorder
from watchstep.capture.steps.session import Session
from watchstep.format.tensors import Mode
from watchstep.pytorch import internals

graph_task_id = internals.graph_task_id


class ForwardPasses:
    """Decides which forward passes of one model, and calls of its modules, are recorded.

    The training thread is the thread of the last update; before the first update, that of the first training pass. A thread
    that has ended is replaced by the next thread that trains.
    """

    def __init__(self, session: Session, model: nn.Module) -> None:
        self._session = session
        self._model = model
        self._thread: threading.Thread | None = None
        self._ident = -1
        self._maker = threading.get_ident()
        self._inside = False
        self._inside_trains = False
        self._inside_other = False

    @property
    def outside(self) -> bool:
        """Return whether the model's own ``forward`` is not running, i.e. the program has called the current module directly."""
        return not (self._inside or self._inside_other)

    @property
    def mode(self) -> Mode:
        """The mode that the program last set, otherwise that of the model."""
        mode = self._session.mode
        return "eval" if mode == "train" and not self._model.training else mode

    def set_training_thread(self) -> None:
        """Make this thread the training thread, because it updates the model."""
        if self._ident != threading.get_ident():
            self._thread, self._ident = threading.current_thread(), threading.get_ident()

    def on_training_thread(self) -> bool:
        """Return whether this is the training thread. Every thread is one while there is none."""
        return self._ident == threading.get_ident() or self._thread is None or not self._thread.is_alive()

    def owns_backward(self) -> bool:
        """Return whether a backward pass that begins on this thread may be the model's.

        Before the first training pass only the thread that watches the model is trusted: a loss of any other is of a training
        other than this one, because a thread that trains this model has run its ``forward``.
        """
        if self._thread is None:
            return self._maker == threading.get_ident()
        return self.on_training_thread()

    def enter(self) -> Mode | None:
        """Begin the model's ``forward``. Returns the mode in which this pass is recorded, or None if it is not recorded."""
        mode = self._recorded()
        if mode != "train":
            self._inside_other = mode is not None
            return mode
        self._inside, self._inside_trains = True, _gradients_enabled()
        if not self._inside_trains:
            return None
        self.set_training_thread()
        return mode

    def leave(self) -> None:
        """End the model's ``forward``, also after an exception."""
        self._inside_other = False
        if self._inside and self._ident in {-1, threading.get_ident()} and not recomputes():
            self._inside = False

    def mode_of_call(self) -> Mode | None:
        """Return the mode in which a call of a module is recorded, or None if it is not recorded."""
        mode = self._recorded()
        if mode != "train":
            return mode
        trains = self._inside_trains if self._inside else _gradients_enabled()
        return mode if trains else None

    def _recorded(self) -> Mode | None:
        """Return the mode, or None for passes inside a backward pass and, in mode train, those of other threads."""
        mode = None if recomputes() else self.mode
        return None if mode == "train" and not self.on_training_thread() else mode


class PartPasses:
    """Decides which call of a module outside the model's ``forward`` begins a forward pass.

    In mode train the calls between two backward passes or updates are one pass: ``actor(x)``, ``critic(x)`` and their loss. A
    loss that is logged as NaN also ends a pass, because the program may skip its backward pass. In other modes a module that is
    called again begins the next pass.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._begun_at = -1
        self._other: tuple[int, Mode] = (-1, "train")
        self._called: set[str] = set()

    def began(self) -> None:
        """Begin a training pass with the model's ``forward`` or a call of one of its modules."""
        self._begun_at = self._recorder.step

    def ended(self) -> None:
        """End a training pass at the start of its backward pass."""
        self._begun_at = -1

    def begins(self, path: str, mode: Mode, *, counts_steps: bool) -> bool:
        """Return whether a pass begins with this call.

        Args:
            path: Path of the module.
            mode: Mode in which the call is recorded.
            counts_steps: Whether a pass of this model begins the next step after the update.
        """
        recorder = self._recorder
        if mode == "train":
            is_next = (recorder.finished and counts_steps) or self._begun_at != recorder.step
            return is_next or recorder.logged_nan
        place = (recorder.step, mode)
        if place == self._other and path not in self._called:
            self._called.add(path)
            return False
        self._other, self._called = place, {path}
        return True


def recomputes() -> bool:
    """Return whether this forward pass runs inside a backward pass, like the second one of activation checkpointing."""
    return bool(graph_task_id.value() != -1)


def _gradients_enabled() -> bool:
    """Return whether autograd records, or does not record only because it runs inside one of its own functions."""
    return torch.is_grad_enabled() or _inside_autograd_function(sys._getframe(1))  # noqa: SLF001 - the documented way to a frame


def _inside_autograd_function(frame: FrameType | None) -> bool:
    """Return whether a frame runs inside the ``forward`` of an autograd function: its first argument is the context."""
    while frame is not None:
        code = frame.f_code
        # The local variables of other frames are not read, because their frames would keep them in memory.
        first = code.co_varnames[0] if code.co_name == "forward" and code.co_argcount else "self"
        if first != "self" and isinstance(frame.f_locals.get(first), FunctionCtx):
            return True
        frame = frame.f_back
    return False
