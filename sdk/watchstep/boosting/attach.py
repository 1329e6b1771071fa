"""Recording of an unmodified program: its library's ``train`` is replaced by a function that adds a callback.

Each training is a run: the first one has the name that the launcher chose, the next ones ``NAME-2`` and so on. A training is not recorded if
the program records itself, if another one is being recorded, or if another process records this rank.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from watchstep.capture.shutdown.ending import live
from watchstep.hook import Hook
from watchstep.unattended import note_unobserved, start_hook

MAX_TRAININGS = 20
"""Trainings of a process that are recorded: a search of hyperparameters may have any number."""

_LIBRARIES = {"xgboost": "XGBoost", "lightgbm": "LightGBM"}
_MARK = "__watchstep_attached__"
_log = logging.getLogger("watchstep")


class MakeRecording(Protocol):
    """Makes the callback of a library."""

    def __call__(self, hook: Hook, arguments: dict[str, Any]) -> Any:
        """Return the callback.

        Args:
            hook: the hook.
            arguments: arguments of the training by name.
        """
        ...


@dataclass
class _Trainings:
    """The trainings of this process, of all libraries.

    Attributes:
        lock: held while a training begins.
        number: how many have been recorded.
        first_run: id of the first one's run.
        is_refused: whether another process records this rank, or the recorder could not start.
    """

    lock: threading.Lock
    number: int = 0
    first_run: str = ""
    is_refused: bool = False

    def begin(self, library: str) -> Hook | None:
        """Return a hook for a training by a library; None if it is not recorded."""
        with self.lock:
            if live():
                note_unobserved(library)
                return None
            if self.is_refused:
                return None
            if not self.first_run:
                hook = start_hook(library)
                self.is_refused = hook is None
                self.first_run = hook.run if hook is not None else ""
            elif self.number < MAX_TRAININGS:
                hook = start_hook(library, run=f"{self.first_run}-{self.number + 1}")
            else:
                self.is_refused = True
                _log.warning("watchstep: not recording: %d trainings are recorded already", MAX_TRAININGS)
                return None
            self.number += hook is not None
            return hook


_trainings = _Trainings(threading.Lock())


def patch_train(
    modules: Sequence[ModuleType], recording: tuple[type[Any], ...], make_recording: MakeRecording
) -> None:
    """Replace ``train`` in the modules of a library. Does nothing if it was replaced before.

    Args:
        modules: modules with the library's function ``train``, the defining one first.
        recording: classes of callbacks with which the program records itself.
        make_recording: makes the callback.
    """
    original: Callable[..., Any] = modules[0].train
    if hasattr(original, _MARK):
        return
    wrapped = _recorded(original, recording, make_recording)
    for module in modules:
        if getattr(module, "train", None) is original:
            module.train = wrapped  # type: ignore[attr-defined]


def _recorded(
    train: Callable[..., Any], recording: tuple[type[Any], ...], make_recording: MakeRecording
) -> Callable[..., Any]:
    signature = inspect.signature(train)

    @functools.wraps(train)
    def call(*args: Any, **kwargs: Any) -> Any:
        hook, arguments = None, (args, kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
            callbacks = bound.arguments.get("callbacks") or ()
            is_sequence = isinstance(callbacks, list | tuple)  # anything else may be read only once
            if is_sequence and not any(isinstance(callback, recording) for callback in callbacks):
                library = train.__module__.partition(".")[0]
                hook = _trainings.begin(_LIBRARIES.get(library, library))
            if hook is not None:
                added = make_recording(hook, dict(bound.arguments))
                # First: a callback that ends the training keeps XGBoost from calling those behind it.
                bound.arguments["callbacks"] = [added, *callbacks]
                arguments = (bound.args, bound.kwargs)
        except Exception as error:  # noqa: BLE001 - no fault may end the program
            _log.error("watchstep: not recording: %s", error)
        if hook is None:
            return train(*args, **kwargs)
        try:
            result = train(*arguments[0], **arguments[1])
        except BaseException as error:
            hook.__exit__(type(error), error, error.__traceback__)
            raise
        hook.close()
        return result

    setattr(call, _MARK, True)
    return call
