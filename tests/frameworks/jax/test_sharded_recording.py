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
from watchstep_rules.signals.series import merge_shards

PROGRAM = Path(__file__).parent / "sharded_training.py"
STEPS = 3
STACKED = {"layers.kernel": 4, "layers.scale": 4}


def run(processes: int, folder: Path) -> list[dict[str, Any]]:
    """Run the program; returns the report of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "WORLD_SIZE": str(processes),
        "WATCHSTEP_ATTEMPT": "a1",
    }
    jobs = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(processes), address, str(folder)],
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


def test_four_devices_get_no_added_communication(tmp_path: Path) -> None:
    """Updates that the step measures itself exchange one number, whether NaN or infinity was found."""
    (report,) = run(1, tmp_path)
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


def test_rows_of_two_processes_merge_to_those_of_the_whole(tmp_path: Path) -> None:
    reports = run(2, tmp_path)
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
