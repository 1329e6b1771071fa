"""One launch of the program with a fault, or without, and what has to hold of it then."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch.backends.ray import ray_cluster
from tests.launch.backends.slurm import slurm_cluster
from tests.services.jobs import eventually
from watchstep_launch import Backend, Estimator, Job, Local, Ray, Slurm
from watchstep_rules import nan_or_inf

PROGRAM = Path(__file__).with_name("train.py")
BACKENDS = ("local", "slurm", "ray")
BAD_STEP = 40
LAST_STEP = 200
SECONDS = 600.0

_NEVER = 1_000_000_000


@dataclass(frozen=True)
class Place:
    """Where programs are launched.

    Attributes:
        backend: what runs them.
        program: the command line that starts the program with its workers there.
        folder: seen by the launcher and its jobs.
    """

    backend: Backend
    program: str
    folder: Path


@dataclass(frozen=True)
class Launched:
    """What became of a launch.

    Attributes:
        amiss: what should have been otherwise; nothing where all was right.
        seconds: from the launch to its run's end.
        job: for those who look closer.
    """

    amiss: tuple[str, ...]
    seconds: float
    job: Job


@contextmanager
def place(kind: str, folder: Path) -> Iterator[Place]:
    """Have a cluster of this kind, and end it and the service beside its jobs afterwards.

    Two workers: on Slurm one on each of two nodes, on Ray and this machine by ``torchrun``.
    """
    torchrun = f"{shlex.quote(str(Path(sys.executable).with_name('torchrun')))} --nproc-per-node=2 {shlex.quote(str(PROGRAM))}"
    try:
        if kind == "slurm":
            with slurm_cluster.running_slurm() as slurms:
                os.environ["SLURM_CONF"] = str(slurms.configuration)
                yield Place(Slurm(partition="all", nodes=2), str(PROGRAM), folder)
        elif kind == "ray":
            with ray_cluster.running_ray() as rays:
                yield Place(Ray(address=rays.address), torchrun, folder)
        else:
            yield Place(Local(), torchrun, folder)
    finally:
        _end_service(folder)


def launch(where: Place, *, faulty: bool, number: int) -> Launched:
    """Launch, follow to the end, and check."""
    checkpoint = where.folder / f"{'faulty' if faulty else 'healthy'}-{number}.pt"
    began = time.monotonic()
    job = Estimator(
        where.program,
        backend=where.backend,
        store=where.folder / "store",
        rules=[nan_or_inf().stop()],
        arguments=(str(BAD_STEP), str(_NEVER), str(checkpoint))
        if faulty
        else ("-1", str(LAST_STEP), str(checkpoint)),
        folder=where.folder,
    ).fit(wait=False)
    events: dict[str, Mapping[str, Any]] = {}
    try:
        for event in job.events():
            events.setdefault(event.type.removeprefix("io.watchstep."), event.data)
        job.wait(SECONDS)
    finally:
        if not job.status().is_over:
            job.backend.kill(job.handle)
    seconds = time.monotonic() - began
    amiss = _faulty_amiss(job, events, checkpoint) if faulty else _healthy_amiss(job, events, checkpoint)
    return Launched(tuple(amiss), seconds, job)


def _faulty_amiss(job: Job, events: Mapping[str, Mapping[str, Any]], checkpoint: Path) -> Iterator[str]:
    alert, done = events.get("alert.firing", {}), events.get("stop.done", {})
    status = job.status()
    if alert.get("step") != BAD_STEP:
        yield f"the alert names step {alert.get('step')}, not {BAD_STEP}"
    if not (alert.get("finding") or {}).get("tensor"):
        yield "the alert names no tensor"
    if done.get("how") != "cooperative":
        yield f"the stop was {done.get('how')}"
    if not _names(done, job):
        yield f"the stop names another job: {done.get('detail')}"
    if len(steps := {end.last_step for end in job.run().ends()}) != 1:
        yield f"its workers stopped at steps {sorted(steps)}"
    if events.get("run.ended", {}).get("state") != "stopped":
        yield f"the run ended as {events.get('run.ended', {}).get('state')}"
    if not status.is_over or status.exit_code == 0:
        yield f"the job is {status}"
    if not checkpoint.exists():
        yield "no checkpoint was saved"


def _healthy_amiss(job: Job, events: Mapping[str, Mapping[str, Any]], checkpoint: Path) -> Iterator[str]:
    status = job.status()
    if stops := [name for name in events if name.startswith(("stop.", "alert."))]:
        yield f"there were {stops}"
    if events.get("run.ended", {}).get("state") != "completed":
        yield f"the run ended as {events.get('run.ended', {}).get('state')}"
    if (status.state, status.exit_code) != ("ended", 0):
        yield f"the job is {status}"
    if not checkpoint.exists():
        yield "no checkpoint was saved"


def _names(done: Mapping[str, Any], job: Job) -> bool:
    return f":{job.handle.id}" in json.dumps(dict(done))


def missing(kind: str) -> str:
    """Why there can be no cluster of this kind here; empty where there can be one."""
    return {"slurm": slurm_cluster.missing, "ray": ray_cluster.missing}.get(kind, str)()


def _end_service(folder: Path) -> None:
    note = folder / "store" / ".watchstep" / "service.json"
    if note.exists():
        os.kill(json.loads(note.read_text(encoding="utf-8"))["process"]["pid"], signal.SIGTERM)
        eventually(lambda: not note.exists(), SECONDS)
