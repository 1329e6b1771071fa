"""Whatever a store does, training continues unchanged and without delay, and every row is written, spilled or counted."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sdk.faults.accounts import (
    LONGEST_STEP,
    STEPS,
    accounted,
    on_server,
    plain_losses,
    rows_of,
    spilled,
    train,
)
from tests.sdk.store.faulty_s3 import Fault, FaultyS3
from tests.sdk.training import EVERY_STEP
from watchstep import Bounds, Hook
from watchstep.capture.upload.uploader import spill_folders, sync

FAULTS: list[Fault] = ["error", "unavailable", "denied", "reset", "truncate", "stall"]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Rows of the training on a store that works."""
    return rows_of(tmp_path_factory.mktemp("whole"))


def hook_with(bounds: Bounds) -> Hook:
    return Hook(config=replace(EVERY_STEP, bounds=bounds))


def upload_rest(root: Path) -> None:
    for folder in spill_folders(root):
        done = sync(folder)
        assert (done.left, done.why) == (0, "")
    assert not list(root.iterdir())


@pytest.mark.parametrize("begins", [0, STEPS // 2], ids=["from the first moment", "in the middle"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails(
    server: FaultyS3, whole: int, spill_root: Path, fault: Fault, begins: int
) -> None:
    hook = hook_with(Bounds(close_seconds=0.5, flush_seconds=0.01 if begins else Bounds().flush_seconds))
    if not begins:
        server.fault = fault

    def fail_once_something_is_written(step: int) -> None:
        if step == begins > 0:
            while not hook.health["counts"].get("objects"):
                server.met.wait(0.01)
            server.fault = fault

    watched = train(hook, each=fail_once_something_is_written)
    assert server.met.wait(30)
    hook.close()
    assert watched.losses == plain_losses()
    assert watched.longest < LONGEST_STEP
    assert accounted(hook.health) == whole
    assert on_server(server).rows == hook.health["counts"].get("rows", 0) < whole
    if not begins:
        assert not server.objects
        assert hook.health["counts"]["spilled_rows"] == whole
        assert str(spill_root) in hook.health["notes"]["spill"]
    server.fault = "none"
    server.released.set()
    upload_rest(spill_root)
    found = on_server(server)
    assert (found.rows, found.steps) == (whole, list(range(STEPS)))
    assert found.seqs == list(range(found.ends[0].segments))
    assert [(end.state, end.writer) for end in found.ends] == [("completed", "w0")]


@pytest.mark.parametrize("fault", ["error", "reset", "truncate"])
def test_a_store_that_returns(server: FaultyS3, whole: int, spill_root: Path, fault: Fault) -> None:
    server.fault = fault
    hook = hook_with(Bounds(flush_seconds=0.01, backlog_bytes=1, close_seconds=60.0))
    watched = train(hook)
    assert server.met.wait(30)
    while not spilled(spill_root):
        hook._ending.wake()
    server.fault = "none"
    hook.close()
    assert watched.losses == plain_losses()
    found = on_server(server)
    assert (found.rows, found.steps) == (whole, list(range(STEPS)))
    assert found.seqs == list(range(found.ends[0].segments))
    assert not list(spill_root.iterdir())
    assert accounted(hook.health) == hook.health["counts"]["rows"] == whole


def test_a_store_that_refuses_connections_and_then_does_not(
    mute_server: FaultyS3, whole: int, spill_root: Path
) -> None:
    hook = hook_with(Bounds(close_seconds=60.0))
    watched = train(hook)
    while not hook.health["faults"].get("store"):
        hook._ending.wake()
    mute_server.listen()
    hook.close()
    assert watched.losses == plain_losses()
    assert on_server(mute_server).rows == whole
    assert not list(spill_root.iterdir())


def test_an_attempt_whose_claim_got_no_answer_is_claimed_once(
    server: FaultyS3, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")
    server.fault = "lost_answer"
    hook = hook_with(Bounds(flush_seconds=0.01, close_seconds=60.0))
    train(hook)
    assert server.met.wait(30)
    server.fault = "none"
    hook.close()
    found = on_server(server)
    assert (found.attempts, found.rows) == (["a1"], whole)
    assert found.seqs == list(range(found.ends[0].segments))


def test_memory_and_disk_are_bounded_and_what_is_dropped_is_counted(
    server: FaultyS3, tmp_path: Path, spill_root: Path
) -> None:
    server.fault = "error"
    bounds = Bounds(
        queue_bytes=40_000, backlog_bytes=30_000, spill_bytes=60_000, flush_seconds=0.001, close_seconds=0.5
    )
    hook = hook_with(bounds)
    watched = train(hook, 300)
    hook.close()
    assert watched.losses == plain_losses(300)
    counts = hook.health["counts"]
    assert accounted(hook.health) == rows_of(tmp_path, 300)
    assert counts["dropped_rows"] > 0
    files = spilled(spill_root)
    sizes = [file.stat().st_size for file in files if file.name != "end.json"]
    assert 0 < sum(sizes) <= bounds.spill_bytes
    assert counts["most_backlog_bytes"] <= bounds.backlog_bytes + 2 * max(sizes)
    server.fault = "none"
    upload_rest(spill_root)
    found = on_server(server)
    assert found.rows == counts["spilled_rows"]
    assert found.seqs == list(range(found.ends[0].segments))
    assert found.ends[0].health["counts"]["dropped_rows"] == counts["dropped_rows"]


def test_without_a_spill_folder_the_rest_is_counted(server: FaultyS3, whole: int, spill_root: Path) -> None:
    server.fault = "denied"
    hook = hook_with(Bounds(spill_bytes=0, close_seconds=0.5))
    train(hook)
    hook.close()
    assert hook.health["counts"]["dropped_rows"] == accounted(hook.health) == whole
    assert not list(spill_root.iterdir())


@pytest.mark.parametrize("only", ["run.json", ".arrow"])
def test_a_closed_hook_writes_nothing_more_when_the_store_answers_again(
    server: FaultyS3, spill_root: Path, only: str
) -> None:
    server.fault, server.only = "late_answer", only
    before = set(threading.enumerate())
    hook = hook_with(Bounds(close_seconds=0.1))
    train(hook)
    assert server.met.wait(30)
    hook.checkpoint_saved("checkpoint", 0)
    hook.close()
    counted = dict(hook.health["counts"])
    there = dict(server.objects)
    server.released.set()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("watchstep"):
            thread.join(30)
            assert not thread.is_alive()
    assert server.objects == there
    assert hook.health["counts"] == counted
    upload_rest(spill_root)
