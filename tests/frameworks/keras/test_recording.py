"""Keras programs on TensorFlow, JAX and PyTorch, recorded for real. Each backend needs a process of its own."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.recorded_programs import RecordedPrograms, figures, unmodified_run, values
from tests.processes import environment_of
from watchstep import Run
from watchstep.wrapper.environment import INJECTED
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.config.defaults import DEFAULT_RULES

pytest.importorskip("keras", reason="KERAS IS NOT INSTALLED: its adapter is not proven by this run")

PROGRAMS, UNMODIFIED = (Path(__file__).with_name(name) for name in ("programs.py", "unmodified.py"))
BACKENDS = [name for name in ("tensorflow", "jax", "torch") if importlib.util.find_spec(name)]
STEPS, BAD = 8, 3
NAMES = ["hidden.bias", "hidden.kernel", "norm.beta", "norm.gamma", "out.bias", "out.kernel"]
KINDS = {
    "tensorflow": "fit traced_before jit_compile run_eagerly several_steps own_step own_loop overflow",
    "jax": "fit traced_before run_eagerly several_steps own_step own_loop overflow",
    "torch": "fit own_step own_loop overflow",
}
ALL = [(backend, kind) for backend in BACKENDS for kind in KINDS[backend].split()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RecordedPrograms:
    return RecordedPrograms(PROGRAMS, tmp_path_factory.mktemp("keras"))


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
def test_a_recorded_program_computes_the_same_bits(
    trained: RecordedPrograms, backend: str, kind: str
) -> None:
    result = trained.results(backend)[kind]
    assert result["faults"] == {}
    assert result["equal"]


@pytest.mark.parametrize(("backend", "kind"), ALL)
def test_each_batch_is_a_step_with_its_gradients(trained: RecordedPrograms, backend: str, kind: str) -> None:
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
def test_losses_are_those_of_batches_and_of_evaluations(trained: RecordedPrograms, backend: str) -> None:
    run, history = trained.run(backend, "fit"), trained.results(backend)["fit"]["losses"]
    losses = list(figures(run, "loss").values())
    for epoch in (0, 1):
        part = losses[STEPS * epoch : STEPS * (epoch + 1)]
        assert sum(part) / STEPS == pytest.approx(history["loss"][epoch], rel=1e-5)
    evaluated = figures(run, "loss", mode="eval")
    assert evaluated == pytest.approx({7: history["val_loss"][0], 15: history["val_loss"][1]}, rel=1e-6)
    assert list(figures(run, "accuracy", mode="eval")) == [7, 15]


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch"])
def test_losses_of_loops_of_the_program_s_own(trained: RecordedPrograms, backend: str) -> None:
    losses = trained.results(backend)["own_loop"]["losses"]
    assert list(figures(trained.run(backend, "own_loop"), "loss").values()) == pytest.approx(losses)
    assert list(figures(trained.run(backend, "own_step"), "loss")) == list(range(STEPS))


@pytest.mark.skipif("tensorflow" not in BACKENDS, reason="TENSORFLOW IS NOT INSTALLED")
def test_a_compiled_and_an_eager_program_have_the_same_figures(trained: RecordedPrograms) -> None:
    expected = figures(trained.run("tensorflow", "run_eagerly"), "hidden.kernel:gradient", "square_sum")
    compiled = figures(trained.run("tensorflow", "jit_compile"), "hidden.kernel:gradient", "square_sum")
    assert list(compiled.values()) == pytest.approx(list(expected.values()), rel=1e-3)
    assert trained.run("tensorflow", "fit").tensor("norm.gamma").info.module_type == "BatchNormalization"


@pytest.mark.parametrize("backend", BACKENDS)
def test_updates_that_overflow_are_numbered_with_gradients_and_scale(
    trained: RecordedPrograms, backend: str
) -> None:
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
def test_updates_that_overflow_are_no_fault(trained: RecordedPrograms, backend: str) -> None:
    outcomes = backtest(trained.run(backend, "overflow").rows(), DEFAULT_RULES)
    assert [outcome.config.rule for outcome in outcomes if outcome.fired or outcome.problem] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stops_the_training(trained: RecordedPrograms, backend: str) -> None:
    kinds = ["planted"] if backend == "torch" else ["planted", "planted_several"]
    for kind in kinds:
        assert trained.results(backend)[kind] == {"stopped": BAD, "faults": {}}
        run = trained.run(backend, kind)
        assert bad_steps(run, ["hidden.kernel"]) == {BAD}
        assert run.steps("train")[-1] == BAD


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saved_model_has_every_variable_of_its_optimizer(trained: RecordedPrograms, backend: str) -> None:
    assert trained.results(backend)["saved"] == {"variables": 14, "equal": True, "iterations": STEPS}


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unmodified_program_is_recorded(trained: RecordedPrograms, tmp_path: Path, backend: str) -> None:
    run, printed = unmodified_run(tmp_path, UNMODIFIED, INJECTED, KERAS_BACKEND=backend)
    assert printed == trained.results(backend)["unmodified"]
    assert list(figures(run, "loss")) == list(range(6))
    assert list(figures(run, "dense.kernel:gradient")) == list(range(6))


IN_THREADS = """
import threading
import keras
import numpy as np
x = np.random.default_rng(0).standard_normal((48, 4)).astype("float32")
start = threading.Barrier(3)


