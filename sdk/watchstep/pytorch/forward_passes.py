"""Which forward passes of one model are recorded, and in which mode.

In mode train only training passes are: on the training thread, with gradients enabled when the model's ``forward`` began. A
pass under ``torch.no_grad`` or ``torch.inference_mode`` (for metrics, or with the weights of an average) and a pass of another
thread (which serves the model) train nothing and are not recorded. Other modes are recorded as the program says.

Frozen parts that the model's ``forward`` runs without gradients belong to its training pass. So does the first pass of
reentrant activation checkpointing, which disables gradients inside of an autograd function; its second pass, inside the
backward pass, is not recorded.

A program may call modules of the model, ``model.actor(x)``, and never the model itself. Each such call is judged by itself, and
`PartPasses` decides with which of them a forward pass begins.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch
from torch import nn

from watchstep.capture.recorder import Recorder
from watchstep.capture.session import Session
from watchstep.tensors import Mode

_FUNCTION_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


class ForwardPasses:
    """Decides for one model, when its forward begins and when one of its modules is called.

    The training thread is the one that made the last update; before the first, the one of the first training pass. A thread
    that has ended is succeeded by the next that trains.
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
        """Whether the model's own ``forward`` is not running: the program has called the module under way by itself."""
        return not (self._inside or self._inside_other)

    @property
    def mode(self) -> Mode:
        """As the program last said, else as the model is."""
        said = self._session.mode
        return "eval" if said == "train" and not self._model.training else said

    def set_training_thread(self) -> None:
        """This thread updates the model."""
        if self._ident != threading.get_ident():
            self._thread, self._ident = threading.current_thread(), threading.get_ident()

    def on_training_thread(self) -> bool:
        """Whether this is the training thread; any is while there is none."""
        return self._ident == threading.get_ident() or self._thread is None or not self._thread.is_alive()

    def owns_backward(self) -> bool:
        """Whether a backward pass that begins on this thread may be the model's.

        Before the first training pass only the thread that watches the model is trusted: a loss of any other is of a training
        beside this one, since a thread that trains this model has run its ``forward``.
        """
        if self._thread is None:
            return self._maker == threading.get_ident()
        return self.on_training_thread()

    def enter(self) -> Mode | None:
        """The model's ``forward`` begins: the mode in which this pass is recorded, None where it is not."""
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
        """The model's ``forward`` is over, also by an exception."""
        self._inside_other = False
        if self._inside and self._ident in {-1, threading.get_ident()} and not _recomputes():
            self._inside = False

    def mode_of_call(self) -> Mode | None:
        """A module was called: the mode in which it is recorded, None where it is not."""
        mode = self._recorded()
        if mode != "train":
            return mode
        trains = self._inside_trains if self._inside else _gradients_enabled()
        return mode if trains else None

    def _recorded(self) -> Mode | None:
        """The mode, but for passes inside a backward pass and, in mode train, those of other threads."""
        mode = None if _recomputes() else self.mode
        return None if mode == "train" and not self.on_training_thread() else mode


class PartPasses:
    """Decides with which call of a module outside of the model's ``forward`` a forward pass begins.

    In mode train the calls between two backward passes or updates are one pass: ``actor(x)``, ``critic(x)`` and their loss. A
    loss that is logged as NaN ends a pass, too, for the program may skip its backward pass. In other modes a module that is
    called again begins the next pass.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._begun_at = -1
        self._other: tuple[int, Mode] = (-1, "train")
        self._called: set[str] = set()

    def began(self) -> None:
        """A training pass has begun, with the model's ``forward`` or a call of one of its modules."""
        self._begun_at = self._recorder.step

    def ended(self) -> None:
        """The backward pass of a training pass begins."""
        self._begun_at = -1

    def begins(self, path: str, mode: Mode, *, counts_steps: bool) -> bool:
        """Whether a pass begins with this call.

        Args:
            path: of the module.
            mode: in which the call is recorded.
            counts_steps: whether a pass of this model begins the next step once the update is done.
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


def _recomputes() -> bool:
    """Whether this forward pass runs inside a backward pass, as activation checkpointing's second one does."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - PyTorch's own test for it


def _gradients_enabled() -> bool:
    """Whether autograd records, or does not only because it runs inside a function of its own."""
    return torch.is_grad_enabled() or _inside_autograd_function(sys._getframe(1))  # noqa: SLF001 - the documented way to a frame


def _inside_autograd_function(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _FUNCTION_APPLY:
        frame = frame.f_back
    return frame is not None
