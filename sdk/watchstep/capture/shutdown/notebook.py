"""Recordings that cells of a notebook leave open.

A cell that makes a hook is run again and again, and nobody closes the hook of the last time. Without an end it would go on: its run would
take the losses of the next training for its own, and hold its model, with a GPU's memory, for as long as the kernel lives.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from typing import Any

from watchstep.capture.shutdown.ending import Ending

_REASON = "another cell began to record"

_made: weakref.WeakKeyDictionary[Ending, tuple[int, int]] = weakref.WeakKeyDictionary()
_log = logging.getLogger("watchstep")


def remember(ending: Ending) -> None:
    """Keep of which cell a recording is, if it is of one."""
    cell = _cell()
    if cell is not None:
        _made[ending] = (cell, threading.get_ident())


def end_left() -> None:
    """End what earlier cells began to record in this thread and left open, if this is a cell."""
    cell, thread = _cell(), threading.get_ident()
    if cell is None:
        return
    for ending, (earlier, of) in list(_made.items()):
        if not ending.ended and earlier != cell and of == thread:
            _log.info("watchstep: %s ends here: %s", ending.run_url, _REASON)
            ending.end(reason=_REASON)


def _cell() -> int | None:
    """The number of the cell, or of the line of IPython's, that runs now; None elsewhere."""
    ipython: Any = sys.modules.get("IPython")  # which is not imported for this
    asked = getattr(ipython, "get_ipython", None)
    shell = None if asked is None else asked()
    number = getattr(shell, "execution_count", None)
    return number if isinstance(number, int) else None
