"""Real processes to stop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from watchstep.platform.process import record_process
from watchstep_launch.backend import JobHandle, Launch
from watchstep_launch.backends.local.backend import Local, job_of

_WAITS = (
    "import pathlib, signal, sys\n{before}\npathlib.Path(sys.argv[1]).touch()\nwhile True: signal.pause()"
)
STUBBORN = _WAITS.format(before="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
"""Ignores SIGTERM."""

WILLING = _WAITS.format(before="")
"""Ends by SIGTERM, as programs do."""


def launch(backend: Local, folder: Path, program: str, name: str = "job") -> JobHandle:
    """Start a Python program and wait until it has set up its signals."""
    ready = folder / f"{name}.ready"
    environment: Mapping[str, str] = os.environ
    job = backend.submit(
        Launch((sys.executable, "-c", program, str(ready)), environment, folder, folder / f"{name}.log")
    )
    eventually(ready.exists)
    return job


@contextmanager
def recorded_process(folder: Path | None = None) -> Iterator[JobHandle]:
    """A process that a launcher recorded as a job, in a session of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True
    ) as process:
        try:
            yield job_of(record_process(process.pid, folder).identity)
        finally:
            process.kill()


def eventually(
    done: Callable[[], object], seconds: float = 30.0, state: Callable[[], object] = lambda: ""
) -> None:
    """Look again and again until something holds.

    Raises:
        TimeoutError: it never did; the message has the ``state`` by then.
    """
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(state())
        time.sleep(0.01)
