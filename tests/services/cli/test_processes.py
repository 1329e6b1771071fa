"""``watchstep api`` with several processes, and the imports of production processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.services.jobs import eventually
from tests.services.redis import free_port
from watchstep_services.auth import create_token
from watchstep_services.db.engine import open_database
from watchstep_services.db.schema import upgrade

ASKED = 'watchstep_http_request_seconds_count{method="GET",route="/healthz",status="2xx"}'


def asked(client: httpx.Client, url: str) -> float:
    """How many requests for ``/healthz`` the figures at an address tell of."""
    text = client.get(f"{url}/metrics").raise_for_status().text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(ASKED))


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
        timeout=60,
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
