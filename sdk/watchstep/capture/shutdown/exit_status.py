"""What a program exits with, as far as that can be known inside it.

Python tells nobody of a `SystemExit` that ends a program: `sys.excepthook` is not called, and functions of `atexit` are not told the exit
code. Two facts are put together at exit:

- whether an exception has left the program's outermost frame: the last instruction of that frame is then not a return. Where
  `sys.excepthook` was not called, it was a `SystemExit`, wherever it was raised; one that was caught is thereby told from one that was not.
- the status that `sys.exit`, `exit` or `quit` was last called with on the main thread.

A status after which further steps were recorded is forgotten: that exit was caught.

The code of a ``raise SystemExit(code)`` is not known, nor that of an ``exit`` that the program imported from `sys` before it recorded.
"""

from __future__ import annotations

import _sitebuiltins
import dis
import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

_RETURNS = frozenset(dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap)
_UNKNOWN = object()


class ExitStatus:
    """Notes the status that a program asks to exit with. For one process, from its first recording to its last."""

    def __init__(self, progress: Callable[[], object]) -> None:
        """Take notes from now on.

        Args:
            progress: equal at two times if the program has recorded no step in between.
        """
        self._frame = _outermost()
        self._progress = progress
        self._noted_at: object = None
        self._status: Any = _UNKNOWN
        self._exit, self._quit = sys.exit, _sitebuiltins.Quitter.__call__
        self._own_exit, self._own_quit = self._noting_exit(), self._noting_quit()
        sys.exit = self._own_exit
        _sitebuiltins.Quitter.__call__ = self._own_quit  # type: ignore[method-assign]

    def withdraw(self) -> None:
        """Leave everything as it was found, where it is still ours."""
        self._frame = None
        if sys.exit is self._own_exit:
            sys.exit = self._exit
        if _sitebuiltins.Quitter.__call__ is self._own_quit:
            _sitebuiltins.Quitter.__call__ = self._quit  # type: ignore[method-assign]

    def failure(self) -> str:
        """At exit: how the program has failed, as ``SystemExit: 3``; empty where it has not, and where nobody knows."""
        if self._frame is None or not _is_left_by_exception(self._frame):
            return ""
        is_known = self._status is not _UNKNOWN and self._noted_at == self._progress()
        failed = is_known and self._status is not None and self._status != 0
        return f"SystemExit: {self._status}" if failed else ""

    def _note(self, status: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self._status, self._noted_at = status, self._progress()

    def _noting_exit(self) -> Callable[..., NoReturn]:
        before = self._exit

        @functools.wraps(before)
        def exit_program(status: Any = None, /) -> NoReturn:
            self._note(status)
            before(status)

        return exit_program

    def _noting_quit(self) -> Callable[..., NoReturn]:
        before = self._quit

        @functools.wraps(before)
        def quit_program(quitter: Any, code: Any = None) -> NoReturn:
            self._note(code)
            before(quitter, code)

        return quit_program


def _outermost() -> FrameType | None:
    """The frame of the main thread that ends with the program."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - documented, for debuggers
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_left_by_exception(frame: FrameType) -> bool:
    """Whether a frame that has ended was left by an exception, and did not return."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] not in _RETURNS
