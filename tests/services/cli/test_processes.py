"""``watchstep api`` with several processes, restarts of ``watchstep worker``, and the imports of production processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.services.jobs import eventually
from tests.services.redis import free_port, running_redis
from watchstep_services.auth import create_token
from watchstep_services.cli.worker_restarts import WorkerLife, delay_before, run_with_restarts
from watchstep_services.db.engine import open_database
from watchstep_services.db.schema import upgrade

ASKED = 'watchstep_http_request_seconds_count{method="GET",route="/healthz",status="2xx"}'


def asked(client: httpx.Client, url: str) -> float:
    """How many requests for ``/healthz`` the figures at an address tell of."""
    text = client.get(f"{url}/metrics").raise_for_status().text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(ASKED))


@pytest.mark.release
def test_the_metrics_of_two_processes_are_summed(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path / 'service.sqlite'}")
    upgrade(database)
    token = create_token(database, "operator")
    database.close()
    port, figures_port = free_port(), free_port()
    log, temporary = tmp_path / "log", tmp_path / "tmp"
    temporary.mkdir()
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "WATCHSTEP_STORE": str(tmp_path),
        "WATCHSTEP_DATABASE_URL": f"sqlite:///{tmp_path / 'service.sqlite'}",
        "WATCHSTEP_BROKER_URL": f"redis://127.0.0.1:{free_port()}/0",
        "WATCHSTEP_METRICS_PORT": str(figures_port),
        "WATCHSTEP_ACCESS_LOG": "true",
        "WATCHSTEP_LOG": "json",
    }
    program = [
        str(Path(sys.executable).with_name("watchstep")),
        "api",
        "--processes",
        "2",
        "--port",
        str(port),
    ]
    made = 0
    # A connection for each request: whichever process is free takes it.
    client = httpx.Client(
        headers={"authorization": f"Bearer {token}"},
        limits=httpx.Limits(max_keepalive_connections=0),
        timeout=600,
    )

    def lines() -> list[dict[str, object]]:
        return [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def started() -> set[object]:
        return {line["process"] for line in lines() if "startup complete" in str(line["message"])}

    def both_answered() -> bool:
        nonlocal made
        client.get(f"http://127.0.0.1:{port}/healthz").raise_for_status()
        made += 1
        return started() == {line["process"] for line in lines() if line["logger"] == "uvicorn.access"}

    with client, log.open("wb") as output:
        running = subprocess.Popen(program, env=environment, stdout=output, stderr=output)
        try:
            eventually(lambda: len(started()) == 2, 120)
            eventually(both_answered, 60)
            eventually(lambda: asked(client, f"http://127.0.0.1:{port}") == made, 60)
            assert asked(client, f"http://127.0.0.1:{figures_port}") == made
        finally:
            running.send_signal(signal.SIGTERM)
            code = running.wait(60)
    assert code == 0, log.read_text()
    assert not list(temporary.glob("watchstep-figures-*"))


LEAN = """
import sys
from watchstep.errors import ConfigError
from watchstep_services.cli.main import main
for word in ("api", "worker", "scheduler"):
    try:
        main([word])
    except ConfigError as error:
        assert "WATCHSTEP_BROKER_URL" in error.what
    else:
        sys.exit("it started")
# prometheus_client decides at its import whether figures are shared: they are not yet.
assert not {"watchstep_services.cli.runs.recorded", "prometheus_client", "fastapi", "celery"} & set(sys.modules)
import watchstep_services.scheduler.celery_client
assert not {"sqlalchemy", "fastapi", "pyarrow", "watchstep_services.service.context"} & set(sys.modules)
"""


def test_processes_import_nothing_of_other_commands() -> None:
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


FAILING = """
import sys
from pathlib import Path
from celery.worker import loops

life, lives = Path(sys.argv[1]), int(sys.argv[2])
usual = loops.asynloop

def failing(consumer, *arguments, **options):
    number = int(life.read_text()) + 1 if life.exists() else 1
    life.write_text(str(number))
    if number <= lives:
        consumer.on_ready()
        # As kombu's at a loss of Redis with unacknowledged messages.
        raise AttributeError("'NoneType' object has no attribute 'hostname'")
    return usual(consumer, *arguments, **options)

loops.asynloop = failing
from watchstep_services.cli.main import main
main(["worker", "--processes", "1"])
"""
"""A worker whose connection to the broker fails in its first lives; then it is one as always."""


@contextmanager
def program_of_worker(folder: Path, code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that runs a worker, and end it; its log is the file ``log``."""
    url = f"sqlite:///{folder / 'service.sqlite'}"
    with running_redis() as broker, (folder / "log").open("wb") as output:
        environment = {
            **os.environ,
            "TMPDIR": str(folder),
            "WATCHSTEP_STORE": str(folder),
            "WATCHSTEP_DATABASE_URL": url,
            "WATCHSTEP_BROKER_URL": broker.url,
        }
        program = [sys.executable, "-c", code, *arguments]
        running = subprocess.Popen(program, env=environment, stdout=output, stderr=output)
        try:
            yield running
        finally:
            running.kill()
            running.wait()


@pytest.mark.release
def test_a_worker_starts_again_after_an_unrecoverable_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with program_of_worker(tmp_path, FAILING, str(tmp_path / "life"), "1") as running:
        eventually(
            lambda: log.read_text().count(" ready.") == 2 or running.poll() is not None, 120, log.read_text
        )
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0, log.read_text()
    text = log.read_text()
    assert "has no attribute 'hostname'" in text
    assert "it starts again in 1 s" in text
    assert (tmp_path / "life").read_text() == "2"
    assert not list(tmp_path.glob("watchstep-figures-*"))


SLOW = """
import os, sys, time
from pathlib import Path
from celery.signals import worker_process_init

def slowly(**_signal):
    time.sleep(6)
    Path(sys.argv[1], f"started-{os.getpid()}").touch()

worker_process_init.connect(slowly, weak=False)
from watchstep_services.cli.main import main
main(["worker", "--processes", "1"])
"""
"""A worker whose process starts slowly, as on a busy machine."""


@pytest.mark.release
def test_the_successor_of_a_killed_process_may_start_slowly(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def started() -> list[int]:
        return [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("started-*")]

    with program_of_worker(tmp_path, SLOW, str(tmp_path)) as running:
        eventually(lambda: started() and " ready." in log.read_text(), 120, log.read_text)
        os.kill(started()[0], signal.SIGKILL)
        eventually(lambda: len(started()) == 2, 60, log.read_text)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0, log.read_text()


WAITING = """
import os
from watchstep_services.cli import worker_restarts

def fail(_life):
    raise ValueError("the database is away")

os.environ[worker_restarts._RESTARTS] = "9"
worker_restarts.run_with_restarts(fail)
"""


def test_a_signal_ends_a_worker_that_waits_for_its_restart(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        running = subprocess.Popen([sys.executable, "-c", WAITING], stdout=output, stderr=output)
    eventually(lambda: "it starts again in 60 s" in log.read_text(), 60, log.read_text)
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 0, log.read_text()
    assert "the database is away" in log.read_text()


def test_a_worker_that_never_was_ready_ends_by_its_error() -> None:
    def fail(_life: WorkerLife) -> None:
        raise SystemExit(1)

    with pytest.raises(SystemExit, match="1"):
        run_with_restarts(fail)


def test_delays_double_up_to_a_minute() -> None:
    assert [delay_before(restarts) for restarts in (0, 1, 5, 6, 5000)] == [1, 2, 32, 60, 60]
