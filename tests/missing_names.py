"""Runs of programs without names of a framework, as far as Watchstep can see: in this process, or each in one that is forked after the import."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WITHOUT_WATCHSTEP = "without Watchstep"
COMPLETE = "complete"
WITHOUT_MODULE = "without a module of Watchstep"


def remove(names: Any, key: str) -> None:
    """Let a name be missing in this process."""
    name = names.table[key]
    names.table[key] = dataclasses.replace(name, paths=tuple(f"{path}_removed" for path in name.paths))


def remove_within_test(names: Any, key: str, monkeypatch: Any) -> None:
    """Let a name be missing until the test ends."""
    for attribute, value in (("_values", {}), ("_costs", {}), ("table", dict(names.table))):
        monkeypatch.setattr(names, attribute, value)
    remove(names, key)


def recorded(start: Callable[[Any], Any], program: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the result of a program that is recorded, and what was recorded.

    Args:
        start: starts the recording with a hook.
        program: the program; it receives what ``start`` returned.
    """
    from watchstep import CaptureConfig, Hook, open_run

    store = Path(tempfile.mkdtemp())
    with Hook(store, run="r", config=CaptureConfig(overhead_budget=None)) as hook:
        result = program(start(hook))
    run = open_run(store / "default" / "r")
    return {
        "result": result,
        "faults": hook.health["faults"],
        "notes": hook.health["notes"],
        "tensors": sorted(info.name for info in run.catalogue),
    }


def print_results(keys: Iterable[str], run: Callable[[str], dict[str, Any]]) -> None:
    """Run a program in a forked process for each key, and print what it returns."""
    results = {}
    for key in keys:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                text = json.dumps(run(key))
            except BaseException:  # noqa: BLE001 - whatever the program ends with
                text = json.dumps({"error": traceback.format_exc()})
            with os.fdopen(writing, "w") as stream:
                stream.write(text)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as stream:
            text = stream.read()
        os.waitpid(child, 0)
        results[key] = json.loads(text) if text else {"error": "the process has crashed"}
    print(json.dumps(results))  # noqa: T201 - read by the test


def results_of(module: str) -> dict[str, Any]:
    """Return what a module prints by `print_results`."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def check(results: dict[str, Any], key: str, cost: str) -> set[str]:
    """Check that a program without a name computes what it does without Watchstep, and that health states the cost.

    Returns:
        The names of the recorded tensors.
    """
    result = results[key]
    assert "error" not in result, result.get("error")
    assert result["result"] == results[WITHOUT_WATCHSTEP]["result"]
    assert not result["faults"]
    assert any(note.endswith(cost) for note in result["notes"]), result["notes"]
    return set(result["tensors"])
