"""Which processes the service signals: jobs that a launcher of the process's own user recorded, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from watchstep.errors import ConfigError
from watchstep.platform.process import (
    FOLDER,
    ProcessIdentity,
    ProcessRecord,
    default_folder,
    file_name,
    record_process,
)
from watchstep_launch.backend import BackendError, JobHandle
from watchstep_launch.backends.local.backend import Local, job_of

ANOTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of another user")


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Local:
    monkeypatch.setenv(FOLDER, str(tmp_path / "jobs"))
    return Local()


@contextmanager
def process(user: int | None = None, *, own_session: bool = True) -> Iterator[JobHandle]:
    """A process that nobody recorded."""
    with subprocess.Popen(["sleep", "600"], start_new_session=own_session, user=user) as started:
        try:
            yield job_of(ProcessIdentity.of(started.pid))
        finally:
            started.kill()


def refused(backend: Local, job: JobHandle, match: str) -> None:
    """Neither bound nor signalled, whichever way it came to be bound."""
    with pytest.raises(ConfigError, match=match):
        backend.settled(job)
    for signalled in (backend.stop, backend.kill):
        with pytest.raises(BackendError, match=match):
            signalled(job)
    assert backend.status(job).state == "running"


def record_of(job: JobHandle) -> Path:
    record_process(int(job.id))
    return default_folder() / file_name(ProcessIdentity.of(int(job.id)))


def test_a_process_without_a_record_is_refused(backend: Local) -> None:
    with process() as job:
        refused(backend, job, "no valid job record")


def test_a_recorded_process_is_bound_and_signalled(backend: Local) -> None:
    with process() as job:
        record_of(job)
        assert backend.settled(job) == job
        backend.stop(job)


@as_root
def test_a_process_of_another_user_needs_a_record_of_that_user_or_root(backend: Local) -> None:
    with process(ANOTHER_USER) as job:
        refused(backend, job, "of user nobody has no valid job record")
        place = record_of(job)
        os.chown(place, 12345, 12345)
        refused(backend, job, "the file belongs to user 12345")
        os.chown(place, ANOTHER_USER, ANOTHER_USER)
        assert backend.settled(job) == job
        backend.kill(job)


@as_root
def test_a_folder_of_another_user_holds_no_valid_record(backend: Local) -> None:
    with process() as job:
        record_of(job)
        os.chown(default_folder(), ANOTHER_USER, ANOTHER_USER)
        refused(backend, job, "the folder belongs to user nobody")


def replaced_by_a_pipe(place: Path) -> None:
    place.unlink()
    os.mkfifo(place, 0o600)


def replaced_by_a_link(place: Path) -> None:
    place.symlink_to(place.rename(place.with_suffix(".real")))


FORGED: dict[str, Callable[[Path], object]] = {
    "can be written by others": lambda place: place.chmod(0o666),
    "the folder can be written by others": lambda place: place.parent.chmod(0o777),
    "Too many levels of symbolic links": replaced_by_a_link,
    "is not a regular file": replaced_by_a_pipe,
    "the record in .* is not valid": lambda place: place.write_text("{}"),
}


@pytest.mark.parametrize("told", FORGED)
def test_a_record_that_others_could_have_made_is_not_valid(backend: Local, told: str) -> None:
    with process() as job:
        place = record_of(job)
        FORGED[told](place)
        refused(backend, job, told)


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot": "another"}, {"pid": 2}])
def test_a_record_of_another_process_is_not_valid(backend: Local, change: dict[str, object]) -> None:
    with process() as job:
        place = record_of(job)
        data = json.loads(place.read_text())
        data["identity"].update(change)
        place.write_text(json.dumps(data))
        refused(backend, job, "another start time or boot")


def test_a_record_of_a_process_that_has_changed_its_user_is_not_valid(backend: Local) -> None:
    with process() as job:
        place = record_of(job)
        ProcessRecord(ProcessIdentity.of(int(job.id)), ANOTHER_USER).write(place.parent)
        refused(backend, job, "it is of a process of user nobody")


def test_a_folder_that_others_could_write_is_closed_to_them_by_the_launcher(backend: Local) -> None:
    default_folder().mkdir(mode=0o777, parents=True)
    default_folder().chmod(0o777)
    with process() as job:
        place = record_of(job)
        assert (place.parent.stat().st_mode & 0o777, place.stat().st_mode & 0o777) == (0o755, 0o600)
        backend.settled(job)


def test_the_service_never_signals_itself_its_parents_or_its_children(backend: Local) -> None:
    for pid, told in ((os.getpid(), "the service itself"), (os.getppid(), "a parent of the service")):
        record_process(pid)
        refused(backend, job_of(ProcessIdentity.of(pid)), told)
    with process(own_session=False) as child:
        record_process(int(child.id))
        refused(backend, child, "a child of the service")


def test_the_service_never_signals_the_leader_of_its_own_process_group(tmp_path: Path) -> None:
    """As in a script that starts both: the job's signal would reach the service by its group."""
    check = (
        "import os, subprocess, sys\n"
        "from watchstep.platform.process import ProcessIdentity\n"
        "from watchstep.platform.process import record_process\n"
        "from watchstep_launch.backends.local.backend import Local, job_of\n"
        "job = subprocess.Popen(['sleep', '600'], process_group=0)\n"
        "try:\n"
        "    os.setpgid(0, job.pid)\n"
        "    record_process(job.pid)\n"
        "    Local().settled(job_of(ProcessIdentity.of(job.pid)))\n"
        "except Exception as error: print(error.what)\n"
        "finally: job.kill()\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert "is the leader of the service's process group" in done.stdout


def test_init_other_low_ids_and_threads_are_refused(backend: Local) -> None:
    init = job_of(ProcessIdentity.of(1))
    for pid in (1, 0, -1, -os.getpgrp()):
        job = JobHandle("local", str(pid), {**init.identity, "pid": pid})
        with pytest.raises(ConfigError, match="is not a job"):
            backend.settled(job)
    with pytest.raises(BackendError, match="is not a job"):
        backend.kill(init)
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        job = job_of(ProcessIdentity.of(thread.native_id))
        with pytest.raises(ConfigError, match="is a thread"):
            backend.settled(job)
        with pytest.raises(BackendError, match="cannot be signalled"):
            backend.kill(job)
    finally:
        end.set()
        thread.join()


def test_a_process_that_has_ended_is_bound_as_before(backend: Local) -> None:
    with process() as job:
        os.kill(int(job.id), signal.SIGKILL)
    assert backend.settled(job) == job
    assert backend.kill(job).is_over
    elsewhere = replace(job, identity={**job.identity, "boot": "another", "host": "another"})
    assert backend.settled(elsewhere).identity == elsewhere.identity


def test_records_of_attached_processes_are_no_jobs_of_a_supervisor_and_are_removed(backend: Local) -> None:
    with process() as job:
        place = record_of(job)
        assert backend.jobs() == []
        os.utime(place, (0, 0))
        backend.records.prepare()
        assert place.exists(), "it runs still"
    backend.records.prepare()
    assert not place.exists()
