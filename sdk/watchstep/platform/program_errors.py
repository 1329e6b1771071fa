"""Errors that are the program's although they arise within the recorder's code, and must not be contained as the recorder's faults.

- Python calls the program's handler of a signal between any two operations of the main thread, so also in the middle of the recorder's work. What the
  handler raises, such as a time limit or a preemption, would be lost there.
- The recorder calls functions by which the program ends its training, such as that of a stop, and what they raise is how they do it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def call_program(function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Call a function of the program. What it raises is of the program."""
    return function(*args, **kwargs)


def is_of_program(error: BaseException) -> bool:
    """Return whether a handler of a signal, or a function that `call_program` called, raised an error within the block that caught it."""
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code is call_program.__code__ or _is_handler(frame):
            return True
        traceback = traceback.tb_next
    return False


def _is_handler(frame: FrameType) -> bool:
    """Return whether the arguments of a call are those of a handler: a number and the interrupted frame.

    Which handlers are installed does not matter: one may have replaced itself before it raised.
    """
    code, values = frame.f_code, frame.f_locals
    arguments = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & inspect.CO_VARARGS:
        arguments += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    return any(
        isinstance(number, int) and isinstance(interrupted, FrameType)
        for number, interrupted in itertools.pairwise(arguments)
    )
