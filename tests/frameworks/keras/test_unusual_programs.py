"""Keras programs with several models, losses or optimizers, recorded for real."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from watchstep import Run, open_run
from watchstep.wrapper.environment import INJECTED

pytest.importorskip("keras", reason="KERAS IS NOT INSTALLED: its adapter is not proven by this run")

PROGRAMS = Path(__file__).with_name("unusual_programs.py")
BACKENDS = [name for name in ("tensorflow", "torch") if importlib.util.find_spec(name)]
KINDS = {
    "tensorflow": "own_updates copied adversarial alternating evaluating several_losses one_replica",
    "torch": "own_updates copied alternating evaluating",
}
needs_tensorflow = pytest.mark.skipif(
    "tensorflow" not in BACKENDS, reason="TENSORFLOW IS NOT INSTALLED: as above"
)


class UnusualPrograms:
    """The results of all programs on a backend."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cache  # noqa: B019 - one object for the module
    def results(self, backend: str) -> dict[str, Any]:
        own = self._folder / backend
        own.mkdir()
        done = subprocess.run(
            [sys.executable, str(PROGRAMS), str(own / "runs"), str(own / "results.json")],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(own),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "CUDA_VISIBLE_DEVICES": "",
                "KERAS_BACKEND": backend,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        results: dict[str, Any] = json.loads((own / "results.json").read_text())
        return results

    def run(self, backend: str, kind: str) -> Run:
        self.results(backend)
        return open_run(self._folder / backend / "runs" / "default" / kind)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> UnusualPrograms:
    return UnusualPrograms(tmp_path_factory.mktemp("unusual"))


def values(run: Run, name: str) -> list[float]:
    table = run.tensor(name).statistics().to_pydict()
    return [float(value) for value in table["mean"]]


@pytest.mark.parametrize(
    ("backend", "kind"), [(backend, kind) for backend in BACKENDS for kind in KINDS[backend].split()]
)
def test_a_recorded_program_computes_the_same_bits(
    programs: UnusualPrograms, backend: str, kind: str
) -> None:
    result = programs.results(backend)[kind]
    assert result["faults"] == {}
    assert result["equal"]


@needs_tensorflow
def test_each_optimizer_has_its_own_loss_and_learning_rate(programs: UnusualPrograms) -> None:
    run = programs.run("tensorflow", "adversarial")
    generated, discriminated = zip(*programs.results("tensorflow")["adversarial"]["losses"], strict=True)
    assert values(run, "loss") == pytest.approx(generated)
    assert values(run, "loss_2") == pytest.approx(discriminated)
    assert values(run, "optimizer:learning_rate/0") == pytest.approx([0.01])
    assert values(run, "optimizer_2:learning_rate/0") == pytest.approx([0.02])
    assert run.steps("train") == [0, 1, 2, 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_models_with_layers_of_the_same_names_have_rows_of_their_own(
    programs: UnusualPrograms, backend: str
) -> None:
    run = programs.run(backend, "alternating")
    losses = programs.results(backend)["alternating"]["losses"]
    assert values(run, "loss") == pytest.approx([first for first, _ in losses])
    assert values(run, "loss_2") == pytest.approx([second for _, second in losses])
    for name in ("hidden.kernel", "model_2.hidden.kernel"):
        assert len(values(run, f"{name}:gradient")) == 4
    assert values(run, "hidden.kernel")[0] != values(run, "model_2.hidden.kernel")[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_that_nothing_differentiates_is_not_that_of_a_step(
    programs: UnusualPrograms, backend: str
) -> None:
    losses = programs.results(backend)["evaluating"]["losses"]
    assert values(programs.run(backend, "evaluating"), "loss") == pytest.approx(losses)


@needs_tensorflow
def test_an_update_by_several_losses_has_none_and_health_reports_it(programs: UnusualPrograms) -> None:
    assert "loss" not in programs.run("tensorflow", "several_losses").tensors()
    assert "several losses" in programs.results("tensorflow")["several_losses"]["notes"]["tensorflow"]


@needs_tensorflow
def test_a_strategy_with_one_replica_is_recorded(programs: UnusualPrograms) -> None:
    run = programs.run("tensorflow", "one_replica")
    assert run.steps("train") == [0, 1, 2, 3]
    mean = sum(values(run, "loss")) / 4
    assert programs.results("tensorflow")["one_replica"]["losses"] == pytest.approx([mean], rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_optimizer_that_is_not_observed_is_reported(programs: UnusualPrograms, backend: str) -> None:
    result = programs.results(backend)["own_updates"]
    assert "OwnUpdates" in result["notes"]["keras"]
    assert programs.run(backend, "own_updates").steps("train") == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_of_the_callback_is_the_same_recording(programs: UnusualPrograms, backend: str) -> None:
    assert programs.run(backend, "copied").steps("train") == [0, 1, 2, 3]


def test_a_module_of_the_program_with_the_name_of_a_framework_is_none(tmp_path: Path) -> None:
    for name in ("keras", "jax", "optax", "tensorflow", "xgboost", "lightgbm", "torch"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    done = subprocess.run(
        [sys.executable, "-c", "import keras, jax, optax, tensorflow, xgboost, lightgbm, torch"],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(INJECTED), *filter(None, sys.path)]),
            "WATCHSTEP_STORE": str(tmp_path / "runs"),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
