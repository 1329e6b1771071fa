"""Segments: whole steps, contiguous numbers, nothing overwritten, an end document with their number, and a backlog of few Python objects."""

from __future__ import annotations

import gc
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.sdk.training import recorded, watched_training
from tests.services.jobs import eventually
from watchstep import Bounds, CaptureConfig, Hook, open_run
from watchstep.capture.steps.record import Group, Record
from watchstep.capture.tensors.snapshots import SnapshotWriter
from watchstep.format.layout import SegmentKey
from watchstep.format.tensors import TensorInfo
from watchstep.kernels.array_kernel import measure_array
from watchstep.kernels.measurement import Completed
from watchstep.store.store import Store


def segments(store: Store, run: str) -> list[SegmentKey]:
    return sorted(SegmentKey.parse(entry.key) for entry in store.child(f"default/{run}").entries("stats/"))


def record(hook: Hook, steps: int) -> None:
    for step in range(steps):
        hook.log(loss=float(step))
        hook.step()


def test_sequence_numbers_are_contiguous_and_steps_whole(tmp_path: Path) -> None:
    config = CaptureConfig(bounds=Bounds(flush_seconds=0.001))
    hook = Hook(tmp_path, run="r", config=config)
    record(hook, 500)
    hook.close()
    keys = segments(Store.open(tmp_path), "r")
    assert [key.seq for key in keys] == list(range(len(keys)))
    assert all(before.last < after.first for before, after in pairwise(keys))
    (end,) = open_run(hook.run_url).ends()
    assert (end.state, end.last_step, end.segments) == ("completed", 499, len(keys))
    assert open_run(hook.run_url).steps() == list(range(500))


def test_a_bad_loss_that_is_logged_does_not_wait_for_the_next_flush(tmp_path: Path) -> None:
    hook = Hook(tmp_path, run="r", config=CaptureConfig(bounds=Bounds(flush_seconds=1000.0)))
    hook.log(loss=float("nan"))
    hook.step()
    hook.log(loss=1.0)
    eventually(lambda: segments(Store.open(tmp_path), "r"), 60)
    assert [key.last for key in segments(Store.open(tmp_path), "r")] == [0]
    hook.close()


def test_a_second_process_of_an_attempt_gets_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")
    for _ in range(3):
        hook = Hook(tmp_path, run="r")
        record(hook, 2)
        hook.close()
    assert open_run(tmp_path / "default" / "r").attempts == ["a1", "a1.2", "a1.3"]


def test_a_rank_that_finds_its_place_taken_moves_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "WATCHSTEP_ATTEMPT": "a1"}.items():
        monkeypatch.setenv(name, value)
    for steps in (3, 2):
        hook = Hook(tmp_path, run="r")
        record(hook, steps)
        hook.close()
    keys = segments(Store.open(tmp_path), "r")
    assert sorted({key.writer.writer.split("-")[0] for key in keys}) == ["w1"]
    assert len({key.writer for key in keys}) == 2
    assert open_run(hook.run_url).damaged == {}


def test_an_exception_is_how_the_run_ended(tmp_path: Path) -> None:
    hook = Hook(tmp_path, run="r")
    with pytest.raises(ZeroDivisionError), hook:
        hook.log(loss=1 / 0)
    (end,) = open_run(hook.run_url).ends()
    assert (end.state, end.reason) == ("failed", "ZeroDivisionError: division by zero")


def test_closing_twice_and_logging_after_it_do_nothing(tmp_path: Path) -> None:
    hook = Hook(tmp_path, run="r")
    record(hook, 1)
    hook.close()
    hook.close()
    hook.log(loss=1.0)
    hook.step()
    assert open_run(hook.run_url).steps() == [0]


def test_the_last_step_is_written_if_an_object_is_finished_while_the_queue_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hook = Hook(tmp_path / "runs", run="r", config=CaptureConfig(bounds=Bounds(flush_seconds=1000.0)))
    record(hook, 2)
    hook.log(loss=2.0)
    is_checked = False

    def settled(_writer: SnapshotWriter) -> bool:
        """Not while the writer takes steps of the queue, but directly afterwards, when it checks whether everything is written."""
        nonlocal is_checked
        is_checked |= sys._getframe(1).f_code.co_name == "_closing_turn"
        return is_checked

    monkeypatch.setattr(SnapshotWriter, "settled", property(settled))
    hook.close()
    run = open_run(hook.run_url)
    assert run.steps() == [0, 1, 2]
    assert [end.state for end in run.ends()] == ["completed"]
    assert "spill" not in hook.health["notes"]


def tracked() -> int:
    """Objects that the collector looks at."""
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.ci
def test_steps_that_wait_for_their_segment_are_arrays(tmp_path: Path) -> None:
    config = CaptureConfig(overhead_budget=None, system=None, bounds=Bounds(flush_seconds=3600))
    hook, training = watched_training(tmp_path, config=config)
    training.run(40)
    before = tracked()
    training.run(400)
    # The writer looks by itself, and nothing wakes it.
    eventually(lambda: hook._session.queue.room == config.bounds.queue_bytes, 60)
    assert tracked() - before < 400 * 20
    assert hook.health["counts"].get("objects", 0) == 0
    run = recorded(hook)
    assert run.steps() == list(range(440))


def test_rows_are_counted_by_what_their_histograms_take() -> None:
    rng = np.random.default_rng(0)
    narrow, wide = (
        measure_array(
            (rng.standard_normal(4096) * 10.0 ** rng.integers(-width, width + 1, 4096)).astype(np.float32)
        )
        for width in (0, 18)
    )
    group = Group.of((TensorInfo("w", ("weights",), "weight"),))
    sizes = [Record(0, "train", 0, 0, group, Completed(row)).bytes for row in (narrow, wide)]
    extra = sum(
        getattr(wide.histogram, name).nbytes - getattr(narrow.histogram, name).nbytes
        for name in ("bins", "counts")
    )
    assert sizes[1] - sizes[0] == extra > 1000


def test_the_bound_limits_what_it_names() -> None:
    parts = {"queue": 64, "backlog": 64, "segment": 136, "snapshots": 256, "samples": 32, "libraries": 128}
    assert CaptureConfig().memory_bound == sum(parts.values()) * 2**20
