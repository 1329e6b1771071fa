"""Recording of programs over several devices and processes: no added communication, and rows that merge to those of the whole arrays."""

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

pytest.importorskip("optax")

from tests.frameworks.jax.rows import assert_same_rows, native_rows
from watchstep import open_run
from watchstep.format.statistics import Histograms, StatisticsBatch, merge_rows
from watchstep_rules.signals.series import merge_shards

STEPS = 3
STACKED = {"layers.kernel": 4, "layers.scale": 4}


def run(program: str, processes: int, folder: Path) -> list[dict[str, Any]]:
    """Run a program in processes that are its ranks; returns the report that each writes to the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "WORLD_SIZE": str(processes),
        "WATCHSTEP_ATTEMPT": "a1",
    }
    script = str(Path(__file__).with_name(program))
    jobs = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(processes), address, str(folder)],
            env=environment | {"RANK": str(rank)},
        )
        for rank in range(processes)
    ]
    try:
        assert [job.wait(120) for job in jobs] == [0] * processes
    finally:
        for job in jobs:
            job.kill()
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]


@pytest.mark.release
def test_four_devices_get_no_added_communication(tmp_path: Path) -> None:
    """Updates that the step measures itself exchange one number, whether NaN or infinity was found."""
    (report,) = run("sharded_training.py", 1, tmp_path)
    for name, recorded in report["recorded"].items():
        function, figures = name.split()
        plain = report["plain"][function]
        assert plain["collectives"]
        assert plain["programs"] == 1
        if figures == "device":
            plain["collectives"]["all-reduce"] += 1
        assert recorded["result"] == plain, name  # losses, programs, and collective operations of each kind
        if figures == "device":
            plain["collectives"]["all-reduce"] -= 1
        assert not recorded["health"]["faults"]
        assert not recorded["health"]["notes"]
        steps = (
            open_run(tmp_path / "store" / "default" / name.replace(" ", "-")).tensor("first.kernel").steps()
        )
        assert steps == list(range(len(plain["losses"])))


@pytest.mark.release
def test_rows_of_two_processes_merge_to_those_of_the_whole(tmp_path: Path) -> None:
    reports = run("sharded_training.py", 2, tmp_path)
    for figures in ("host", "device"):
        first, second = (report[figures] for report in reports)
        assert first["result"] == second["result"]
        for report in (first, second):
            assert not report["health"]["faults"]
            assert not report["health"]["notes"]
        recorded = open_run(tmp_path / "store" / "default" / figures)
        with np.load(tmp_path / f"{figures}.npz") as whole:
            parts = checked_parts(recorded, dict(whole), STACKED if figures == "host" else {})
        assert {count for name, count in parts.items() if name.endswith(".kernel")} == {2}
        assert parts["weight first.bias"] == parts["weight last.bias"] == 1
        for name in ("first.kernel", "first.kernel:gradient"):
            counts = recorded.series(name, "count").column("count").to_pylist()
            assert counts == [6 * 8] * STEPS
        assert recorded.tensor("first.bias").workers == [0]  # its shards on the other process are replicas


def checked_parts(recorded: Any, arrays: dict[str, Any], stacked: dict[str, int]) -> dict[str, int]:
    """Check that the parts of each tensor merge to the rows of the whole arrays. Returns how many there are at each step."""
    parts: dict[str, int] = {}
    for key in (key for key in arrays if key.startswith("0/")):
        _, role, leaf = key.split("/")
        for layer in range(stacked[leaf]) if leaf in stacked else (None,):
            tensor = leaf if layer is None else leaf.replace("layers.", f"layers.{layer}.")
            rows = recorded.tensor(tensor if role == "weight" else f"{tensor}:gradient").rows
            parts[f"{role} {tensor}"] = len(rows) // STEPS
            values = [arrays[f"{step}/{role}/{leaf}"] for step in range(STEPS)]
            merged = merge_shards(rows)
            assert merged.step.tolist() == list(range(STEPS))
            assert_same_rows(
                merged.statistics, native_rows([value if layer is None else value[layer] for value in values])
            )
    return parts


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
    reports = run("sharded_program.py", processes, tmp_path)
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
