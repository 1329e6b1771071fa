"""The two trainings of the demo: launches them, and watches figures on the store and states of the API until they end."""

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
        project: project of the run.
        run_id: id of the run.
        data: the run in the API.
        alerts: alerts in the API that fired and are not inhibited.
        actions: actions in the API.
        run: the run on the store; None before its first write.
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
        """State of the run in the API."""
        return str(self.data.get("state", "created"))

    @property
    def settled(self) -> bool:
        """Whether the run has ended and all its actions are done."""
        return self.state in ENDED and all(action["state"] != "pending" for action in self.actions)

    @property
    def last_step(self) -> int:
        """The last step on the store; -1: none."""
        steps = self.run.steps() if self.run is not None else []
        return steps[-1] if steps else -1

    @property
    def loss(self) -> float | None:
        """The last loss on the store; NaN if it is not finite."""
        if self.run is None:
            return None
        values = self.run.losses()["value"].to_numpy(zero_copy_only=False).astype(np.float64)
        return float(values[-1]) if len(values) else None


class DemoWatcher:
    """Reads both runs through the public interfaces: the store through the SDK, the rest through the API."""

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
        """Read the current state.

        Raises:
            ServiceError: the service does not respond.
        """
        for watched in self.runs:
            path = f"/v1/projects/{watched.project}/runs/{watched.run_id}"
            watched.data = self._get(path)
            alerts = self._get(f"{path}/alerts")["alerts"]
            watched.alerts = [
                alert for alert in alerts if alert["details"] and not alert["details"]["inhibited_by"]
            ]
            watched.actions = self._get(f"{path}/actions")["actions"]
            if watched.run is not None:
                watched.run.refresh()
                continue
            try:
                watched.run = open_run(f"{self._store}/{watched.project}/{watched.run_id}")
            except NotFoundError:
                continue  # nothing is written yet

    def _get(self, path: str) -> dict[str, Any]:
        try:
            response = self._client.get(path)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise ServiceError(f"service: {path}: {error}", "start the demo again") from error
        data: dict[str, Any] = response.json()
        return data


PROJECT = "demo"
_TIMEOUT_SECONDS = 240.0
_POLL_SECONDS = 0.3


@dataclass(frozen=True)
class Demo:
    """Parameters of the demo.

    Attributes:
        folder: folder of all output files.
        seed: seed of both trainings.
        explains: whether the faulty training computes its failing step again to name the source line, and ends by itself; otherwise a rule stops it.
    """

    folder: Path
    seed: int
    explains: bool = True

    @property
    def store(self) -> Path:
        """The store of both runs."""
        return self.folder / "runs"


def launch_both(demo: Demo, service: EmbeddedService) -> list[WatchedRun]:
    """Start the two trainings as separate processes. They differ in one pixel of the data."""
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
            explain=demo.explains,
        )
        launch_local(service.service, program, service.recorder_token)
        runs.append(watched)
    return runs


def watch_until_settled(service: EmbeddedService, watcher: DemoWatcher, show: Callable[[], None]) -> None:
    """Refresh and show both runs until they are settled.

    Raises:
        ServiceError: they are not settled after four minutes. Their processes continue.
    """
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        watcher.refresh()
        show()
        if all(watched.settled for watched in watcher.runs):
            return
        service.wait_until(lambda: False, _POLL_SECONDS)
    states = ", ".join(f"{watched.run_id} {watched.state}" for watched in watcher.runs)
    raise ServiceError(
        f"demo: not finished after {_TIMEOUT_SECONDS:.0f} s ({states})",
        "see the logs in the folder of the demo",
    )
