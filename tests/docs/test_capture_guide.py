"""The example of the guide on capture files, run as its reader runs it: an unchanged program and one file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.docs.test_docs import ROOT, blocks
from watchstep import Run, open_run

PAGE = ROOT / "docs" / "guides" / "capture-file.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the example, and the run that it records."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "train.py").write_text(blocks(PAGE, "python")[0])
    (folder / "capture.yaml").write_text(blocks(PAGE, "yaml")[0])
    commands = blocks(PAGE, "sh")[0].splitlines()
    assert commands == [
        "watchstep check-config capture.yaml",
        "watchstep run --capture capture.yaml -- python train.py",
    ]
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "WATCHSTEP_RUN": "r"}
    for command in commands:
        done = subprocess.run(
            command.split(),
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr
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
