"""Commands over a store with a damaged run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.services.cli.command_line import run_command
from watchstep import Hook


@pytest.mark.timeout(120)
def test_a_damaged_run_affects_neither_the_list_nor_other_runs(tmp_path: Path) -> None:
    for run in ("good", "pipe", "ends"):
        with Hook(tmp_path, run=run) as hook:
            hook.log(loss=1.0)
            hook.step()
    (tmp_path / "default" / "pipe" / "run.json").unlink()
    os.mkfifo(tmp_path / "default" / "pipe" / "run.json")
    (end,) = (tmp_path / "default" / "ends" / "end").rglob("0.json")
    end.write_bytes(b"{")
    listed = run_command("runs", "list", "--store", tmp_path)
    states = {line.split()[1]: line.split()[-1] for line in listed.stdout.splitlines()[1:]}
    assert (listed.returncode, states) == (0, {"good": "completed", "pipe": "damaged", "ends": "damaged"})
    assert "default/pipe is damaged" in listed.stderr
    assert "run.json is not a regular file" in listed.stderr
    for run, state in (("good", "completed"), ("ends", "damaged")):
        shown = run_command("runs", "show", run, "--store", tmp_path)
        assert shown.returncode == 0
        assert f"state     {state}" in shown.stdout
        assert ("0.json" in shown.stdout) == (state == "damaged")
