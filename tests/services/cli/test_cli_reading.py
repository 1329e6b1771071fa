"""The commands that read a finished run: show, compact, diff, export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sdk.reading.stored import small_run
from tests.services.cli.command_line import run_command
from watchstep.format.documents import AttemptDocument, encode

pytestmark = pytest.mark.ci


@pytest.fixture
def store(tmp_path: Path) -> Path:
    small_run(tmp_path, "a")
    small_run(tmp_path, "b", factor=1.5)
    return tmp_path


def test_compact(store: Path) -> None:
    done = run_command("runs", "compact", "a", "--store", store, "--delete-after", "0")
    assert done.returncode == 0, done.stderr
    assert "generation 1: 3 written, 3 deleted" in done.stdout
    assert "(12 recorded)" in run_command("runs", "show", "a", "--store", store).stdout


def test_diff(store: Path) -> None:
    done = run_command("diff", "a", "b", "--store", store, "--most", "3")
    assert done.returncode == 1, done.stderr
    assert "first difference: step 0, loss" in done.stdout
    same = run_command("diff", "a", "a", "--store", store)
    assert same.returncode == 0
    assert "no difference in 36 rows" in same.stdout


def test_the_seeds_of_a_run(store: Path) -> None:
    seeds = {"seed": 7, "generators": ["python", "torch"], "deterministic": True, "hash_seed": "0"}
    document = AttemptDocument("a", 1, seeds=seeds)
    (store / "default" / "a" / "attempts").mkdir()
    (store / "default" / "a" / "attempts" / "a.json").write_bytes(encode(document))
    shown = run_command("runs", "show", "a", "--store", store).stdout
    assert "seeds     attempt a: 7 (python, torch), deterministic algorithms, PYTHONHASHSEED 0" in shown
    assert json.loads(run_command("runs", "show", "a", "--store", store, "--json").stdout)["seeds"] == {
        "a": seeds
    }
    assert "seeds   " not in run_command("runs", "show", "b", "--store", store).stdout


def test_export(store: Path) -> None:
    done = run_command("export", "--tensorboard", store / "events", "a", "--store", store)
    assert done.returncode == 0, done.stderr
    assert list((store / "events").rglob("events.out.tfevents.*"))
    again = run_command("export", "--tensorboard", store / "events", "a", "--store", store)
    assert again.returncode == 2
    assert "hint:" in again.stderr
