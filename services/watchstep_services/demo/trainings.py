"""What the demo knows of its two runs while they go on: figures from the store, states from the API.

The demo from start to end: launch, watch, explain.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from watchstep.errors import NotFoundError, ServiceError
from watchstep.reading.run import Run, open_run
from watchstep_services.serve.embedded import EmbeddedService
from watchstep_services.serve.launching import LaunchedProgram, launch_local

ENDED = ("completed", "failed", "stopped", "lost")


@dataclass
class WatchedRun:
    """One run of the demo.

    Attributes:
        label: healthy or faulty.
        project: its project.
        run_id: its id.
        data: the API's answer for the run.
        alerts: the API's alerts that fired, and that no other one keeps quiet.
        actions: the API's actions.
        run: the run on the store, once it is there.
    """

    label: str
    project: str
    run_id: str
    data: dict[str, Any] = field(default_factory=dict)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    actions: list[dict[str, Any]] = field(default_factory=list)
    run: Run | None = None

    @property
    def state(self) -> str:
        """As the service says."""
        return str(self.data.get("state", "created"))

    @property
    def settled(self) -> bool:
        """Whether the run has ended, and all that it caused has been done."""
        return self.state in ENDED and all(action["state"] != "pending" for action in self.actions)

    @property
    def last_step(self) -> int:
        """The last step on the store; -1 before the first."""
        steps = self.run.steps() if self.run is not None else []
        return steps[-1] if steps else -1

    @property
    def loss(self) -> float | None:
        """The last loss on the store; NaN where it was not finite."""
        if self.run is None:
            return None
        values = self.run.losses()["value"].to_numpy(zero_copy_only=False).astype(np.float64)
        return float(values[-1]) if len(values) else None


class DemoWatcher:
    """Looks at both runs as any user could: the store through the SDK, the rest through the API."""

    def __init__(self, service: EmbeddedService, runs: list[WatchedRun]) -> None:
        self.runs = runs
        self._store = service.service.settings.store
        token = service.operator_token
        self._client = httpx.Client(
            base_url=service.url, headers={"Authorization": f"Bearer {token}"}, timeout=10
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def refresh(self) -> None:
        """Look anew.

        Raises:
            ServiceError: the service does not answer.
        """
        for watched in self.runs:
            place = f"/v1/projects/{watched.project}/runs/{watched.run_id}"
            watched.data = self._get(place)
            alerts = self._get(f"{place}/alerts")["alerts"]
            watched.alerts = [
                alert for alert in alerts if alert["details"] and not alert["details"]["inhibited_by"]
            ]
            watched.actions = self._get(f"{place}/actions")["actions"]
            if watched.run is not None:
                watched.run.refresh()
                continue
            try:
                watched.run = open_run(f"{self._store}/{watched.project}/{watched.run_id}")
            except NotFoundError:
                continue  # it has written nothing yet

    def _get(self, place: str) -> dict[str, Any]:
        try:
            answer = self._client.get(place)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise ServiceError(f"service: {place}: {error}", "start the demo again") from error
        data: dict[str, Any] = answer.json()
        return data


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
