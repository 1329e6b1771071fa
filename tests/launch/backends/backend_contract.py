"""What every backend shows. A backend's own test file makes a `Bench` and takes these tests in:

    from tests.launch.backends.backend_contract import *  # noqa: F403 - the tests of the contract

    @pytest.fixture
    def bench(tmp_path: Path) -> Bench:
        return Bench(Local(folder=tmp_path / "jobs"), tmp_path)

Programs are short Python programs; ``{ready}`` in one is the path of a file that it makes once it has set up its
signals, on a disk that the test shares with the job. Where there is none, give `Bench` another ``is_ready``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.services.jobs import eventually
from watchstep.errors import ConfigError
from watchstep_launch.backend import (
    Backend,
    FindsByName,
    JobHandle,
    JobNotFoundError,
    JobStatus,
    Launch,
    SubmissionRejectedError,
)

__all__ = [
    "Bench",
    "test_a_handle_outlives_the_process_that_made_it",
    "test_a_job_is_found_by_its_name_while_it_runs_and_once_it_is_over",
    "test_a_job_that_ignores_a_stop_is_killed",
    "test_a_missing_program_leaves_nothing_running",
    "test_a_program_gets_what_it_was_launched_with",
    "test_a_stop_of_what_is_over_does_nothing",
    "test_a_stopped_job_is_over_and_was_asked_first",
    "test_an_exit_code_stays",
    "test_an_id_of_nobody_is_told",
    "test_another_job_with_the_same_id_is_never_stopped",
    "test_jobs_that_run_are_listed_and_found_again",
    "test_logs_go_on_where_they_were_left",
]

SECONDS = 60.0

_WAITS = "open({ready!r}, 'w').close()\nwhile True: signal.pause()"
WILLING = "import signal\n" + _WAITS
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _WAITS
TELLING = (
    "import os, signal\n"
    "def end(*_): os.write(1, b'asked to end\\n'); os._exit(5)\n"
    "signal.signal(signal.SIGTERM, end)\n" + _WAITS
)


def _changed(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of an earlier job that had this id: every number less by one, every text another."""

    def earlier(value: Any) -> Any:
        if isinstance(value, bool) or value is None:
            return value
        return value - 1 if isinstance(value, int | float) else f"{value}-earlier"

    return {name: earlier(value) for name, value in identity.items()}


@dataclass
class Bench:
    """A backend, and how to run programs on it.

    Attributes:
        backend: what is tested.
        folder: seen by the test and by its jobs.
        python: the interpreter there.
        earlier: the identity that an earlier job with the same id would have had.
        keeps_exit_codes: whether a stop leaves the program's own exit code to be seen.
        seconds: how long a job may take to come and go.
    """

    backend: Backend
    folder: Path
    python: str = sys.executable
    earlier: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _changed
    keeps_exit_codes: bool = True
    seconds: float = SECONDS
    _jobs: list[JobHandle] = field(default_factory=list)

    def launch(self, program: str, *arguments: str, **environment: str) -> JobHandle:
        """Submit a Python program."""
        name = f"contract-{uuid.uuid4().hex[:8]}"
        job = self.submit(name, program, *arguments, **environment)
        if "{ready!r}" in program:
            eventually(self._ready(name).exists, self.seconds)
        return job

    def submit(self, name: str, program: str, *arguments: str, **environment: str) -> JobHandle:
        """The same under a name, whether or not it has begun."""
        command = (self.python, "-c", program.replace("{ready!r}", repr(str(self._ready(name)))), *arguments)
        job = self.backend.submit(Launch(command, environment, self.folder, name=name))
        self._jobs.append(job)
        return job

    def end_of(self, job: JobHandle) -> JobStatus:
        """How a job is once it is over."""
        eventually(lambda: self.backend.status(job).is_over, self.seconds)
        return self.backend.status(job)

    def output_of(self, job: JobHandle) -> bytes:
        """All that a job wrote."""
        data, cursor = b"", ""
        while True:
            part = self.backend.logs(job, cursor)
            if not part.data:
                return data
            data, cursor = data + part.data, part.cursor

    def close(self) -> None:
        """Leave no job behind."""
        for job in self._jobs:
            if not self.backend.kill(job).is_over:
                self.end_of(job)

    def _ready(self, name: str) -> Path:
        return self.folder / f"{name}.ready"


def test_a_program_gets_what_it_was_launched_with(bench: Bench) -> None:
    arguments = ("two words", "", "$HOME `x` \\ 'q' \"d\"", "new\nline", "--flag=ä", "*")
    program = "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['GIVEN'], os.getcwd()]))"
    job = bench.launch(program, *arguments, GIVEN="a 'value' with $signs")
    assert bench.end_of(job) == JobStatus("ended", 0, bench.backend.status(job).detail)
    held = [json.loads(line) for line in bench.output_of(job).decode().splitlines() if line.startswith("[")]
    assert held == [[list(arguments), "a 'value' with $signs", os.path.realpath(bench.folder)]]


def test_an_exit_code_stays(bench: Bench) -> None:
    status = bench.end_of(bench.launch("raise SystemExit(3)"))
    assert (status.state, status.exit_code) == ("ended", 3)


