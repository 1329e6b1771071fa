"""Reads dumps of TensorFlow's Debugger V2 as traces, without TensorFlow."""

from __future__ import annotations

import os

from watchstep.trace.debugger_v2.conversion import convert
from watchstep.trace.debugger_v2.dump import is_dump, read_dump
from watchstep.trace.operations import Trace

__all__ = ["is_debugger_v2", "read_debugger_v2"]


def is_debugger_v2(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder with a dump of Debugger V2."""
    return is_dump(path)


def read_debugger_v2(path: str | os.PathLike[str]) -> Trace:
    """Read a dump of Debugger V2 as a trace.

    Args:
        path: The folder that was passed to ``tf.debugging.experimental.enable_dump_debug_info``.

    Raises:
        NotFoundError: the folder does not exist.
        FormatError: it contains no dump, or one that is damaged or too large.
    """
    return convert(read_dump(path))
