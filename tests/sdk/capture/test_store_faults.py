"""A store that fails never fails, blocks or changes training; what comes late is written when the store is back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sdk.faulty_s3 import Fault, FaultyS3
from tests.sdk.training import Training
from watchstep import Bounds, CaptureConfig, Hook
from watchstep.layout import SegmentKey
from watchstep.segment import decode

STEPS = 20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    with FaultyS3().serving() as serving:
        monkeypatch.setenv("AWS_ENDPOINT_URL", serving.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield serving


def hook_on(bounds: Bounds) -> Hook:
    return Hook("s3://bucket/runs", run="r", config=CaptureConfig(bounds=bounds))


def written_steps(server: FaultyS3) -> list[int]:
    steps: list[int] = []
    for path, data in sorted(server.objects.items()):
        if "/stats/" in path:
            SegmentKey.parse(path.split("/default/r/")[1])
            steps.extend(sorted(set(decode(data, path).step.tolist())))
    return steps


@pytest.mark.parametrize("fault", ["error", "denied", "reset", "stall"])
def test_a_store_that_never_works(server: FaultyS3, fault: Fault) -> None:
    server.fault = fault
    hook, training = hook_on(Bounds(close_seconds=1.0)), Training()
    hook.watch(training.model, training.optimizer)
    losses = training.run(STEPS)
    assert server.met.wait(30)
    hook.close()
    assert losses == Training().run(STEPS)
    assert hook.health["counts"]["unwritten_objects"] > 0
    assert not server.objects


@pytest.mark.parametrize("fault", ["error", "reset"])
def test_a_store_that_comes_back(server: FaultyS3, fault: Fault) -> None:
    server.fault = fault
    hook, training = hook_on(Bounds(close_seconds=30.0)), Training()
    hook.watch(training.model, training.optimizer)
    losses = training.run(STEPS)
    assert server.met.wait(30)
    server.fault = "none"
    hook.close()
    assert losses == Training().run(STEPS)
    assert written_steps(server) == list(range(STEPS))
    assert "unwritten_objects" not in hook.health["counts"]


def test_memory_is_bounded_and_what_is_dropped_is_counted(server: FaultyS3) -> None:
    server.fault = "error"
    hook = hook_on(Bounds(queue_bytes=40_000, backlog_bytes=1, close_seconds=0.5))
    training = Training()
    hook.watch(training.model, training.optimizer)
    training.run(200)
    hook.close()
    counts = hook.health["counts"]
    assert counts["dropped_steps"] > 0
    assert counts["dropped_rows"] >= counts["dropped_steps"]
