"""Where a job's progress is shown: a picture in a terminal or a notebook, or a line for each event."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from watchstep_launch.view.run_status import RunWatcher, line_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live
    from typing_extensions import Self

Kind = Literal["lines", "terminal", "notebook"]

QUIET = "WATCHSTEP_QUIET"
"""Environment variable that selects a line for each event, also in a terminal."""

_INTERVALS = {"lines": 2.0, "terminal": 1.0, "notebook": 2.0}
_DUMB = frozenset(("dumb", "unknown"))


def kind_of(show: bool | None) -> Kind:
    """Return how to show progress here.

    Args:
        show: True for a picture, False for lines; None for a picture if the output is interactive: standard error is a terminal
            that supports it or this is a notebook, and neither CI nor WATCHSTEP_QUIET is set.
    """
    quiet = any(os.environ.get(name, "").lower() not in ("", "0", "false", "no") for name in ("CI", QUIET))
    if show is False or (show is None and quiet) or importlib.util.find_spec("rich") is None:
        return "lines"
    if _notebook() is not None:
        return "notebook"
    return "terminal" if show or _supports_drawing() else "lines"


def _supports_drawing() -> bool:
    """Whether standard error is a terminal that can move the cursor and show bars."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "").lower() in _DUMB:
        return False
    return (sys.stderr.encoding or "").lower().startswith("utf")


class Showing:
    """Shows a run's progress whenever `turn` is called, at a limited rate. Used as a context manager.

    Output goes to standard error, or into the notebook's cell. Only errors of writing are raised.

    Args:
        watcher: watches the run; None if no service evaluates it, in which case nothing is shown.
        kind: see `kind_of`.
        clock: time in seconds.
    """

    def __init__(
        self, watcher: RunWatcher | None, kind: Kind, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._watcher = watcher
        self._kind: Kind = kind
        self._clock = clock
        self._next = clock()
        self._live: Live | None = None
        self._cell: str = ""

    def turn(self, job: str = "", *, last: bool = False) -> None:
        """Poll the run and show its status, if the interval has passed.

        Args:
            job: text for the job's status.
            last: poll regardless of the interval.
        """
        if self._watcher is None or (self._clock() < self._next and not last):
            return
        fresh = self._watcher.poll()
        self._next = self._clock() + _INTERVALS[self._kind]
        if self._kind == "lines":
            for event in fresh:
                sys.stderr.write(line_of(event) + "\n")
            sys.stderr.flush()
            return
        from watchstep_launch.view.picture import picture

        drawn = picture(self._watcher.status, job)
        if self._kind == "terminal":
            self._in_terminal(drawn)
        else:
            self._in_notebook(drawn)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _in_terminal(self, drawn: RenderableType) -> None:
        if self._live is None:
            from rich.live import Live

            from watchstep.platform.terminal_console import TerminalConsole

            self._live = Live(console=TerminalConsole(stderr=True), auto_refresh=False)
            self._live.start()
        self._live.update(drawn, refresh=True)

    def _in_notebook(self, drawn: RenderableType) -> None:
        from watchstep_launch.view.console import notebook_data

        display: Any = importlib.import_module("IPython.display")
        data = notebook_data(drawn)
        if self._cell:
            display.update_display(data, raw=True, display_id=self._cell)
        else:
            self._cell = uuid.uuid4().hex
            display.display(data, raw=True, display_id=self._cell)


def _notebook() -> Any:
    """Return the notebook's kernel; None outside a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None)
