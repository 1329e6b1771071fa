"""The audit and the proxy of the crash benchmark."""

from __future__ import annotations

import gc
import socket
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from benchmarks.crash import audit
from benchmarks.crash.proxy import Proxy
from tests.services.driving import Driven, make_service
from tests.services.postgres import running_postgres
from tests.services.recording import Recording, nan_from
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig, WebhookAction
from watchstep_services.db.engine import open_database
from watchstep_services.db.schema import upgrade

# Audit


@pytest.mark.ci
def test_what_an_evaluation_and_a_dispatch_write_is_seen_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PGAPPNAME", "pid-7")
    with running_postgres() as server, server.new_database() as url:
        database = open_database(url)
        upgrade(database)
        audit.install(database.engine)
        nobody = WebhookAction(url="https://receiver.invalid/hook")
        rules = [RuleConfig(rule="non_finite_values", actions=(nobody,))]
        driven = Driven(make_service(database, Store.open(tmp_path / "store", create=True), rules))
        recording = Recording(driven.service.stores.open(driven.service.settings.store)).begin()
        run_id = driven.register()
        key = recording.write(0, 0, 7, nan_from(5))
        driven.announce(run_id, key)
        start = audit.clock(database.engine)

        driven.settle(run_id)
        (action,) = driven.actions(run_id)
        evaluated = Counter(audit.written_by(database.engine, {"pid": 7, "run_id": run_id}, start))
        assert evaluated.keys() >= {
            "UPDATE runs", "INSERT ticks", "UPDATE segments", "INSERT alerts", "INSERT alert_instances",
            "INSERT findings", "INSERT rule_states", "INSERT actions",
            "INSERT events io.watchstep.alert.firing",
        }  # fmt: skip
        assert evaluated["INSERT actions"] == 1

        driven.with_settings(max_tries=1).finish(action.id)
        of_action = audit.written_by(database.engine, {"pid": 7, "action_id": action.id}, start)
        assert {"INSERT actions", "UPDATE actions", "INSERT action_tries"} == set(of_action)
        assert Counter(audit.written_by(database.engine, {"pid": 7, "run_id": run_id}, start)) == evaluated
        assert audit.written_by(database.engine, {"pid": 8, "run_id": run_id}, start) == []
        database.close()


# Proxy


_PATIENCE = 60.0


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that says what it hears."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def say(held: socket.socket) -> None:
        with held, suppress(OSError):
            while data := held.recv(1 << 16):
                held.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                held, _ = listener.accept()
                threads.append(threading.Thread(target=say, args=(held,)))
                threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    accepting.join(_PATIENCE)
    for thread in threads:
        thread.join(_PATIENCE)


@pytest.fixture
def proxy(echo: int) -> Iterator[Proxy]:
    proxy = Proxy(echo)
    proxy.start()
    yield proxy
    proxy.close()


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), _PATIENCE)


def test_what_is_said_arrives_and_so_does_the_answer(proxy: Proxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"hello")
        assert client.recv(5, socket.MSG_WAITALL) == b"hello"


def test_a_cut_resets_all_that_are_connected(proxy: Proxy) -> None:
    with connect(proxy) as first, connect(proxy) as second:
        for client in (first, second):
            client.sendall(b"hello")
            assert client.recv(5, socket.MSG_WAITALL) == b"hello"
        assert proxy.cut() == 2
        for client in (first, second):
            with pytest.raises(ConnectionResetError):
                client.recv(1)


def test_a_commit_is_heard_and_its_answer_is_not(proxy: Proxy) -> None:
    with connect(proxy) as client:
        proxy.swallow_a_commit()
        client.sendall(b"BEGIN")
        assert client.recv(5, socket.MSG_WAITALL) == b"BEGIN"
        client.sendall(b"COMMIT")
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        assert proxy.swallowed == 1


def test_no_socket_is_left_open(echo: int) -> None:
    gone = socket.create_server(("127.0.0.1", 0))
    targets = (echo, gone.getsockname()[1])
    gone.close()
    with ExitStack() as stack:
        for target in targets:
            proxy = Proxy(target)
            proxy.start()
            clients = [stack.enter_context(connect(proxy)) for _ in range(8)]
            clients[0].sendall(b"hello")
            clients[1].setblocking(False)
            with suppress(BlockingIOError, OSError):  # more than anybody reads
                while True:
                    clients[1].send(b"x" * (1 << 16))
            clients[2].close()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                proxy.close()  # while some are only being connected
                del proxy
                gc.collect()
            assert [str(warning.message) for warning in seen] == []
