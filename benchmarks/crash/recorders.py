"""Recorders: they write segments, announce some of them, obey control documents, and end as their jobs end."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.crash.counting import NAME as COUNTING
from benchmarks.crash.ground import CountedJob, Ground
from benchmarks.crash.trainings import STEPS, Kind, encoded
from tests.services.recording import PROJECT, Recording
from watchstep.capture.service.client import ServiceClient
from watchstep.errors import NotFoundError, ServiceError
from watchstep.format.control import ControlDocument
from watchstep.platform.process import ProcessIdentity, record_process
from watchstep.platform.transport import ServiceAddress
from watchstep.store.store import Store
from watchstep_launch.backends.local.backend import job_of
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import BackendRow, ProjectBackend

_PATIENCE = 120.0


@dataclass(frozen=True)
class Service:
    """Where recorders find it, and what they and a launcher show it."""

    url: str
    recorder: str
    operator: str

    def client(self, token: str) -> ServiceClient:
        """A client with one of its tokens."""
        return ServiceClient(ServiceAddress.checked(self.url, token), PROJECT)


@dataclass
class Training:
    """One attempt of a run, as its recorders and its job know it.

    Attributes:
        run: its name.
        kind: what it writes.
        attempt: which attempt.
        first_try: an attempt that fails without a bad step.
        recording: where it is written.
        job: what the harness counts, or a process; None where nothing is bound.
        written: segments of each worker so far.
        bad_ns: when the segment with the first bad step was written, by this machine's clock.
        over: its recorders have ended.
    """

    run: str
    kind: Kind
    attempt: str
    first_try: bool
    recording: Recording
    job: CountedJob | subprocess.Popen[bytes] | None
    written: list[int]
    bad_ns: int = 0
    over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def bad(self) -> bool:
        """Whether it must be stopped."""
        return self.kind.bad and not self.first_try

    @property
    def job_is_gone(self) -> bool:
        """Whether its job has ended, of itself or not; True without one."""
        if isinstance(self.job, CountedJob):
            return self.job.gone
        return self.job is None or self.job.poll() is not None


class Recorders:
    """Those of some trainings, on one store."""

    def __init__(
        self, store: Store, ground: Ground, service: Service, chance: random.Random, jobs: Path
    ) -> None:
        self._store, self._ground, self._service, self._chance = store, ground, service, chance
        self._jobs = jobs
        self.trainings: list[Training] = []
        self.announced = 0
        self.unheard = 0

    def make_project(self, database: Database) -> None:
        """Have the first run make the project, as soon as the API answers; jobs may be those that the harness counts."""
        self._register_until_heard({"run": "first"})
        with database.write() as session:
            now = read_clock(session)
            row = BackendRow(
                name=COUNTING, kind=COUNTING, settings={}, version=1, created_ns=now, updated_ns=now
            )
            session.add(row)
            session.flush()
            session.add(ProjectBackend(project=PROJECT, backend_id=row.id))

    def begin(self, run: str, kind: Kind, *, attempt: str = "a1", first_try: bool = False) -> Training:
        """Begin an attempt: its documents, its job, and its registration as a launcher does it."""
        recording = Recording(self._store, run, attempt)
        recording.begin(world_size=kind.workers, on_stop=kind.on_stop, started_ns=time.time_ns())
        job = self._job(run, kind, attempt)
        training = Training(run, kind, attempt, first_try, recording, job, [0] * kind.workers)
        self.trainings.append(training)  # before it can fail, so that its process is ended in any case
        if job is not None:
            self._register(training)
        return training

    def _job(self, run: str, kind: Kind, attempt: str) -> CountedJob | subprocess.Popen[bytes] | None:
        if kind.job == "process":
            process = subprocess.Popen(
                ["sleep", "3600"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            record_process(process.pid, self._jobs)
            return process
        if kind.job == "none":
            return None
        job = self._ground.jobs[f"{run}/{attempt}"] = CountedJob(kind.stubborn)
        return job

    def _register(self, training: Training) -> None:
        body: dict[str, Any] = {"run": training.run, "attempt": training.attempt}
        if isinstance(training.job, subprocess.Popen):
            job = job_of(ProcessIdentity.of(training.job.pid))
            body["job"] = {"backend": job.backend, "id": job.id, "identity": dict(job.identity)}
        else:
            name = f"{training.run}/{training.attempt}"
            body["job"] = {"backend": COUNTING, "id": name, "identity": {"name": name}}
        self._register_until_heard(body)

    def _register_until_heard(self, body: dict[str, Any]) -> None:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                self._service.client(self._service.operator).register(body)
            except ServiceError as error:
                if time.monotonic() > deadline or "refused (4" in error.what:
                    raise
                time.sleep(0.05)
            else:
                return

    def advance(self, training: Training) -> None:
        """Write the next segments of an attempt, or end it."""
        if training.over:
            return
        with _alive(training) as alive:
            if not alive:
                training.over = True
                return
            if self._obeys(training):
                return
            seq = training.written[0]
            if seq == training.kind.segments:
                self._end(training)
                return
            keys = []
            for worker in range(training.kind.workers):
                key = training.recording.key(seq, seq * STEPS, (seq + 1) * STEPS - 1, worker)
                data = encoded(training.kind, seq, worker, first_try=training.first_try)
                training.recording.store.put(key.path, data)
                training.recording.written.setdefault(key.writer.writer, []).append(key)
                training.written[worker] += 1
                keys.append(key)
            if training.bad and not training.bad_ns and (seq + 1) * STEPS > training.kind.bad_step:
                training.bad_ns = time.time_ns()
        for key in keys:
            if training.kind.told == "announced" or (
                training.kind.told == "some" and self._chance.random() < 0.6
            ):
                self._announce(training, key)

    def _announce(self, training: Training, key: Any) -> None:
        client = self._service.client(self._service.recorder)
        try:
            client.announce(training.run, [key], {})
            self.announced += 1
        except ServiceError:
            self.unheard += 1  # a hint that nobody took

    def _obeys(self, training: Training) -> bool:
        """A recorder that may be asked ends at the step that is asked for."""
        if training.kind.on_stop != "raise":
            return False
        try:
            control = ControlDocument.decode(training.recording.store.get("control.json"))
        except NotFoundError:
            return False
        stop = control.stop
        if stop is None or stop.attempt != training.attempt:
            return False
        step = training.written[0] * STEPS - 1
        for worker in range(training.kind.workers):
            training.recording.end("stopped", step, worker)
        if isinstance(training.job, CountedJob):
            training.job.ends(0)
        training.over = True
        return True

    def _end(self, training: Training) -> None:
        """All is written. What is bad goes on until somebody stops it."""
        if training.bad:
            return
        state = "failed" if training.first_try else "completed"
        for worker in range(training.kind.workers):
            training.recording.end(state, training.written[worker] * STEPS - 1, worker)  # type: ignore[arg-type]
        if isinstance(training.job, CountedJob):
            training.job.ends(1 if training.first_try else 0)
        training.over = True


@contextmanager
def _alive(training: Training) -> Iterator[bool]:
    """Whether an attempt's job runs; one that the harness counts is not stopped meanwhile."""
    if isinstance(training.job, CountedJob):
        with training.job.lock:
            yield not training.job.gone
    else:
        yield training.job is None or training.job.poll() is None


def end_processes(trainings: list[Training]) -> None:
    """End what nobody stopped."""
    for training in trainings:
        if isinstance(training.job, subprocess.Popen):
            with suppress(ProcessLookupError):
                training.job.kill()
            training.job.wait()
