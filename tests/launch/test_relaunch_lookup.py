"""A launcher that ended while it launched a job again: whoever waits next launches it, and nobody launches it twice."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.launch.backends.kubernetes.double import running_double
from tests.launch.beside import end_service_of
from tests.launch.test_requeue import TRAIN
from tests.services.jobs import eventually
from watchstep.errors import ServiceError
from watchstep_launch import Estimator, Job, JobStatus, Kubernetes, Local, Slurm, requeue
from watchstep_launch.backend import Backend, BackendDownError
from watchstep_launch.job_record import load
from watchstep_launch.registration import LaunchRegistration
from watchstep_launch.relaunch import Intent, Relaunch
from watchstep_launch.requeueing import launched_again, submitted_job
from watchstep_rules import non_finite_values

SECONDS = 180.0

ENDS = """
import os, signal, sys
from watchstep_launch import requeueing
from watchstep_launch.backends.kubernetes import submission
from watchstep_launch.job import Job

job, point = Job.reattach(sys.argv[1]), sys.argv[2]
submit = type(job.backend).submit

def end(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if point == "before":
    type(job.backend).submit = end
elif point == "after":
    type(job.backend).submit = lambda *given: (submit(*given), end())
elif point == "without its secret":
    submission._create_secret = end
elif point == "bound":
    save = requeueing.JobRecord.save
    requeueing.JobRecord.save = lambda record: end() if record.relaunch.done else save(record)
requeueing.launched_again(job.record, job.backend)
"""


@dataclass
class Where:
    """Where jobs are launched."""

    backend: Backend
    folder: Path
    store: Path

    def launched(self, run: str, kind: str = "once") -> Job:
        """A job that a rule has stopped, and that nobody has launched again yet."""
        folder = self.folder / run
        folder.mkdir()
        job = Estimator(
            str(self.folder / "train.py"), backend=self.backend, store=self.store, folder=self.folder,
            rules=[non_finite_values().stop()], arguments=(kind, str(folder)), on_stop=requeue(limit=1),
        ).fit(run=run, wait=False)  # fmt: skip
        eventually(lambda: job.status().is_over, SECONDS)
        eventually(lambda: [*job.client().events(run, types=("io.watchstep.stop.done",))], SECONDS)
        return job


@pytest.fixture
def where(
    request: pytest.FixtureRequest, beside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Where]:
    """On Local, or on what the test names: a service of its own serves each cluster, for it has the first launch's environment."""
    for name in ("WATCHSTEP_SERVICE", "WATCHSTEP_TOKEN", "WATCHSTEP_HOME"):
        monkeypatch.delenv(name, raising=False)
    kind = getattr(request, "param", "local")
    # The service beside the shared store looks for job records where those of all tests are.
    if kind != "local":
        monkeypatch.setenv("WATCHSTEP_JOBS", str(tmp_path / "jobs"))
    (tmp_path / "train.py").write_text(TRAIN)
    with ExitStack() as stack:
        if kind == "local":
            yield Where(Local(), tmp_path, beside / "store")
            return
        stack.callback(end_service_of, tmp_path / "store")
        if kind == "slurm":
            request.getfixturevalue("slurm")
            yield Where(Slurm(partition="all"), tmp_path, tmp_path / "store")
            return
        double = stack.enter_context(running_double())
        monkeypatch.setenv("KUBECONFIG", str(double.write_kubeconfig(tmp_path / "kubeconfig")))
        yield Where(
            Kubernetes(image="train:1", working_directory=str(tmp_path)), tmp_path, tmp_path / "store"
        )


def ends_at(point: str, job: Job) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, job.id, point], capture_output=True, text=True, check=False, timeout=SECONDS
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr


def intended(job: Job) -> tuple[Relaunch, Intent]:
    relaunch = load(job.id).relaunch
    assert relaunch is not None
    assert relaunch.intent is not None
    return relaunch, relaunch.intent


def as_written_long_ago(job: Job) -> None:
    record = load(job.id)
    relaunch, intent = intended(job)
    replace(record, relaunch=replace(relaunch, intent=replace(intent, written=time.time() - 3600.0))).save()


