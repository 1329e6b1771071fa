"""Launched again after a stop, from the last good checkpoint: once, as often as was asked for, and not in doubt."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from tests.services.jobs import eventually
from watchstep.errors import ConfigError
from watchstep.stopping import EXIT_STOPPED
from watchstep_launch import Estimator, Job, JobHandle, JobStatus, Local, requeue
from watchstep_launch.backend import BackendDownError
from watchstep_launch.job_record import JobRecord, load
from watchstep_launch.relaunch import Intent
from watchstep_launch.requeueing import launched_again
from watchstep_rules import non_finite_values

SECONDS = 180.0

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The program, and a store beside which one service is started by the first launch."""
    held = tmp_path_factory.mktemp("requeueing")
    (held / "train.py").write_text(TRAIN)
    yield held
    note = held / "store" / ".watchstep" / "service.json"
    if note.exists():
        os.kill(json.loads(note.read_text())["process"]["pid"], signal.SIGTERM)
        eventually(lambda: not note.exists(), SECONDS)


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
    assert written(job).split("\n")[:2] == ["from 11", "trained to the end"]
    attempts = {
        event.data["attempt"] for event in job.client().events(job.id, types=("io.watchstep.run.ended",))
    }
    assert len(attempts) == 2  # two waited, and it was launched again once
    (allowed,) = job.client().events(job.id, types=("io.watchstep.run.restart_allowed",))
    assert allowed.data["admitted"] == job.record.attempt
    assert f"from {tmp_path / 'step-10'} (step 10)" in allowed.data["reason"]
    assert job.record.relaunch is not None
    assert (job.record.relaunch.done, job.record.relaunch.intent) == (1, None)


def test_it_is_launched_again_as_often_as_was_said(launch: Estimator) -> None:
    job = as_kind(launch, "always").fit(wait=False)
    first = job.record.attempt
    assert job.wait(SECONDS) == JobStatus("ended", EXIT_STOPPED)
    assert job.record.attempt != first
    assert written(job).startswith("from 11\n")
    assert launched_again(job.record, job.backend) is None


def test_without_a_good_checkpoint_it_is_not(launch: Estimator) -> None:
    job = as_kind(launch, "unsaved").fit(wait=False)
    first = job.record.attempt
    assert job.wait(SECONDS) == JobStatus("ended", EXIT_STOPPED)
    assert job.record.attempt == first


class Unknowing(Local):
    """A backend that finds no job by its name."""

    kind: ClassVar[str] = "local"
    find: ClassVar[None] = None  # type: ignore[assignment]


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
        launched_again(doubted, Unknowing())
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
    from watchstep_launch import Launch

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
