"""A store that vanishes between the launch of a job and its first write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.jobs import eventually
from watchstep.capture.upload.uploader import spill_folders, sync
from watchstep.reading.run import open_run
from watchstep.store.local import new_store
from watchstep_launch.backend import JobHandle, Launch
from watchstep_launch.backends.local.backend import Local
from watchstep_launch.estimator import Estimator
from watchstep_launch.job import Job
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

PROGRAM = """
from watchstep import Bounds, CaptureConfig, Hook
with Hook(config=CaptureConfig(bounds=Bounds(close_seconds=0.2))) as hook:
    for step in range(5):
        hook.log(loss=1.0)
        hook.step()
"""


class Unmounting(Local):
    """Leaves an empty folder in the place of the store just before the job starts."""

    store: Path

    def submit(self, launch: Launch) -> JobHandle:
        self.store.rename(self.store.with_name("away"))
        self.store.mkdir()
        return super().submit(launch)


def ended(job: Job) -> bool:
    return job.status().state == "ended"


@pytest.mark.ci
def test_an_empty_folder_in_the_place_of_the_store_is_an_outage_for_a_launched_job(
    tmp_path: Path, spill_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    store = tmp_path / "disk" / "store"
    with EmbeddedService(load_settings(home=tmp_path / "home", store=str(store))) as service:
        monkeypatch.setenv("WATCHSTEP_TOKEN", service.operator_token)
        estimator = Estimator(
            "train.py",
            backend=Unmounting(store=store),
            store=store,
            folder=tmp_path,
            environment={"WATCHSTEP_SPILL": str(spill_root)},
            service=service.url,
            backend_name="local",
        )
        job = estimator.fit(run="r", wait=False)
        eventually(lambda: ended(job), 120)
        assert list(store.iterdir()) == []
        store.rmdir()
        store.with_name("away").rename(store)
        (folder,) = spill_folders(spill_root)
        assert sync(folder).why == ""
        assert open_run(store / "default" / "r").steps() == list(range(5))


WAITING = """
import math, sys, time
from pathlib import Path
from watchstep import Hook
with Hook() as hook:
    hook.log(loss=math.nan)
    hook.step()
    print("recording", flush=True)
    while not Path(sys.argv[1]).exists():
        hook._ending.wake()
    for step in range(100_000):
        hook.log(loss=math.nan)
        hook.step()
        time.sleep(0.02)  # a step's work
"""


@pytest.mark.ci
@pytest.mark.parametrize(("launch", "place"), [("watchstep run", "empty"), ("hook", "replaced")])
def test_a_job_launched_while_the_folder_of_its_service_is_away_is_stopped_once_it_is_back(
    tmp_path: Path, spill_root: Path, monkeypatch: pytest.MonkeyPatch, launch: str, place: str
) -> None:
    (tmp_path / "train.py").write_text(WAITING)
    store, away, back = tmp_path / "disk" / "store", tmp_path / "disk" / "away", tmp_path / "back"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with EmbeddedService(load_settings(home=tmp_path / "home", store=str(store))) as service:
        store.rename(away)
        if place == "replaced":
            new_store(store)
        elif place == "empty":
            store.mkdir()
        before = sorted(store.rglob("*"))
        run: list[str] = [sys.executable, "-m", "watchstep.command", "run", "--run", "r", "--"]
        program = [sys.executable, str(tmp_path / "train.py"), str(back)]
        variables = {
            "WATCHSTEP_STORE": str(store),
            "WATCHSTEP_RUN": "r",
            "WATCHSTEP_SERVICE": service.url,
            "WATCHSTEP_TOKEN": service.operator_token,
            "WATCHSTEP_ON_STOP": "raise",
            "XDG_CACHE_HOME": str(tmp_path / "other-cache"),  # only the service knows the store
        }
        job = subprocess.Popen(
            [*run, *program] if launch == "watchstep run" else program,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            text=True,
        )
        with job:
            assert job.stdout is not None
            assert job.stdout.readline() == "recording\n"
            assert sorted(store.rglob("*")) == before
            if store.exists():
                store.rename(tmp_path / "aside")
            away.rename(store)
            back.touch()
            assert job.wait(120) == 86
        assert spill_folders(spill_root) == []
        assert open_run(store / "default" / "r").state() == "stopped"