def train(number):
    layer = keras.layers.Dense(2, name=f"layer_{number}", kernel_initializer="ones")
    model = keras.Sequential([keras.Input((4,)), layer])
    model.compile(optimizer="adam", loss="mse")
    start.wait()
    model.fit(x, x[:, :2], batch_size=8, verbose=0, shuffle=False)


threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "jax"])
def test_trainings_that_begin_at_once_in_threads_are_recorded(tmp_path: Path, backend: str) -> None:
    (tmp_path / "train.py").write_text(IN_THREADS)
    run, _ = unmodified_run(tmp_path, tmp_path / "train.py", INJECTED, KERAS_BACKEND=backend)
    assert set(range(6)) <= set(run.steps("train"))
    assert {f"layer_{number}.kernel:gradient" for number in range(3)} <= set(run.tensors())


# Programs with several models, losses or optimizers


pytest.importorskip("keras", reason="KERAS IS NOT INSTALLED: its adapter is not proven by this run")

UNUSUAL_PROGRAMS = Path(__file__).with_name("unusual_programs.py")
UNUSUAL_BACKENDS = [name for name in ("tensorflow", "torch") if importlib.util.find_spec(name)]
UNUSUAL_KINDS = {
    "tensorflow": "own_updates copied adversarial alternating evaluating several_losses one_replica seldom_used unknown_size checked "
    "plain_variables fit_within_fit fit_in_thread replica_functions warm_up",
    "torch": "own_updates copied alternating evaluating fit_within_fit fit_in_thread warm_up",
}
needs_tensorflow = pytest.mark.skipif(
    "tensorflow" not in UNUSUAL_BACKENDS, reason="TENSORFLOW IS NOT INSTALLED: as above"
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> RecordedPrograms:
    return RecordedPrograms(UNUSUAL_PROGRAMS, tmp_path_factory.mktemp("unusual"))


@pytest.mark.parametrize(
    ("backend", "kind"),
    [(backend, kind) for backend in UNUSUAL_BACKENDS for kind in UNUSUAL_KINDS[backend].split()],
)
def test_an_unusual_program_computes_the_same_bits(
    programs: RecordedPrograms, backend: str, kind: str
) -> None:
    result = programs.results(backend)[kind]
    assert result["faults"] == {}
    assert result["equal"]


@needs_tensorflow
def test_each_optimizer_has_its_own_loss_and_learning_rate(programs: RecordedPrograms) -> None:
    run = programs.run("tensorflow", "adversarial")
    generated, discriminated = zip(*programs.results("tensorflow")["adversarial"]["losses"], strict=True)
    assert values(run, "loss") == pytest.approx(generated)
    assert values(run, "loss_2") == pytest.approx(discriminated)
    assert values(run, "optimizer:learning_rate/0") == pytest.approx([0.01])
    assert values(run, "optimizer_2:learning_rate/0") == pytest.approx([0.02])
    assert run.steps("train") == [0, 1, 2, 3]


@pytest.mark.parametrize("backend", UNUSUAL_BACKENDS)
def test_models_with_layers_of_the_same_names_have_rows_of_their_own(
    programs: RecordedPrograms, backend: str
) -> None:
    run = programs.run(backend, "alternating")
    losses = programs.results(backend)["alternating"]["losses"]
    assert values(run, "loss") == pytest.approx([first for first, _ in losses])
    assert values(run, "loss_2") == pytest.approx([second for _, second in losses])
    for name in ("hidden.kernel", "model_2.hidden.kernel"):
        assert len(values(run, f"{name}:gradient")) == 4
    assert values(run, "hidden.kernel")[0] != values(run, "model_2.hidden.kernel")[0]


@pytest.mark.parametrize("backend", UNUSUAL_BACKENDS)
def test_a_loss_that_nothing_differentiates_is_not_that_of_a_step(
    programs: RecordedPrograms, backend: str
) -> None:
    losses = programs.results(backend)["evaluating"]["losses"]
    assert values(programs.run(backend, "evaluating"), "loss") == pytest.approx(losses)


@needs_tensorflow
def test_an_update_by_several_losses_has_none_and_health_reports_it(programs: RecordedPrograms) -> None:
    assert "loss" not in programs.run("tensorflow", "several_losses").tensors()
    assert "several losses" in programs.results("tensorflow")["several_losses"]["notes"]["tensorflow"]


@needs_tensorflow
def test_a_strategy_with_one_replica_is_recorded(programs: RecordedPrograms) -> None:
    run = programs.run("tensorflow", "one_replica")
    assert run.steps("train") == [0, 1, 2, 3]
    mean = sum(values(run, "loss")) / 4
    assert programs.results("tensorflow")["one_replica"]["losses"] == pytest.approx([mean], rel=1e-5)


@needs_tensorflow
def test_steps_of_a_replica_are_recorded_in_functions_and_in_eager_code(programs: RecordedPrograms) -> None:
    losses = programs.results("tensorflow")["replica_functions"]["losses"]
    recorded = figures(programs.run("tensorflow", "replica_functions"), "loss")
    assert recorded == pytest.approx(dict(enumerate(losses)))


@pytest.mark.parametrize("backend", UNUSUAL_BACKENDS)
def test_an_optimizer_after_a_warm_up_counts_steps(programs: RecordedPrograms, backend: str) -> None:
    run, losses = programs.run(backend, "warm_up"), programs.results(backend)["warm_up"]["losses"]
    assert run.steps("train") == list(range(9))
    assert values(run, "loss") == pytest.approx([*losses[:4], losses[-1]])
    later = figures(run, "loss_2")
    assert later[4] == pytest.approx(sum(losses[4:133]) / 129)
    assert [later[step] for step in (5, 6, 7)] == pytest.approx(losses[133:136])


@pytest.mark.parametrize("backend", UNUSUAL_BACKENDS)
def test_an_optimizer_that_is_not_observed_is_reported(programs: RecordedPrograms, backend: str) -> None:
    result = programs.results(backend)["own_updates"]
    assert "OwnUpdates" in result["notes"]["keras"]
    assert programs.run(backend, "own_updates").steps("train") == []


@needs_tensorflow
def test_updates_of_changing_variables_have_their_own_rows_and_steps(programs: RecordedPrograms) -> None:
    run = programs.run("tensorflow", "seldom_used")
    results = programs.results("tensorflow")["seldom_used"]["losses"]
    assert run.steps("train") == [0, 1, 2, 3]
    assert values(run, "loss") == pytest.approx([result[0] for result in results])
    second, out = (figures(run, f"{name}.bias:gradient") for name in ("second", "out"))
    assert second == pytest.approx({step: results[step][4] for step in (1, 3)}, abs=1e-7)
    assert out == pytest.approx({step: results[step][-1] for step in range(4)}, abs=1e-7)
    assert len(figures(run, "second.kernel")) == 2


@pytest.mark.parametrize("backend", UNUSUAL_BACKENDS)
def test_updates_of_many_sets_of_variables_are_all_recorded(programs: RecordedPrograms, backend: str) -> None:
    run = programs.run(backend, "changing_layers")
    means = programs.results(backend)["changing_layers"]["losses"]
    assert run.steps("train") == list(range(10))
    for number in range(10):
        name = next(found for found in run.tensors() if found.endswith(f"layer_{number}.kernel:gradient"))
        recorded = figures(run, name)
        expected = {step: row[number] for step, row in enumerate(means[:9]) if step != number}
        assert {step: recorded[step] for step in recorded if step < 9} == pytest.approx(expected, rel=1e-5)
        assert bad_steps(run, [name.removesuffix(":gradient")]) == ({9} if number != 9 else set())


@needs_tensorflow
def test_updates_of_alternating_variables_in_a_loop_keep_their_order(programs: RecordedPrograms) -> None:
    run = programs.run("tensorflow", "alternating_layers")
    assert bad_steps(run, ["out.kernel"]) == {5}
    assert set(figures(run, "gradients:nonfinite_applied")) == {5, 6, 7}
    assert all(math.isfinite(value) for value in values(run, "loss")[:2])


@needs_tensorflow
def test_gradients_of_several_updates_at_a_step_of_another_optimizer(programs: RecordedPrograms) -> None:
    run = programs.run("tensorflow", "adversarial_rounds")
    means = programs.results("tensorflow")["adversarial_rounds"]["losses"]
    assert run.steps("train") == [0, 1, 2, 3]
    assert values(run, "judged.kernel:gradient") == pytest.approx(means, rel=1e-5)


@needs_tensorflow
def test_the_end_of_an_epoch_is_no_step(programs: RecordedPrograms) -> None:
    run = programs.run("tensorflow", "unknown_size")
    assert run.steps("train") == list(range(12))
    assert len(values(run, "hidden.kernel:gradient")) == 12


@needs_tensorflow
def test_an_update_before_an_exception_of_its_step_is_recorded(programs: RecordedPrograms) -> None:
    assert bad_steps(programs.run("tensorflow", "checked"), ["out.kernel"]) == {2}


@needs_tensorflow
def test_variables_of_tensorflow_are_recorded(programs: RecordedPrograms) -> None:
    assert len(values(programs.run("tensorflow", "plain_variables"), "weight")) == 4


@pytest.mark.parametrize("kind", ["fit_within_fit", "fit_in_thread"])
@pytest.mark.parametrize("backend", UNUSUAL_BACKENDS)
def test_a_training_within_a_training_does_not_count_steps(
    programs: RecordedPrograms, backend: str, kind: str
) -> None:
    run = programs.run(backend, kind)
    losses = programs.results(backend)[kind]["losses"]
    recorded = values(run, "loss")
    assert len(recorded) == 12
    assert [sum(recorded[at : at + 4]) / 4 for at in (0, 4, 8)] == pytest.approx(losses, rel=1e-5)
    assert len(values(run, "model_2.hidden.kernel:gradient")) == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_callbacks_with_one_hook_record_each_update_once(
    programs: RecordedPrograms, backend: str
) -> None:
    result = programs.results(backend)["a_callback_for_each_fit"]
    assert result["equal"]
    assert result["faults"] == {}
    run = programs.run(backend, "a_callback_for_each_fit")
    assert run.steps("train") == list(range(12))
    assert len(values(run, "loss")) == 12


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name == "jax"])
def test_a_second_training_with_more_variables_counts_steps(programs: RecordedPrograms, backend: str) -> None:
    result = programs.results(backend)["two_trainings"]
    assert result["equal"]
    assert result["faults"] == {}
    assert programs.run(backend, "two_trainings").steps("train") == list(range(8))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "tensorflow"])
def test_each_of_many_trainings_counts_steps(programs: RecordedPrograms, backend: str) -> None:
    run = programs.run(backend, "many_trainings")
    result = programs.results(backend)["many_trainings"]
    assert result["equal"]
    assert result["faults"] == {}
    assert figures(run, "loss") == pytest.approx(dict(enumerate(result["losses"])), rel=1e-5)


@pytest.mark.parametrize("backend", UNUSUAL_BACKENDS)
def test_a_copy_of_the_callback_is_the_same_recording(programs: RecordedPrograms, backend: str) -> None:
    assert programs.run(backend, "copied").steps("train") == [0, 1, 2, 3]


def test_a_module_of_the_program_with_the_name_of_a_framework_is_none(tmp_path: Path) -> None:
    for name in ("keras", "jax", "optax", "tensorflow", "xgboost", "lightgbm", "torch"):
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    done = subprocess.run(
        [sys.executable, "-c", "import keras, jax, optax, tensorflow, xgboost, lightgbm, torch"],
        cwd=tmp_path,
        env=environment_of(tmp_path, INJECTED, WATCHSTEP_STORE=str(tmp_path / "runs")),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
