"""What an announcement costs the API by its own route, and by an ordinary route of FastAPI.

Requests reach the application in this process without a socket, so that CPU is its own. Both routes call the same endpoint of one
service on PostgreSQL, in alternate rounds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, FastAPI
from starlette.types import Message

from benchmarks.report import Figure, Report
from tests.services.postgres import running_postgres
from watchstep.format import documents, layout
from watchstep.format.documents import AttemptDocument, RunDocument
from watchstep.store.store import Store
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_services.api import app as application
from watchstep_services.api.routes import announcements
from watchstep_services.api.schemas.models import AnnouncementResponse
from watchstep_services.auth import create_token
from watchstep_services.core.settings import load_settings
from watchstep_services.db.engine import open_database
from watchstep_services.db.schema import upgrade
from watchstep_services.runs.registration import register
from watchstep_services.service.context import Service

_PATH = "/v1/projects/sample/runs/r/announcements"
_REQUESTS = 150


@contextmanager
def _service() -> Iterator[tuple[Service, str]]:
    """A service with one registered run, and a recorder's token."""
    with (
        running_postgres() as postgres,
        postgres.new_database() as url,
        tempfile.TemporaryDirectory() as folder,
    ):
        database = open_database(url)
        upgrade(database)
        root = Store.open(folder, create=True)
        service = Service(load_settings(store=root.location), database, "http://service.test", DEFAULT_RULES)
        store = root.child(layout.run_prefix("sample", "r"))
        store.create(layout.RUN_DOCUMENT, documents.encode(RunDocument("sample", "r", 1)))
        store.create(layout.attempt_document("a1"), documents.encode(AttemptDocument("a1", 1, 1, "raise")))
        register(service, "sample", "r", (), "recorder")
        try:
            yield service, create_token(database, "recorder", "sample")
        finally:
            database.close()


def _ordinary(service: Service) -> FastAPI:
    """The application with an ordinary route for announcements."""
    router = APIRouter(prefix=announcements.router.prefix, tags=["recording"])
    router.post("", summary="Announce a segment", response_model=AnnouncementResponse)(announcements.announce)
    shipped = application.ROUTERS
    application.ROUTERS = (router, *shipped[1:])
    try:
        return application.create_app(service)
    finally:
        application.ROUTERS = shipped


async def _announce(app: FastAPI, token: str, seq: int) -> None:
    segment = {"node": "n", "writer": "w0", "seq": seq, "first": seq * 4, "last": seq * 4 + 3}
    content = {"attempt": "a1", "segments": [segment]}
    body = json.dumps(content).encode()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": _PATH, "raw_path": _PATH.encode(), "query_string": b"", "root_path": "",
        "headers": [
            (b"host", b"service.test"), (b"authorization", f"Bearer {token}".encode()),
            (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
        ],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    answers: list[Message] = []

    async def receive() -> Message:
        return requests.pop() if requests else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        answers.append(message)

    await app(scope, receive, send)
    if answers[0]["status"] != 200:
        raise RuntimeError(f"an announcement was answered with {answers}")


async def _measure(apps: dict[str, FastAPI], token: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of CPU of one announcement, by round; the first round warms up."""
    spent: dict[str, list[float]] = {name: [] for name in apps}
    order, seq = list(apps), 0
    for number in range(rounds + 1):
        for name in order:
            since = time.process_time()
            for _ in range(_REQUESTS):
                await _announce(apps[name], token, seq)
                seq += 1
            if number:
                spent[name].append((time.process_time() - since) / _REQUESTS * 1000)
        order.reverse()
    return spent


def add_announcement_figures(report: Report, *, quick: bool) -> None:
    """By both routes."""
    rounds = 4 if quick else 20
    with _service() as (service, token):
        apps = {"its own route": application.create_app(service), "an ordinary route": _ordinary(service)}
        spent = asyncio.run(_measure(apps, token, rounds))
    for name, values in spent.items():
        low, _, high = statistics.quantiles(values, n=4)
        note = f"least {min(values):.2f}, quartiles {low:.2f} to {high:.2f}; without HTTP; {rounds} rounds of {_REQUESTS}"
        report.add(f"an announcement by {name}, CPU", Figure(statistics.median(values), "ms", note=note))
