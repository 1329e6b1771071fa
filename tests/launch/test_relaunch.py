"""Relaunches: what is looked up before one, and attempts that a scheduler requeues."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.launch.backends.kubernetes.double import running_double
from tests.launch.beside import end_service_of
from tests.services.jobs import eventually
from watchstep.errors import ConfigError, ServiceError
from watchstep.stopping import EXIT_STOPPED
from watchstep_launch import Estimator, Job, JobHandle, JobStatus, Kubernetes, Launch, Local, Slurm, requeue
from watchstep_launch.backend import Backend, BackendDownError
from watchstep_launch.job_record import JobRecord, load
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
TRAIN = """
import os, pathlib, sys, time
import watchstep

kind, place = sys.argv[1], pathlib.Path(sys.argv[2])
resumed = watchstep.resume_from()
first = int(pathlib.Path(resumed).read_text()) + 1 if resumed else 0
print("from", first, flush=True)
hook = watchstep.Hook()
for step in range(first, 40 if kind == "once" and resumed else 100_000):
    bad = step == 20 and (kind == "always" or not resumed) and kind != "asked"
    hook.log(loss=float("nan") if bad else 1.0)
    if step == 10 and kind != "unsaved":
        saved = place / f"step-{step}"
        saved.write_text(str(step))
        hook.checkpoint_saved(saved, step=step)
        while not hook._checkpoints._waiting.empty():
            time.sleep(0.01)
    hook.step()
    time.sleep(0.01)
hook.close()
print("trained to the end")
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


@pytest.mark.release
@pytest.mark.parametrize(
    ("where", "point"),
    [
        ("local", "bound"),
        pytest.param("local", "before", marks=pytest.mark.release),
        pytest.param("local", "after", marks=pytest.mark.release),
        pytest.param("kubernetes", "before", marks=pytest.mark.release),
        pytest.param("kubernetes", "without its secret", marks=pytest.mark.release),
        pytest.param("kubernetes", "after", marks=pytest.mark.release),
        pytest.param("slurm", "before", marks=pytest.mark.release),
        pytest.param("slurm", "after", marks=pytest.mark.release),
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


@pytest.mark.ci
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
    return Launch(("sleep", "1000"), {}, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The program, and a store beside which one service is started by the first launch."""
    held = tmp_path_factory.mktemp("requeueing")
    (held / "train.py").write_text(TRAIN)
    yield held
    end_service_of(held / "store")


@pytest.fixture
def launch(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Estimator:
    for name in ("WATCHSTEP_SERVICE", "WATCHSTEP_TOKEN", "WATCHSTEP_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WATCHSTEP_JOBS", str(folder / "jobs"))
    return Estimator(
        "train.py",
        backend=Local(),
        store=folder / "store",
        folder=folder,
        rules=[non_finite_values().stop()],
        arguments=("once", str(tmp_path)),
        on_stop=requeue(limit=1),
    )


def as_kind(launch: Estimator, kind: str) -> Estimator:
    return replace(launch, arguments=(kind, launch.arguments[1]))


def written(job: Job) -> str:
    return b"".join(job.logs()).decode()


@pytest.mark.ci
def test_it_goes_on_from_the_last_good_checkpoint_whoever_waits(launch: Estimator, tmp_path: Path) -> None:
    job = launch.fit(wait=False)
    other = Job.reattach(job.id)
    ended: list[JobStatus] = []
    waiting = [
        threading.Thread(target=lambda held=held: ended.append(held.wait(SECONDS))) for held in (job, other)
    ]
    for one in waiting:
        one.start()
    for one in waiting:
        one.join(SECONDS)
    assert ended == [JobStatus("ended", 0)] * 2
    assert job.record == other.record == load(job.id)
    # The recorder's own lines may come in between.
    lines = [line for line in written(job).splitlines() if not line.startswith("watchstep")]
    assert lines[:2] == ["from 11", "trained to the end"]
    attempts = {
        event.data["attempt"] for event in job.client().events(job.id, types=("io.watchstep.run.ended",))
    }
    assert len(attempts) == 2  # two waited, and it was launched again once
    (allowed,) = job.client().events(job.id, types=("io.watchstep.run.restart_allowed",))
    assert allowed.data["admitted"] == job.record.attempt
    assert f"from {tmp_path / 'step-10'} (step 10)" in allowed.data["reason"]
    assert job.record.relaunch is not None
    assert (job.record.relaunch.done, job.record.relaunch.intent) == (1, None)


@pytest.mark.ci
def test_it_is_launched_again_as_often_as_was_said(launch: Estimator) -> None:
    job = as_kind(launch, "always").fit(wait=False)
    first = job.record.attempt
    assert job.wait(SECONDS) == JobStatus("ended", EXIT_STOPPED)
    assert job.record.attempt != first
    assert written(job).startswith("from 11\n")
    assert launched_again(job.record, job.backend) is None


@pytest.mark.ci
def test_without_a_good_checkpoint_it_is_not(launch: Estimator) -> None:
    job = as_kind(launch, "unsaved").fit(wait=False)
    first = job.record.attempt
    assert job.wait(SECONDS) == JobStatus("ended", EXIT_STOPPED)
    assert job.record.attempt == first


def test_what_people_stop_stays_stopped_and_in_doubt_nothing_is_submitted(
    launch: Estimator, tmp_path: Path
) -> None:
    job = as_kind(launch, "asked").fit(wait=False)
    eventually((tmp_path / "step-10").exists, SECONDS)
    job.stop("enough")
    assert job.wait(SECONDS).is_over
    assert job.record.relaunch is not None
    assert job.record.relaunch.done == 0

    # Its launcher ended between the word that it would submit and the record of what it had submitted.
    intent = Intent("a-again", "ws-again-1234", str(tmp_path / "step-10"), 10)
    doubted = replace(job.record, relaunch=replace(job.record.relaunch, intent=intent))
    doubted.save()
    with pytest.raises(BackendDownError, match="ws-again-1234"):
        launched_again(doubted, Own())
    assert job.backend.jobs() == []
    taken = started_under(intent.name, tmp_path)
    try:
        following = launched_again(doubted, job.backend)
        assert following is not None
        assert (following.handle, following.attempt) == (taken, "a-again")
        assert launched_again(doubted, job.backend) == following  # whoever comes later finds what was done
    finally:
        Local().kill(taken)


def started_under(name: str, folder: Path) -> JobHandle:
    return Local().submit(Launch(("sleep", "1000"), {}, folder, name=name))


def test_bad_words() -> None:
    with pytest.raises(ConfigError, match="limit=0"):
        requeue(limit=0)
    with pytest.raises(ConfigError, match="from_='first'"):
        requeue("first")  # type: ignore[arg-type]


def test_a_record_without_it_is_read(launch: Estimator) -> None:
    data: dict[str, object] = {
        "project": "p",
        "run": "r",
        "attempt": "a",
        "store": "s",
        "kind": "local",
        "settings": {},
        "judge": None,
    }
    held = JobRecord.from_data({**data, "handle": {"backend": "local", "id": "1", "identity": {}}})
    assert held.relaunch is None
    assert JobRecord.from_data(json.loads(json.dumps(held.as_data()))) == held
