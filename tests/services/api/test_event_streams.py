"""Event streams over real sockets, with several servers on one database."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.services.api.serving import serving
from tests.services.driving import Driven
from watchstep_services.api import streaming
from watchstep_services.api.streaming import Streams
from watchstep_services.auth import create_token
from watchstep_services.core.events import make_event
from watchstep_services.db.engine import open_database
from watchstep_services.db.records import add_event

PROJECT = "/v1/projects/vision"
WAIT = 60.0


def publish(driven: Driven, run_id: int, name: str, kind: Any = "io.watchstep.run.started") -> None:
    with driven.service.database.write() as session:
        add_event(session, run_id, make_event(kind, "http://s", ("vision", "r"), 1, {"name": name}), 1)


@contextmanager
def following(url: str, token: str, after: int | None = None) -> Iterator[Iterator[tuple[int, str, str]]]:
    """(id, type, name) of each event as it comes; the first is of the beginning."""
    headers = {"authorization": f"Bearer {token}"} | ({} if after is None else {"last-event-id": str(after)})
    with httpx.stream("GET", url, headers=headers, timeout=WAIT) as answer:
        assert answer.status_code == 200, answer.read()
        yield parsed(answer)


def parsed(answer: httpx.Response) -> Iterator[tuple[int, str, str]]:
    import json

    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
            continue
        if fields:
            data = json.loads(fields["data"])["data"]["name"] if "data" in fields else ""
            yield int(fields["id"]), fields.get("event", ""), data
        fields = {}


def take(events: Iterator[tuple[int, str, str]], count: int) -> list[tuple[int, str, str]]:
    return [next(events) for _ in range(count)]


@pytest.fixture
def token(driven: Driven) -> str:
    return create_token(driven.service.database, "viewer", "vision")


def test_a_stream_resumes_without_gaps_or_duplicates(driven: Driven, token: str) -> None:
    runs = [driven.register(f"run-{n}") for n in range(3)]
    with serving(driven.service) as url:
        seen: list[str] = []
        writers = [threading.Thread(target=_many, args=(driven, run_id, n)) for n, run_id in enumerate(runs)]
        with following(f"{url}{PROJECT}/events/stream", token) as events:
            ((last, _, _),) = take(events, 1)
            for writer in writers:
                writer.start()
            while len(seen) < 60:  # cut off, again and again
                last = _some(url, token, last, seen)
        for writer in writers:
            writer.join(WAIT)
        listed = httpx.get(f"{url}{PROJECT}/events", headers={"authorization": f"Bearer {token}"}).json()
    assert seen == [event["data"]["name"] for event in listed["events"]]
    assert len(set(seen)) == 60


def _many(driven: Driven, run_id: int, of: int) -> None:
    for n in range(20):
        publish(driven, run_id, f"{of}-{n}")


def _some(url: str, token: str, last: int, seen: list[str]) -> int:
    with following(f"{url}{PROJECT}/events/stream", token, last) as events:
        take(events, 1)
        for number, _, name in take(events, min(7, 60 - len(seen))):
            assert number > last
            last = number
            seen.append(name)
    return last


def test_every_process_streams_the_events_of_all_processes(driven_sqlite: Driven) -> None:
    driven = driven_sqlite
    token = create_token(driven.service.database, "viewer", "vision")
    run_id = driven.register()
    other = open_database(str(driven.service.database.engine.url))
    try:
        second = Driven(driven.service.__class__(**{**vars(driven.service), "database": other}))
        with serving(driven.service) as first_url, serving(second.service) as second_url:
            place = f"{PROJECT}/runs/run-1/events/stream"
            with following(first_url + place, token) as a, following(second_url + place, token, 0) as b:
                take(a, 1), take(b, 1)
                publish(driven, run_id, "first")
                publish(second, run_id, "second")
                assert [name for _, _, name in take(a, 2)] == ["first", "second"]
                assert [name for _, _, name in take(b, 2)] == ["first", "second"]
    finally:
        other.close()


def test_a_stream_contains_the_selected_events_only(driven_sqlite: Driven) -> None:
    driven = driven_sqlite
    token = create_token(driven.service.database, "viewer", "vision")
    mine, other = driven.register("run-1"), driven.register("run-2")
    for run_id in (other, mine):
        publish(driven, run_id, "started")
        publish(driven, run_id, "ended", "io.watchstep.run.ended")
    publish(driven, mine, "last")
    with serving(driven.service) as url:
        with following(f"{url}{PROJECT}/runs/run-1/events/stream", token, 0) as events:
            assert [name for _, _, name in take(events, 4)] == ["", "started", "ended", "last"]
        with following(f"{url}{PROJECT}/events/stream?type=io.watchstep.run.ended", token, 0) as events:
            assert [kind for _, kind, _ in take(events, 3)] == [
                "",
                "io.watchstep.run.ended",
                "io.watchstep.run.ended",
            ]
            for n in range(300):  # more than a process holds
                publish(driven, other, f"{n}", "io.watchstep.run.ended")
            assert [name for _, _, name in take(events, 300)] == [str(n) for n in range(300)]


def test_a_stream_ends_when_its_token_is_revoked(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy import delete

    from watchstep_services.db.models import Token

    monkeypatch.setattr(streaming, "HEARTBEAT_SECONDS", 0.05)
    driven = driven_sqlite
    driven.register()
    token = create_token(driven.service.database, "viewer", "vision")
    with serving(driven.service) as url, following(f"{url}{PROJECT}/events/stream", token) as events:
        take(events, 3)  # heartbeats
        with driven.service.database.write() as session:
            session.execute(delete(Token))
        list(events)  # ends


def test_a_client_that_reads_nothing_is_disconnected(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SEND_SECONDS", 0.2)
    driven = driven_sqlite
    run_id = driven.register()
    token = create_token(driven.service.database, "viewer", "vision")
    for n in range(400):
        publish(driven, run_id, f"{n}" + 20_000 * "x")
    dropped = threading.Event()
    real = Streams.exit

    def exited(self: Any, project: str, token: str) -> None:
        real(self, project, token)
        dropped.set()

    monkeypatch.setattr(Streams, "exit", exited)
    with serving(driven.service) as url:
        parts = urlsplit(url)
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect((parts.hostname, parts.port))
            head = f"GET {PROJECT}/events/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nLast-Event-ID: 0\r\n\r\n"
            lazy.sendall(head.encode())
            assert dropped.wait(WAIT)
        with following(f"{url}{PROJECT}/events/stream", token, 390) as events:
            assert len(take(events, 5)) == 5


def test_streams_are_limited_and_closed_ones_make_room(driven_sqlite: Driven) -> None:
    driven = driven_sqlite.with_settings(event_streams=1)
    driven.register()
    token = create_token(driven.service.database, "viewer", "vision")
    headers = {"authorization": f"Bearer {token}"}
    with serving(driven.service) as url:
        place = f"{url}{PROJECT}/events/stream"
        with following(place, token) as events:
            take(events, 1)
            assert httpx.get(place, headers=headers).status_code == 429
        while True:  # until the server has noticed
            with httpx.stream("GET", place, headers=headers, timeout=WAIT) as answer:
                if answer.status_code == 200:
                    break
        assert httpx.get(f"{place}?x", headers={**headers, "last-event-id": "x"}).status_code == 422


@pytest.mark.parametrize("limit", ["token_event_streams", "project_event_streams"])
def test_one_token_or_project_cannot_take_the_streams_of_others(driven_sqlite: Driven, limit: str) -> None:
    driven = driven_sqlite.with_settings(**{limit: 2})
    database = driven.service.database
    token, colleague = (create_token(database, "viewer", "vision") for _ in range(2))
    other = create_token(database, "viewer", "audio")
    with serving(driven.service) as url, ExitStack() as stack:
        place = f"{url}{PROJECT}/events/stream"
        streams = []  # a stream ends with its iterator

        def follow(place: str, token: str) -> None:
            streams.append(stack.enter_context(following(place, token)))
            take(streams[-1], 1)

        for _ in range(2):
            follow(place, token)
        for _ in range(3):  # what is refused takes no place
            refused = httpx.get(place, headers={"authorization": f"Bearer {token}"})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        if limit == "token_event_streams":
            follow(place, colleague)
        else:
            assert httpx.get(place, headers={"authorization": f"Bearer {colleague}"}).status_code == 429
        follow(f"{url}/v1/projects/audio/events/stream", other)


def test_the_server_ends_while_clients_follow(driven_sqlite: Driven) -> None:
    driven = driven_sqlite
    driven.register()
    token = create_token(driven.service.database, "viewer", "vision")
    ended = threading.Event()
    began = threading.Event()

    def follow(url: str) -> None:
        with following(f"{url}{PROJECT}/events/stream", token) as events:
            take(events, 1)
            began.set()
            list(events)
        ended.set()

    with serving(driven.service) as url:
        threading.Thread(target=follow, args=(url,), daemon=True).start()
        assert began.wait(WAIT)
    assert ended.wait(WAIT)


def test_a_position_beyond_the_newest_event_is_the_current_one(driven: Driven, token: str) -> None:
    run_id = driven.register()
    publish(driven, run_id, "before")
    with (
        serving(driven.service) as url,
        following(f"{url}{PROJECT}/events/stream", token, 2**62 - 1) as events,
    ):
        ((place, _, _),) = take(events, 1)
        assert place < 2**62 - 1
        publish(driven, run_id, "after")
        ((number, _, name),) = take(events, 1)
    assert (number > place, name) == (True, "after")
