"""``watchstep runs show`` states why nothing was recorded of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.services.cli.command_line import run_command
from watchstep import Hook
from watchstep.command import main as watchstep_main
from watchstep.format import documents
from watchstep.format.layout import RUN_DOCUMENT, attempt_document, end_document
from watchstep.store.store import Store


def shown(store: Path, *options: str) -> str:
    done = run_command("runs", "show", "default/night", "--store", store, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def registered(store: Path) -> Store:
    run = Store.open(store, create=True).child("default/night")
    run.create(RUN_DOCUMENT, documents.encode(documents.RunDocument("default", "night", time.time_ns(), ())))
    return run


def test_of_a_program_that_is_never_attached(tmp_path: Path) -> None:
    launcher = f"import sys; sys.argv = ['watchstep', *sys.argv[1:]]; from {watchstep_main.__module__} import main; main()"
    arguments = ("run", "--store", tmp_path, "--run", "night", "--", sys.executable, "-c", "print(1)")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WATCHSTEP_")}
    subprocess.run([sys.executable, "-c", launcher, *arguments], check=True, env=environment)
    text = shown(tmp_path)
    assert "state     ended\n" in text
    assert (
        "reason    no segment was recorded: the program ended, and Watchstep was not attached to it: " in text
    )
    reason = json.loads(shown(tmp_path, "--json"))["reason"]
    assert reason.startswith("no segment was recorded: the program ended")


def test_of_a_program_that_has_not_begun(tmp_path: Path) -> None:
    registered(tmp_path)
    assert "reason    no segment was recorded: the program has not taken its first step" in shown(tmp_path)


def test_of_an_attempt_that_ends_before_its_first_step(tmp_path: Path) -> None:
    run = registered(tmp_path)
    run.create(attempt_document("a"), documents.encode(documents.AttemptDocument("a", 1)))
    assert "reason    no segment was recorded: an attempt began" in shown(tmp_path)
    end = documents.EndDocument(0, "failed", -1, 2, 0, "w", "ValueError: no data")
    run.create(end_document("a", 0), documents.encode(end))
    assert "reason    no segment was recorded: the attempt ended before the end of its first step\n" in shown(
        tmp_path
    )


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_recorded_or_damaged_run_has_no_reason(tmp_path: Path, options: tuple[str, ...]) -> None:
    with Hook(tmp_path, run="night") as hook:
        hook.log(loss=1.0)
        hook.step()
    assert "no segment" not in shown(tmp_path, *options)
    store = tmp_path / "other"
    run = registered(store)
    run.create("attempts/a.json", b"{")
    assert "no segment" not in shown(store, *options)
