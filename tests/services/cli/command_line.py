"""Runs commands in this process, because a separate process would repeat all imports."""

from __future__ import annotations

import io
import logging
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from watchstep import command


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``watchstep …`` in this process. Returns its output and exit code, and restores what it changed in the process."""
    words = [str(argument) for argument in arguments]
    root, server = logging.getLogger(), logging.getLogger("uvicorn.error")
    log = list(root.handlers), root.level, server.level
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root.handlers[:] = []  # as in a new process, unconfigured warnings go to standard error
    root.setLevel(logging.WARNING)
    before, hook, sys.argv = sys.argv, sys.excepthook, ["watchstep", *words]
    code = 0
    try:
        with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
            try:
                command.main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv, sys.excepthook = before, hook
        root.handlers[:] = log[0]
        root.setLevel(log[1])
        server.setLevel(log[2])
        for number, handler in signals.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(words, code, output.getvalue(), errors.getvalue())
