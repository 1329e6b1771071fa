"""Keras programs on TensorFlow, JAX and PyTorch, recorded for real. Each backend needs a process of its own."""

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
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.config.defaults import DEFAULT_RULES

pytest.importorskip("keras", reason="KERAS IS NOT INSTALLED: its adapter is not proven by this run")

PROGRAMS = Path(__file__).with_name("programs.py")
BACKENDS = [name for name in ("tensorflow", "jax", "torch") if importlib.util.find_spec(name)]
STEPS, BAD = 8, 3
NAMES = ["hidden.bias", "hidden.kernel", "norm.beta", "norm.gamma", "out.bias", "out.kernel"]
KINDS = {
    "tensorflow": "fit traced_before jit_compile run_eagerly several_steps own_step own_loop overflow",
    "jax": "fit traced_before run_eagerly several_steps own_step own_loop overflow",
    "torch": "fit own_step own_loop overflow",
}
ALL = [(backend, kind) for backend in BACKENDS for kind in KINDS[backend].split()]


def environment(home: Path, first: str = "", **variables: str) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [first, *sys.path]))
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": paths, **quiet, **variables}


class Trained:
    """The results of all programs on a backend."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cache  # noqa: B019 - one object for the module
    def results(self, backend: str) -> dict[str, Any]:
        own = self._folder / backend
        own.mkdir()
        done = subprocess.run(
            [sys.executable, str(PROGRAMS), str(own / "runs"), str(own / "results.json")],
            env=environment(own, KERAS_BACKEND=backend),
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
        results: dict[str, Any] = json.loads((own / "results.json").read_text())
        return results

    def run(self, backend: str, kind: str) -> Run:
        self.results(backend)
        return open_run(self._folder / backend / "runs" / "default" / kind)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("keras"))


def figures(run: Run, name: str, column: str = "mean", mode: str = "train") -> dict[int, Any]:
    table = run.tensor(name).statistics().to_pydict()
    rows = zip(table["step"], table["mode"], table[column], strict=True)
    return {step: value for step, own, value in rows if own == mode}


def bad_steps(run: Run, names: list[str]) -> set[int]:
    columns = ("nan", "pos_inf", "neg_inf")
    return {
        step
        for name in names
        for column in columns
        for step, count in figures(run, f"{name}:gradient", column).items()
        if count
    }


@pytest.mark.parametrize(("backend", "kind"), ALL)
def test_a_recorded_program_computes_the_same_bits(trained: Trained, backend: str, kind: str) -> None:
    result = trained.results(backend)[kind]
    assert result["faults"] == {}
    assert result["equal"]


@pytest.mark.parametrize(("backend", "kind"), ALL)
def test_each_batch_is_a_step_with_its_gradients(trained: Trained, backend: str, kind: str) -> None:
    run = trained.run(backend, kind)
    steps = list(range(2 * STEPS if kind == "fit" else STEPS))
    measured = [0, 5] if (backend, kind) == ("tensorflow", "several_steps") else steps
    first_weights = 1 if backend == "jax" and kind != "run_eagerly" else 0
    assert run.steps("train") == steps
    for name in NAMES:
        assert list(figures(run, f"{name}:gradient")) == measured
        assert [step for step in figures(run, name) if step >= first_weights] == measured[first_weights:]
        assert run.tensor(name).info.role == ("bias" if name.endswith(("bias", "beta")) else "weight")
    assert list(figures(run, "optimizer:learning_rate/0")) == [0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_losses_are_those_of_batches_and_of_evaluations(trained: Trained, backend: str) -> None:
    run, history = trained.run(backend, "fit"), trained.results(backend)["fit"]["losses"]
    losses = list(figures(run, "loss").values())
    for epoch in (0, 1):
        part = losses[STEPS * epoch : STEPS * (epoch + 1)]
        assert sum(part) / STEPS == pytest.approx(history["loss"][epoch], rel=1e-5)
    evaluated = figures(run, "loss", mode="eval")
    assert evaluated == pytest.approx({7: history["val_loss"][0], 15: history["val_loss"][1]}, rel=1e-6)
    assert list(figures(run, "accuracy", mode="eval")) == [7, 15]


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch"])
def test_losses_of_loops_of_the_program_s_own(trained: Trained, backend: str) -> None:
    losses = trained.results(backend)["own_loop"]["losses"]
    assert list(figures(trained.run(backend, "own_loop"), "loss").values()) == pytest.approx(losses)
    assert list(figures(trained.run(backend, "own_step"), "loss")) == list(range(STEPS))


@pytest.mark.skipif("tensorflow" not in BACKENDS, reason="TENSORFLOW IS NOT INSTALLED")
def test_a_compiled_and_an_eager_program_have_the_same_figures(trained: Trained) -> None:
    expected = figures(trained.run("tensorflow", "run_eagerly"), "hidden.kernel:gradient", "square_sum")
    compiled = figures(trained.run("tensorflow", "jit_compile"), "hidden.kernel:gradient", "square_sum")
    assert list(compiled.values()) == pytest.approx(list(expected.values()), rel=1e-3)
    assert trained.run("tensorflow", "fit").tensor("norm.gamma").info.module_type == "BatchNormalization"


@pytest.mark.parametrize("backend", BACKENDS)
def test_updates_that_overflow_are_numbered_with_gradients_and_scale(trained: Trained, backend: str) -> None:
    run = trained.run(backend, "overflow")
    scales = figures(run, "gradient_scaler:scale")
    skipped = bad_steps(run, NAMES)
    assert skipped
    assert {0} <= skipped < set(range(STEPS))
    expected = [2.0**19]
    for step in range(STEPS - 1):
        expected.append(expected[-1] / (2 if step in skipped else 1))
    assert scales == dict(enumerate(expected))
    losses = figures(run, "loss")
    assert max(losses.values()) < 10.0  # not multiplied by the scale
    assert list(losses) == list(range(STEPS))
    assert set(figures(run, "gradient_scaler:skipped")) == skipped
    assert figures(run, "gradients:nonfinite_applied") == dict.fromkeys(sorted(skipped), 0.0)
    largest = figures(run, "out.kernel:gradient", "max")
    assert all(
        0 < largest[step] < 10.0 for step in range(STEPS) if step not in skipped
    )  # divided by the scale


@pytest.mark.parametrize("backend", BACKENDS)
def test_updates_that_overflow_are_no_fault(trained: Trained, backend: str) -> None:
    outcomes = backtest(trained.run(backend, "overflow").rows(), DEFAULT_RULES)
    assert [outcome.config.rule for outcome in outcomes if outcome.fired or outcome.problem] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stops_the_training(trained: Trained, backend: str) -> None:
    kinds = ["planted"] if backend == "torch" else ["planted", "planted_several"]
    for kind in kinds:
        assert trained.results(backend)[kind] == {"stopped": BAD, "faults": {}}
        run = trained.run(backend, kind)
        assert bad_steps(run, ["hidden.kernel"]) == {BAD}
        assert run.steps("train")[-1] == BAD


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saved_model_has_every_variable_of_its_optimizer(trained: Trained, backend: str) -> None:
    assert trained.results(backend)["saved"] == {"variables": 14, "equal": True, "iterations": STEPS}


UNMODIFIED = """
import keras
import numpy as np
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")])
model.compile(optimizer="adam", loss="mse")
x = np.random.default_rng(0).standard_normal((48, 4)).astype("float32")
print(model.fit(x, x[:, :2], batch_size=8, verbose=0, shuffle=False).history)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unmodified_program_is_recorded(tmp_path: Path, backend: str) -> None:
    outputs = []
    for first in ("", str(INJECTED)):
        done = subprocess.run(
            [sys.executable, "-c", UNMODIFIED],
            env=environment(
                tmp_path,
                first,
                KERAS_BACKEND=backend,
                WATCHSTEP_STORE=str(tmp_path / "runs"),
                WATCHSTEP_RUN="unmodified",
                WATCHSTEP_OVERHEAD_BUDGET="none",
            ),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    run = open_run(tmp_path / "runs" / "default" / "unmodified")
    assert list(figures(run, "loss")) == list(range(6))
    assert list(figures(run, "dense.kernel:gradient")) == list(range(6))