def test_logs_go_on_where_they_were_left(bench: Bench) -> None:
    job = bench.launch(
        "import os, signal\nos.write(1, b'first\\n')\nos.write(2, b'second\\n')\n"
        "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'third\\n'), os._exit(0)))\n" + _WAITS
    )
    first = b""
    cursor = ""

    def has_both() -> bool:
        nonlocal first, cursor
        part = bench.backend.logs(job, cursor)
        first, cursor = first + part.data, part.cursor
        return b"first" in first and b"second\n" in first

    eventually(has_both, bench.seconds)
    bench.backend.stop(job)
    bench.end_of(job)
    rest = b""
    while (part := bench.backend.logs(job, cursor)).data:
        rest, cursor = rest + part.data, part.cursor
    assert b"third\n" in rest
    assert b"first" not in rest


def test_a_stopped_job_is_over_and_was_asked_first(bench: Bench) -> None:
    job = bench.launch(TELLING)
    assert bench.backend.status(job).state == "running"
    bench.backend.stop(job)
    status = bench.end_of(job)
    assert status.state in ("ended", "cancelled")
    assert b"asked to end\n" in bench.output_of(job)
    if bench.keeps_exit_codes:
        assert status.exit_code == 5


def test_a_job_that_ignores_a_stop_is_killed(bench: Bench) -> None:
    job = bench.launch(STUBBORN)
    assert not bench.backend.stop(job).is_over
    assert bench.backend.status(job).state == "running"
    bench.backend.kill(job)
    assert bench.end_of(job).exit_code != 0


def test_a_stop_of_what_is_over_does_nothing(bench: Bench) -> None:
    job = bench.launch("pass")
    status = bench.end_of(job)
    assert bench.backend.stop(job) == status
    assert bench.backend.kill(job) == status
    assert bench.backend.status(job) == status


def test_another_job_with_the_same_id_is_never_stopped(bench: Bench) -> None:
    job = bench.launch(WILLING)
    other = replace(job, identity=bench.earlier(job.identity), details={})
    for call in (bench.backend.status, bench.backend.stop, bench.backend.kill):
        assert call(other).state in ("vanished", "ended", "unknown")
    assert bench.backend.status(job).state == "running"


def test_a_handle_outlives_the_process_that_made_it(bench: Bench) -> None:
    backend: Any = bench.backend
    name = f"contract-{uuid.uuid4().hex[:8]}"
    ready = bench.folder / f"{name}.ready"
    program = (
        "import json, pathlib, sys\n"
        "from watchstep_launch.backend import Launch\n"
        "from watchstep_launch.backend import open_backend\n"
        "kind, settings, command, folder, name = json.loads(sys.argv[1])\n"
        "backend = open_backend(kind, settings)\n"
        "job = backend.submit(Launch(tuple(command), {}, pathlib.Path(folder), name=name))\n"
        "print(json.dumps(job.as_data()))\n"
    )
    command = [bench.python, "-c", TELLING.replace("{ready!r}", repr(str(ready)))]
    given = [backend.kind, backend.model_dump(mode="json"), command, str(bench.folder), name]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(given)], capture_output=True, text=True, check=True
    )
    job = JobHandle.from_data(json.loads(done.stdout))
    bench._jobs.append(job)
    eventually(ready.exists, bench.seconds)
    assert bench.backend.status(job).state == "running"
    bench.backend.stop(job)
    status = bench.end_of(job)
    assert status.state in ("ended", "cancelled")
    assert b"asked to end\n" in bench.output_of(job)
    if bench.keeps_exit_codes:
        assert status.exit_code == 5


def test_jobs_that_run_are_listed_and_found_again(bench: Bench) -> None:
    job = bench.launch(WILLING)
    assert job in bench.backend.jobs()
    again = bench.backend.reattach(job.id)
    assert (again, bench.backend.settled(again)) == (job, job)
    bench.backend.kill(again)
    bench.end_of(job)
    assert job not in bench.backend.jobs()


def test_a_job_is_found_by_its_name_while_it_runs_and_once_it_is_over(bench: Bench) -> None:
    """By this a launch is known to have been taken whose launcher ended before it could write that down."""
    assert isinstance(bench.backend, FindsByName)
    name = f"contract-of-a-run-that-has-a-long-name-{uuid.uuid4().hex[:8]}"
    assert bench.backend.find(name) is None
    job = bench.submit(name, "pass")
    assert bench.backend.find(name) == job
    bench.end_of(job)
    assert bench.backend.find(name) == job
    assert bench.backend.find(f"{name}-2") is None


def test_an_id_of_nobody_is_told(bench: Bench) -> None:
    with pytest.raises(JobNotFoundError, match="99999999"):
        bench.backend.reattach("99999999")
    with pytest.raises(JobNotFoundError):
        bench.backend.reattach("; no id $(x)")
    with pytest.raises(ConfigError):
        bench.backend.settled(JobHandle(bench.backend.kind, "1", {"nonsense": 1}))


def test_a_missing_program_leaves_nothing_running(bench: Bench) -> None:
    """Told at once where the backend can know it, else by the exit code that a shell would give, or another that is not 0."""
    launch = Launch(("watchstep-no-such-program",), {}, bench.folder, name=f"none-{uuid.uuid4().hex[:8]}")
    try:
        status = bench.end_of(bench.backend.submit(launch))
    except SubmissionRejectedError as error:
        what, status = error.what, JobStatus("ended", 127)
        assert launch.command[0] in what
    assert status.state == "ended"
    assert status.exit_code not in (0, None)
