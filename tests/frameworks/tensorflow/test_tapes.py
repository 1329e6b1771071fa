"""Programs with loops of their own, recorded for real by their gradient tapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.recorded_programs import RecordedPrograms, figures, unmodified_run
from watchstep.wrapper.environment import INJECTED

pytest.importorskip("tensorflow", reason="TENSORFLOW IS NOT INSTALLED: its adapter is not proven by this run")

PROGRAMS, UNMODIFIED = (Path(__file__).with_name(name) for name in ("programs.py", "unmodified.py"))
STEPS, BAD = 8, 3
NAMES = ["hidden.bias", "hidden.kernel", "out.kernel"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RecordedPrograms:
    return RecordedPrograms(PROGRAMS, tmp_path_factory.mktemp("tapes"))


@pytest.mark.parametrize("kind", ["eager", "graph", "compiled", "loop", "penalty", "rows", "compiled_rows"])
def test_a_recorded_program_computes_the_same_bits(trained: RecordedPrograms, kind: str) -> None:
    results = trained.results("tensorflow")
    assert results[kind]["faults"] == {}
    assert results[kind]["equal"]
    losses = figures(trained.run("tensorflow", kind), "loss")
    assert list(losses) == list(range(STEPS))
    assert list(losses.values()) == pytest.approx(results[kind]["losses"])


@pytest.mark.parametrize("kind", ["eager", "graph", "compiled"])
def test_gradients_and_weights_of_each_step(trained: RecordedPrograms, kind: str) -> None:
    run = trained.run("tensorflow", kind)
    for name in NAMES:
        assert list(figures(run, name)) == list(range(STEPS))
        assert list(figures(run, f"{name}:gradient")) == list(range(STEPS))
    before, gradient = figures(run, "hidden.kernel"), figures(run, "hidden.kernel:gradient")
    for step in range(STEPS - 1):
        assert before[step + 1] == pytest.approx(before[step] - 0.1 * gradient[step], abs=1e-6)
    assert run.tensor("hidden.bias").info.role == "bias"
    assert run.tensor("out.kernel").info.shape == (12, 3)


def test_figures_of_all_kinds_are_those_of_eager_code(trained: RecordedPrograms) -> None:
    expected = figures(trained.run("tensorflow", "eager"), "out.kernel:gradient", "square_sum")
    for kind in ("graph", "compiled"):
        values = figures(trained.run("tensorflow", kind), "out.kernel:gradient", "square_sum")
        assert list(values.values()) == pytest.approx(list(expected.values()), rel=1e-4)


def test_slices_of_rows_are_measured(trained: RecordedPrograms) -> None:
    counts = figures(trained.run("tensorflow", "rows"), "embedding.table:gradient", "count")
    assert list(counts.values()) == [4 * (7 + step) for step in range(STEPS)]


def test_the_gradients_of_the_first_step_of_a_call_are_measured(trained: RecordedPrograms) -> None:
    assert list(figures(trained.run("tensorflow", "loop"), "out.kernel:gradient")) == [0]


def test_nan_stops_a_graph_after_its_step_and_eager_code_before_its_update(
    trained: RecordedPrograms,
) -> None:
    results = trained.results("tensorflow")
    assert results["bad_graph"] == {"stopped": BAD, "faults": {}, "finite": False}
    assert results["bad_eager"]["stopped"] == BAD
    nan = figures(trained.run("tensorflow", "bad_graph"), "hidden.kernel:gradient", "nan")
    assert [step for step, count in nan.items() if count] == [BAD]


def test_an_unmodified_program_is_recorded(trained: RecordedPrograms, tmp_path: Path) -> None:
    run, printed = unmodified_run(tmp_path, UNMODIFIED, INJECTED)
    assert printed == trained.results("tensorflow")["unmodified"]
    assert list(figures(run, "loss")) == list(range(6))
    assert list(figures(run, "dense.kernel:gradient")) == list(range(6))


AFTER_FIT = """
import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile("adam", "mse")
x = np.ones((64, 4), "float32")
model.fit(x, x[:, :2], batch_size=2, verbose=0)
own = keras.optimizers.SGD(0.1)
variables = [variable.value for variable in model.trainable_variables]


def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x, training=True) ** 2)
    return tape.gradient(loss, variables)


def update(gradients):
    for variable, gradient in zip(variables, gradients):
        variable.assign_sub(0.1 * gradient)


step = STEP
for _ in range(25):
    UPDATE(step())
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("step", "is_own"),
    [
        ("tf.function(step)", True),
        ("step", False),
        pytest.param("step", True, marks=pytest.mark.release),
        pytest.param("tf.function(step)", False, marks=pytest.mark.release),
    ],
)
def test_own_updates_after_those_of_keras_are_told_that_they_are_not_observed(
    tmp_path: Path, *, step: str, is_own: bool
) -> None:
    update = (
        "update"
        if is_own
        else "(lambda gradients: own.apply_gradients(zip(gradients, model.trainable_variables)))"
    )
    program = tmp_path / "train.py"
    program.write_text(AFTER_FIT.replace("STEP", step).replace("UPDATE", update))
    run, _ = unmodified_run(tmp_path, program, INJECTED, KERAS_BACKEND="tensorflow")
    (end,) = run.ends()
    assert is_own == ("NaN in them stops nothing" in end.health["notes"].get("tapes", ""))
