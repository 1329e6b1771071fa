"""The demo from start to end: launch, watch, explain."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from watchstep.errors import ServiceError
from watchstep_services.demo.watching import DemoWatcher, WatchedRun
from watchstep_services.serve.embedded import EmbeddedService
from watchstep_services.serve.launching import LaunchedProgram, launch_local

PROJECT = "demo"
_LONGEST_SECONDS = 240.0
_LOOK_SECONDS = 0.3


@dataclass(frozen=True)
class Demo:
    """How the demo runs.

    Attributes:
        folder: everything that it leaves behind.
        seed: of both trainings.
    """

    folder: Path
    seed: int

    @property
    def store(self) -> Path:
        """The store of both runs."""
        return self.folder / "runs"


def launch_both(demo: Demo, service: EmbeddedService) -> list[WatchedRun]:
    """Start the two trainings as processes of their own, which differ in one pixel of the data."""
    tag = f"{demo.seed}-{secrets.token_hex(2)}"
    runs = []
    for label in ("healthy", "faulty"):
        watched = WatchedRun(label, PROJECT, f"{label}-{tag}")
        command = (sys.executable, "-m", "watchstep_services.demo.digits", "--seed", str(demo.seed))
        program = LaunchedProgram(
            project=PROJECT,
            run=watched.run_id,
            command=(*command, "--fault") if label == "faulty" else command,
            folder=demo.folder,
            log=demo.folder / f"{watched.run_id}.log",
        )
        launch_local(service.service, program, service.recorder_token)
        runs.append(watched)
    return runs


def watch_to_the_end(service: EmbeddedService, watcher: DemoWatcher, show: Callable[[], None]) -> None:
    """Look at both runs until they have ended and everything is done, and show each look.

    Raises:
        ServiceError: they have not ended after four minutes; their processes are left to the caller.
    """
    deadline = time.monotonic() + _LONGEST_SECONDS
    while time.monotonic() < deadline:
        watcher.refresh()
        show()
        if all(watched.settled for watched in watcher.runs):
            return
        service.wait_until(lambda: False, _LOOK_SECONDS)
    states = ", ".join(f"{watched.run_id} {watched.state}" for watched in watcher.runs)
    raise ServiceError(
        f"demo: not over after {_LONGEST_SECONDS:.0f} s ({states})", "see the logs in its folder"
    )