def check_launched_once_more(job: Job, first: str, intent: Intent) -> None:
    relaunch = job.record.relaunch
    assert relaunch is not None
    assert (job.record.attempt, relaunch.done, relaunch.intent) == (intent.attempt, 1, None)
    ended = job.client().events(job.id, types=("io.watchstep.run.ended",))
    assert [event.data["attempt"] for event in ended] == [first, intent.attempt]
    assert job.run_state().info.state == "completed"
    output = b"".join(job.logs()).decode()
    assert (output.count("from 11\n"), output.count("trained to the end\n")) == (1, 1)
    assert launched_again(job.record, job.backend) is None


@pytest.mark.parametrize(
    ("where", "point"),
    [
        ("local", "bound"),
        pytest.param("local", "before", marks=pytest.mark.ci),
        pytest.param("local", "after", marks=pytest.mark.ci),
        pytest.param("kubernetes", "before", marks=pytest.mark.ci),
        pytest.param("kubernetes", "without its secret", marks=pytest.mark.ci),
        pytest.param("kubernetes", "after", marks=pytest.mark.ci),
        pytest.param("slurm", "before", marks=pytest.mark.ci),
        pytest.param("slurm", "after", marks=pytest.mark.ci),
    ],
    indirect=["where"],
)
def test_a_launcher_that_ended_between_stop_and_launch_loses_nothing_and_doubles_nothing(
    where: Where, point: str
) -> None:
    first = where.launched(f"ends-{point.replace(' ', '-')}")
    ends_at(point, first)
    _, intent = intended(first)
    if point == "before":
        as_written_long_ago(first)
    job = Job.reattach(first.id)
    status = job.wait(SECONDS)
    assert (status.state, status.exit_code) == ("ended", 0)
    check_launched_once_more(job, first.record.attempt, intent)


class Own(Local):
    """A backend of somebody's own, which finds no job by its name."""

    kind: ClassVar[str] = "local"
    find: ClassVar[None] = None  # type: ignore[assignment]


class Forgets(Local):
    """A backend that knows its jobs for no longer than they run."""

    kind: ClassVar[str] = "local"

    def find(self, name: str) -> None:
        return None


class Slow(Local):
    """A backend of which a submission may go on for a day."""

    kind: ClassVar[str] = "local"
    submission_seconds: ClassVar[float] = 86_400.0
    looks: ClassVar[int] = 0

    def find(self, name: str) -> Any:
        Slow.looks += 1
        return None if Slow.looks == 1 else Local().reattach(name)


def test_a_service_that_is_away_costs_no_launch_and_in_doubt_nothing_is_submitted(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = where.launched("away")

    def refuse(*_: object) -> None:
        raise ServiceError("no answer", "ask again")

    with monkeypatch.context() as patched:
        patched.setattr(LaunchRegistration, "bind", refuse)
        with pytest.raises(ServiceError, match="no answer"):
            launched_again(load(first.id), first.backend)
    held = load(first.id)
    assert held.relaunch is not None
    assert (held.attempt, held.relaunch.done, held.relaunch.intent) == (first.record.attempt, 0, None)
    assert first.backend.jobs() == []  # what no service can stop was ended
    job = Job.reattach(first.id)
    assert job.wait(SECONDS) == JobStatus("ended", 0)
    assert job.record.relaunch is not None
    assert job.record.relaunch.done == 1

    # One that ran and that its backend has forgotten is not launched once more; of another nobody knows.
    intent = Intent(job.record.attempt, "ws-forgotten", "", 0)
    with pytest.raises(BackendDownError, match=f"ran as attempt {job.record.attempt} of run default/away"):
        submitted_job(Forgets(), job.record, intent)
    assert submitted_job(Forgets(), job.record, replace(intent, attempt="never")) is None
    with pytest.raises(BackendDownError, match="may have accepted"):
        submitted_job(Own(), job.record, intent)


def test_a_submission_that_may_still_go_on_is_waited_for(where: Where) -> None:
    running = where.backend.submit(_sleeping(where.folder))
    try:
        record: Any = None  # nothing of it is looked at: the job comes before the day is over
        assert submitted_job(Slow(), record, Intent("a", running.id, "", 0, time.time())) == running
    finally:
        where.backend.kill(running)


def _sleeping(folder: Path) -> Any:
    from watchstep_launch import Launch

    return Launch(("sleep", "1000"), {}, folder)
