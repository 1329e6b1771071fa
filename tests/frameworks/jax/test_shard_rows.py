"""Rows of shards merge to those of the whole arrays, over devices and processes, without communication."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from tests.frameworks.jax.rows import assert_same_rows, native_rows  # noqa: E402
from watchstep.format.statistics import Histograms, StatisticsBatch, merge_rows  # noqa: E402

PROGRAM = Path(__file__).parent / "sharded_program.py"


def run(processes: int, folder: Path) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    files = [folder / f"{rank}.json" for rank in range(processes)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(processes), address, str(file)],
            env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for rank, file in enumerate(files)
    ]
    try:
        assert [job.wait(120) for job in jobs] == [0] * processes
    finally:
        for job in jobs:
            job.kill()
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def batch_of(data: dict[str, Any]) -> StatisticsBatch:
    offsets, bins, counts = data["histogram"]
    histogram = Histograms(np.array(offsets, np.int64), np.array(bins, np.int16), np.array(counts, np.int64))
    columns = {name: np.array(column) for name, column in data["columns"].items()}
    return StatisticsBatch(**columns, histogram=histogram)


def whole_arrays() -> list[Any]:
    import ml_dtypes

    generator = np.random.default_rng(0)
    arrays = [
        generator.standard_normal(shape).astype(np.float32)
        for shape in ((8, 6), (3, 4), (5,), (4, 3, 2), (8,))
    ]
    arrays[1][0, 0] = np.inf
    arrays[0] = arrays[0].astype(ml_dtypes.bfloat16)
    doubled = [(array * 2).astype(array.dtype) for array in arrays]
    return [*doubled[:3], *doubled[3], doubled[4]]


@pytest.mark.parametrize("processes", [1, 2])
def test_rows_of_shards_merge_to_the_whole(processes: int, tmp_path: Path) -> None:
    reports = run(processes, tmp_path)
    for report in reports:
        plain, measured = report["collectives"]
        assert measured == plain
    rows = np.concatenate([np.array(report["rows"], np.intp) for report in reports])
    batch = StatisticsBatch.concatenate([batch_of(report) for report in reports])
    assert_same_rows(merge_rows(batch, rows, 8), native_rows(whole_arrays()))
    places = sorted(
        (row, *place)
        for report in reports
        for row, place in zip(report["rows"], report["placements"], strict=True)
    )
    shards = [4, 2, 1, 1, 1, 1, 1, 4]
    assert places == [(row, shard, count, 0) for row, count in enumerate(shards) for shard in range(count)]
    flags = [flag for report in reports for flag in report["flags"]]
    assert sorted(flags) == [False, False, True, True]
