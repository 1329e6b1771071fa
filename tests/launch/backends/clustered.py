"""A program that goes on, launched on real clusters through the API of a service."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.launch.backends import enduring
from tests.services.jobs import eventually
from watchstep_launch import Backend, Estimator, Job, Ray
from watchstep_rules import non_finite_values

SECONDS = 120.0
PROJECT = "vision"


@dataclass(frozen=True)
class Clustered:
    """A launched program.

    Attributes:
        job: as its launcher holds it.
        folder: where it tells how it goes on.
    """

    job: Job
    folder: Path

    @property
    def told(self) -> dict[str, Any]:
        """What the program said last; nothing before it has begun."""
        place = self.folder / "told.json"
        return dict(json.loads(place.read_text())) if place.exists() else {}

    @property
    def steps(self) -> int:
        """How far the program has come."""
        return int(self.told.get("steps", -1))

    @property
    def lives(self) -> bool:
        """Whether its process is there."""
        return Path(f"/proc/{self.told['pid']}").exists()

    def has_begun(self) -> bool:
        """Whether the program has come some steps far."""
        return self.steps > 0

    def is_refused_by(self, *whom: str) -> bool:
        """Whether its recorder says that these, of "service" and "store", take nothing more."""
        return set(whom) <= set(self.told["faults"])

    def stop_done(self) -> dict[str, Any] | None:
        """What the service says of a stop that is over."""
        done = list(self.job.client().events(self.job.id, types=("io.watchstep.stop.done",)))
        return dict(done[0].data) if done else None


@contextmanager
def launched(
    backend: Backend, folder: Path, service: str, store: str, environment: Mapping[str, str]
) -> Iterator[Clustered]:
    """Launch the program with a rule that stops it by its backend alone; nothing of it is left afterwards."""
    folder.mkdir()
    job = Estimator(
        [sys.executable, enduring.__file__, str(folder)],
        backend=backend,
        store=store,
        rules=[non_finite_values().stop()],
        environment={**aws_environment(), **environment},
        folder=folder,
        project=PROJECT,
        service=service,
        on_stop="ignore",
    ).fit(wait=False)
    try:
        yield Clustered(job, folder)
    finally:
        job.backend.kill(job.handle)
        eventually(lambda: job.status().is_over, SECONDS)


def aws_environment() -> dict[str, str]:
    """How this process reaches its buckets."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def admit(url: str, token: str, store: Mapping[str, str], backends: Mapping[str, Backend]) -> None:
    """Register a store and backends, and make the project that uses them, as an admin does."""
    headers = {"authorization": f"Bearer {token}"}
    bodies: list[tuple[str, dict[str, Any]]] = [("stores", {"name": "runs", **store})]
    for name, backend in backends.items():
        settings = {"address": backend.address, "stop_seconds": 5} if isinstance(backend, Ray) else {}
        bodies.append(("backends", {"name": name, "kind": name, "settings": settings}))
    bodies.append(("projects", {"name": PROJECT, "store": "runs", "backends": list(backends)}))
    for path, body in bodies:
        answer = httpx.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=60)
        assert answer.status_code == 201, answer.text


def revoke_tokens_of_jobs(url: str, token: str) -> int:
    """Revoke those by which the project's jobs record; how many there were."""
    place, headers = f"{url}/v1/projects/{PROJECT}/tokens", {"authorization": f"Bearer {token}"}
    held = httpx.get(place, headers=headers, timeout=60).json()["tokens"]
    of_jobs = [one["id"] for one in held if one["name"].startswith("job of run")]
    for number in of_jobs:
        assert httpx.delete(f"{place}/{number}", headers=headers, timeout=60).is_success
    return len(of_jobs)
