"""``watchstep run --capture``, and the capture document of the environment: an unchanged program records what a file names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sdk.programs import record_program
from tests.sdk.wrapper.test_run_command import PROGRAM, record, record_attached, recorded
from tests.services.cli.command_line import run_command
from watchstep.format.layout import ATTEMPTS
from watchstep.reading.run import Run

CAPTURE = """
collections:
  weights: null
  body: {include: "body.*", roles: [weight, gradient], tensors: 10, cadence: 5}
"""
READS = "import os; print(os.environ.get('WATCHSTEP_CAPTURE'))"


def run(folder: Path, program: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(program)
    return record(folder, sys.executable, folder / "train.py", options=options, **environment)


def saved(folder: Path) -> set[str]:
    return {path.name.removesuffix(".safetensors") for path in (folder / "runs").rglob("*.safetensors")}


def attempt_config(run: Run) -> object:
    (entry,) = run.store.entries(ATTEMPTS)
    return json.loads(run.store.get(entry.key))["config"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "capture.yaml"
    path.write_text(CAPTURE)
    return path


@pytest.mark.ci
def test_a_file_configures_an_unchanged_program(tmp_path: Path, file: Path) -> None:
    record_attached(tmp_path, PROGRAM, "--capture", file)
    assert saved(tmp_path) == {"0-train-body", "10-train-body"}
    assert recorded(tmp_path).tensors("weights") == []
    assert recorded(tmp_path).tensor("body.weight").steps() == [0, 5, 10, 15]
    assert attempt_config(recorded(tmp_path)) == {
        "collections": {
            "weights": None,
            "body": {
                "cadence": {"every": 5},
                "tensors": {"every": 10},
                "include": "body.*",
                "roles": ["weight", "gradient"],
            },
        },
        "overhead_budget": None,
    }


@pytest.mark.ci
def test_a_selector_that_matches_nothing_is_logged_once(tmp_path: Path, file: Path) -> None:
    file.write_text(
        "collections:\n  typo: {include: 'bdoy.*', tensors: 10}\n  other: {modules: [bdoy], tensors: 10}\n"
    )
    done = record_attached(tmp_path, PROGRAM, "--capture", file)
    warning = "watchstep: collections: nothing belongs to: other, typo; see their selectors"
    assert [line for line in done.errors.splitlines() if "nothing belongs" in line] == [warning]


@pytest.mark.ci
def test_the_environment_is_the_same_and_the_option_precedes_it(tmp_path: Path, file: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"gate": false}')
    for options, value, document in (
        ((), str(file), "body"),
        ((), '{"collections": {"metrics": null}}', "metrics"),
        (("--capture", str(other)), str(file), "gate"),
    ):
        done = run(tmp_path, READS, *options, WATCHSTEP_CAPTURE=value)
        assert done.returncode == 0, done.stderr
        assert document in json.loads(done.stdout) or document in json.loads(done.stdout)["collections"]


@pytest.mark.ci
def test_the_programs_own_configuration_precedes_the_option(tmp_path: Path, file: Path) -> None:
    program = "import watchstep\nwith watchstep.Hook(config=watchstep.CaptureConfig()) as hook:\n    print(hook.config.saves_tensors)"
    assert run(tmp_path, program, "--capture", str(file)).stdout == "False\n"
    program = program.replace("config=watchstep.CaptureConfig()", "")
    assert run(tmp_path, program, "--capture", str(file)).stdout == "True\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("collections: {a: {include: '(', tensors: 5}}", "collections.a.include: "),
        ("collection: {}", "did you mean collections?"),
        (None, "No such file"),
    ],
)
@pytest.mark.parametrize("way", ["option", "environment"])
def test_an_invalid_file_is_refused_before_the_program_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, message: str, way: str
) -> None:
    path = tmp_path / "capture.yaml"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("the program is executed"))
    if way == "environment":
        monkeypatch.setenv("WATCHSTEP_CAPTURE", str(path))
    options = ("--capture", path) if way == "option" else ()
    done = run_command("run", "--store", tmp_path / "runs", "--run", "r", *options, "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert f"capture file {path}" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.ci
def test_a_program_that_is_started_in_another_folder_needs_no_file(tmp_path: Path, file: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    program = f"import os; os.chdir({str(tmp_path / 'elsewhere')!r})\n" + PROGRAM
    (tmp_path / "train.py").write_text(program)
    options = ("--store", "runs", "--run", "r", "--capture", file.name)
    record_program(tmp_path / "train.py", folder=tmp_path, options=options, WATCHSTEP_OVERHEAD_BUDGET="none")
    assert saved(tmp_path) == {"0-train-body", "10-train-body"}
