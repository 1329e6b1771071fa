"""Guides and tutorials whose steps are run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.docs.test_docs import ROOT, blocks
from tests.sdk.programs import record_program
from tests.services.cli.command_line import run_command
from watchstep import Run, open_run
from watchstep_rules.backtest.backtest import backtest_run
from watchstep_rules.config.defaults import DEFAULT_RULES

# The guide to capturing


pytestmark = pytest.mark.ci
CAPTURE_GUIDE_PAGE = ROOT / "docs" / "guides" / "capture-file.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the example, and the run that it records."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "train.py").write_text(blocks(CAPTURE_GUIDE_PAGE, "python")[0])
    (folder / "capture.yaml").write_text(blocks(CAPTURE_GUIDE_PAGE, "yaml")[0])
    commands = blocks(CAPTURE_GUIDE_PAGE, "sh")[0].splitlines()
    assert commands == [
        "watchstep check-config capture.yaml",
        "watchstep run --capture capture.yaml -- python train.py",
    ]
    checked = run_command("check-config", folder / "capture.yaml")
    assert checked.returncode == 0, checked.stderr
    options = ("--run", "r", "--capture", "capture.yaml")
    record_program(folder / "train.py", folder=folder, options=options)
    return folder


@pytest.fixture
def run(folder: Path) -> Run:
    return open_run(folder / "watchstep-runs" / "default" / "r")


def saved(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """The full tensors by step, mode and collection, each by name."""
    return {
        path.name.removesuffix(".safetensors"): load_file(path)
        for path in (folder / "watchstep-runs").rglob("*.safetensors")
    }


def test_tensors_by_name_are_saved_in_full_on_a_cadence(folder: Path) -> None:
    objects = {name: tensors for name, tensors in saved(folder).items() if name.endswith("-encoder")}
    assert set(objects) == {"10-train-encoder", "20-train-encoder", "30-train-encoder"}
    for tensors in objects.values():
        assert {name: values.shape for name, values in tensors.items()} == {
            f"encoder.{layer}:output": (4, 16) for layer in range(3)
        }


def test_tensors_by_module_type_and_role_are_saved_in_full(folder: Path) -> None:
    objects = {name: tensors for name, tensors in saved(folder).items() if name.endswith("-norms")}
    assert set(objects) == {"0-train-norms", "20-train-norms"}
    assert set(objects["0-train-norms"]) == {"encoder.1.weight", "encoder.1.bias"}
    assert objects["0-train-norms"]["encoder.1.weight"].tolist() == [1.0] * 16


def test_tensors_by_module_and_role_are_saved_at_steps(folder: Path, run: Run) -> None:
    objects = {name: tensors for name, tensors in saved(folder).items() if name.endswith("-head_gradients")}
    assert set(objects) == {f"{step}-train-head_gradients" for step in range(3)}
    assert set(objects["0-train-head_gradients"]) == {"head.weight:gradient", "head.bias:gradient"}
    norm = run.tensor("head.weight:gradient").statistics()["square_sum"].to_pylist()[0]
    assert np.square(
        objects["0-train-head_gradients"]["head.weight:gradient"], dtype="f8"
    ).sum() == pytest.approx(norm, rel=1e-5)


def test_outputs_of_evaluations_have_a_cadence_of_their_own(folder: Path) -> None:
    objects = {name: tensors for name, tensors in saved(folder).items() if name.endswith("-evaluation")}
    assert set(objects) == {f"{step}-eval-evaluation" for step in (9, 19, 29, 39)}
    assert set(objects["9-eval-evaluation"]) == {"encoder.0:output", "head:output"}
    assert not [name for name in saved(folder) if re.search("-eval-(?!evaluation)", name)]


def test_statistics_follow_the_file_too(run: Run) -> None:
    assert run.tensors("updates") == []
    assert run.tensors("weights") == ["encoder.0.weight", "encoder.1.weight", "head.weight"]
    assert set(range(0, 40, 5)) <= set(run.tensor("encoder.1.weight").steps())


def test_the_attempt_names_the_configuration(folder: Path) -> None:
    (path,) = (folder / "watchstep-runs").rglob("attempts/*.json")
    config = json.loads(path.read_text())["config"]
    assert config["collections"]["norms"]["tensors"] == {"every": 20}
    assert config["collections"]["updates"] is None
    assert config["overhead_budget"] == 0.02


# The tutorial of replays


REPLAY_TUTORIAL_PAGE = ROOT / "docs" / "tutorials" / "replay-a-fault.md"
PROGRAM = ROOT / "examples" / "digits_nan.py"
_COMMANDS = re.compile(r"^(?:python|watchstep bundles|watchstep replay) .*$", re.MULTILINE)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder in which the page's commands ran, and everything that they printed."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "examples").mkdir()
    (folder / "examples" / PROGRAM.name).write_text(PROGRAM.read_text())
    text = ""
    for line in _COMMANDS.findall(REPLAY_TUTORIAL_PAGE.read_text(encoding="utf-8")):
        name, *arguments = line.split()
        command = [sys.executable] if name == "python" else [str(Path(sys.executable).with_name(name))]
        done = subprocess.run(
            [*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode in {0, 1, 86}, done.stderr
        text += done.stdout + done.stderr
    return folder, text.replace(f"{folder}/", "")


@pytest.mark.release
def test_the_page_shows_what_is_printed(printed: tuple[Path, str]) -> None:
    page = REPLAY_TUTORIAL_PAGE.read_text(encoding="utf-8")
    shown = list(re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    lines = [
        line
        for block in shown
        for line in block.splitlines()
        if "RULE" not in block and "silent" not in block
    ]
    assert len(lines) > 10
    for line in lines:
        wanted = re.sub(r"attempt \w+", "", line).strip()
        assert wanted in re.sub(r"attempt \w+", "", printed[1]), line


def test_the_code_on_the_page_is_that_of_the_program() -> None:
    program = [line.strip() for line in PROGRAM.read_text(encoding="utf-8").splitlines()]
    blocks = re.findall(
        r"^```{ .python .no-run }\n(.*?)^```",
        REPLAY_TUTORIAL_PAGE.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    for line in (line.strip() for block in blocks for line in block.splitlines()):
        assert line in program, line


@pytest.mark.release
@pytest.mark.parametrize(
    ("run", "fires"),
    [("digits", {"nan_or_inf", "training_stopped"}), ("fixed", {"dead_relu"}), ("clean", set())],
)
def test_the_rules_report_the_fault_and_nothing_of_the_clean_run(
    printed: tuple[Path, str], run: str, fires: set[str]
) -> None:
    url = printed[0] / "runs" / "default" / run
    (attempt,) = backtest_run(str(url), DEFAULT_RULES).attempts
    assert {outcome.config.name for outcome in attempt.outcomes if outcome.fired} == fires
    assert (open_run(url).ends()[0].state == "stopped") == (run == "digits")
