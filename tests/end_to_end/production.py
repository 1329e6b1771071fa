"""Production as docker-compose runs it, for tests: API, Celery worker and beat as processes, PostgreSQL, Redis, S3."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.conftest import S3
from tests.infra.compose import command_of, health_of, search_path
from tests.services.core.collector import Collector
from tests.services.jobs import eventually
from tests.services.postgres import Postgres
from tests.services.recording import PROJECT
from tests.services.redis import Broker, free_port
from watchstep.capture.service.client import ServiceClient
from watchstep.platform.transport import ServiceAddress
from watchstep_services.auth import create_token
from watchstep_services.db.engine import open_database
from watchstep_services.db.schema import upgrade

CLIENT = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
RUN = f"/v1/projects/{PROJECT}/runs/run-1"


@dataclass(frozen=True)
class Production:
    """Where production runs, and how to start and stop its parts."""

    environment: dict[str, str]
    folder: Path
    url: str
    operator: str
    recorder: str
    broker: Broker
    collector: Collector
    worker_figures: str

    @contextmanager
    def process(self, name: str, *command: str, figures: str = "") -> Iterator[subprocess.Popen[bytes]]:
        """One part as a process of its own; it must end by SIGTERM."""
        environment = {**self.environment}
        if figures:
            environment["WATCHSTEP_METRICS_PORT"] = str(urlsplit(figures).port)
        with (self.folder / f"{name}.log").open("ab") as log:
            running = subprocess.Popen(
                command, env=environment, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            yield running
        finally:
            running.send_signal(signal.SIGTERM)
            try:
                running.wait(60)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
                raise
            sys.stdout.write((self.folder / f"{name}.log").read_text())

    @contextmanager
    def api(self) -> Iterator[None]:
        """The API, once it is ready."""
        here = ["--host", "127.0.0.1", "--port", self.port]  # the last word of each counts
        with self.process("api", *command_of("api"), *here) as running:
            eventually(lambda: self.is_ready() or running.poll() is not None, 120)
            assert running.poll() is None
            yield

    @contextmanager
    def workers(self) -> Iterator[None]:
        """A Celery worker with two processes, and beat."""
        with (
            self.process("worker", *command_of("worker"), figures=self.worker_figures),
            self.process("scheduler", *command_of("scheduler")),
        ):
            yield

    def is_healthy(self, name: str) -> bool:
        """What docker-compose would say of a part."""
        command = [word.replace(":8642/", f":{self.port}/") for word in health_of(name)]
        environment = {**self.environment, "HOSTNAME": socket.gethostname()}
        return not subprocess.run(command, env=environment, cwd=self.folder, check=False).returncode

    @property
    def port(self) -> str:
        return self.url.rpartition(":")[2]

    def is_ready(self) -> bool:
        try:
            return CLIENT.get(f"{self.url}/readyz").is_success
        except httpx.TransportError:
            return False

    def get(self, path: str) -> Any:
        answer = CLIENT.get(self.url + path, headers={"authorization": f"Bearer {self.operator}"})
        assert answer.is_success, answer.text
        return answer.json()

    def event_types(self) -> list[str]:
        events = self.get(f"{RUN}/events")["events"]
        return [event["type"].removeprefix("io.watchstep.") for event in events]

    def client(self, token: str) -> ServiceClient:
        return ServiceClient(ServiceAddress.checked(self.url, token), PROJECT)


@contextmanager
def producing(
    s3: S3, postgres: Postgres, broker: Broker, collector: Collector, folder: Path
) -> Iterator[Production]:
    """Production with nothing in it, none of whose parts runs yet."""
    s3.make_bucket("runs")
    broker.client.flushall()
    port = free_port()
    with postgres.new_database() as database_url, ExitStack() as stack:
        database = open_database(database_url)
        stack.callback(database.close)
        upgrade(database)
        environment = {
            **os.environ,
            "PATH": search_path(),
            "WATCHSTEP_STORE": "s3://runs/some/prefix",
            "WATCHSTEP_DATABASE_URL": database_url,
            "WATCHSTEP_BROKER_URL": broker.url,
            "WATCHSTEP_PUBLIC_URL": f"http://127.0.0.1:{port}",
            "WATCHSTEP_SWEEP_SECONDS": "0.5",
            "WATCHSTEP_LISTING_SECONDS": "0.5",
            "WATCHSTEP_GRACE_SECONDS": "0.5",
            "WATCHSTEP_LOCAL_JOBS": "true",
            "WATCHSTEP_ALLOWED_ADDRESSES": "loopback",
            "WATCHSTEP_LOG": "json",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        }
        yield Production(
            environment,
            folder,
            f"http://127.0.0.1:{port}",
            create_token(database, "operator"),
            create_token(database, "recorder", PROJECT),
            broker,
            collector,
            f"http://127.0.0.1:{free_port()}/metrics",
        )
