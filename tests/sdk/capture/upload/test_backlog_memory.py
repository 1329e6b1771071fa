"""The backlog uses few Python objects, so that the garbage collector rarely traverses it."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import torch

from tests.sdk.training import Training, recorded
from watchstep import Bounds, CaptureConfig, Hook
from watchstep.capture.steps.record import Group, Record
from watchstep.format.tensors import TensorInfo
from watchstep.kernels.array_kernel import measure_array
from watchstep.kernels.measurement import Completed

_SECONDS = 60.0


def tracked() -> int:
    """Objects that the collector looks at."""
    gc.collect()
    return len(gc.get_objects())


def test_steps_that_wait_for_their_segment_are_arrays(tmp_path: Path) -> None:
    config = CaptureConfig(overhead_budget=None, system=None, bounds=Bounds(flush_seconds=3600))
    hook, training = Hook(tmp_path, config=config), Training()
    hook.watch(training.model, training.optimizer)
    training.run(40)
    before = tracked()
    training.run(400)
    deadline = time.monotonic() + _SECONDS
    while hook._session.queue.room < config.bounds.queue_bytes and time.monotonic() < deadline:
        torch.ones(1)  # the writer looks by itself, and nothing wakes it
    assert hook._session.queue.room == config.bounds.queue_bytes
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
