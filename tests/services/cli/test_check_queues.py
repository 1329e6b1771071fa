"""A queue without workers is reported, with a real Redis and a real worker."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from celery import Celery

from tests.services.redis import Broker, running_redis
from watchstep_services.checks import check_queues
from watchstep_services.core.settings import load_settings
from watchstep_services.scheduler.celery_client import QUEUE, URGENT

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_redis() as server:
        yield server


@contextmanager
def worker_of_one_queue(broker: Broker, folder: Path) -> Iterator[None]:
    """A worker that knows of the queue of all alone, as those of an earlier version."""
    words = ["-m", "celery", "--broker", broker.url, "worker", "--pool", "solo", "--queues", QUEUE]
    log = folder / "worker.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, *words, "--loglevel", "ERROR"], cwd=folder, stdout=said, stderr=said
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def found(broker: Broker) -> dict[str, tuple[str, str]]:
    checks = check_queues(load_settings(broker_url=broker.url))
    return {each.what: (each.state, each.detail) for each in checks}


def eventually(broker: Broker, expected: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """What is found once it is that, or after a minute."""
    deadline = time.monotonic() + 60
    while (seen := found(broker)) != expected and time.monotonic() < deadline:
        pass
    return seen


def test_a_queue_without_workers_is_reported(broker: Broker, tmp_path: Path) -> None:
    assert list(check_queues(load_settings(broker_url=""))) == []
    assert found(broker) == {
        f"queue {QUEUE}": ("ok", "empty; no worker responds"),
        f"queue {URGENT}": ("ok", "empty; no worker responds"),
    }
    broker.client.lpush(URGENT, "stop", "stop")
    assert found(broker)[f"queue {URGENT}"] == ("warning", "2 waiting, and no worker responds")
    with worker_of_one_queue(broker, tmp_path):
        expected = {
            f"queue {QUEUE}": ("ok", "0 waiting, 1 worker"),
            f"queue {URGENT}": ("warning", "2 waiting, and no worker consumes the queue"),
        }
        assert eventually(broker, expected) == expected
        broker.client.delete(URGENT)
        with Celery(broker=broker.url) as celery:
            celery.control.add_consumer(URGENT)
        expected[f"queue {URGENT}"] = ("ok", "0 waiting, 1 worker")
        assert eventually(broker, expected) == expected


def test_an_unreachable_broker_is_reported() -> None:
    (seen,) = check_queues(load_settings(broker_url="redis://127.0.0.1:1/0"))
    assert (seen.what, seen.state) == ("queues", "failed")
    assert seen.hint
