"""Activations of modules of Flax NNX, Flax linen and Equinox: names, steps and figures, and that programs compute what they compute without them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.processes import environment_of, run_python

pytest.importorskip(
    "flax", reason="FLAX IS NOT INSTALLED: activations of JAX programs are not proven by this run"
)
pytest.importorskip(
    "equinox", reason="EQUINOX IS NOT INSTALLED: activations of JAX programs are not proven by this run"
)

import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.frameworks.jax import module_programs
from tests.frameworks.jax.module_programs import NAMES, SCAN, STEPS, TRAIN, batches, loss_of
from tests.frameworks.recorded_programs import values
from watchstep import CaptureConfig, Hook, open_run
from watchstep.jax import Recording
from watchstep.jax.activations import modules
from watchstep.jax.activations.activation_ring import activation_ring
from watchstep.jax.recording import install
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.config.defaults import DEFAULT_RULES

ROOT = Path(__file__).parents[3]
EVERYTHING = CaptureConfig(overhead_budget=None)
LIBRARIES = tuple(TRAIN)
HEALTHY_STEPS = 40


@pytest.fixture(autouse=True, scope="module")
def _observed_from_the_start() -> None:
    """Let the tests create optimizers and steps before their recording."""
    install()


def recorded(
    store: Path, program: Callable[[], Any], *, config: CaptureConfig = EVERYTHING, **options: Any
) -> tuple[Any, Any, Any]:
    """Run a program with a recording of activations; returns its result, the hook's health, and the run."""
    hook = Hook(store, run="r", config=config)
    Recording(hook, activations=True, **options)
    try:
        result = program()
    finally:
        hook.close()
    assert not hook.health["faults"]
    return result, hook.health, open_run(store / "default" / "r")


class Trainings:
    """Recorded trainings of each library, and their losses without recording. Each is made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cache  # noqa: B019 - one object for the module
    def plain(self, library: str) -> list[str]:
        return TRAIN[library](STEPS)

    @cache  # noqa: B019 - as above
    def train(self, library: str) -> tuple[Any, Any, Any]:
        return recorded(self._folder / library / "train", lambda: TRAIN[library](HEALTHY_STEPS))

    @cache  # noqa: B019 - as above
    def scan(self, library: str) -> tuple[Any, Any, Any]:
        return recorded(self._folder / library / "scan", SCAN[library])


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(tmp_path_factory.mktemp("trainings"))


def outputs_of(run: Any) -> list[Any]:
    """Descriptions of activations, in their order."""
    infos = [info for info in run.catalogue if "activations" in info.collections]
    assert {info.role for info in infos} <= {"output"}
    return sorted(infos, key=lambda info: info.order)


def probe(run: Any, name: str, figure: str) -> list[float]:
    found: list[float] = run.series(name, figure)[figure].to_pylist()
    return found


def adam_step(loss_of_params: Callable[[Any, Any], Any]) -> Callable[[Any, int], tuple[Any, list[Any]]]:
    """A compiled step for a loss, and a loop over batches."""
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of_params)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def train(params: Any, steps: int) -> tuple[Any, list[Any]]:
        state, losses = optimizer.init(params), []
        for batch in batches(steps):
            params, state, loss = step(params, state, batch)
            losses.append(loss)
        return params, losses

    return train


@pytest.mark.parametrize("library", LIBRARIES)
def test_outputs_have_the_names_of_layers_and_results_are_those_without_recording(
    library: str, trainings: Trainings
) -> None:
    losses, health, run = trainings.train(library)
    assert losses[:STEPS] == trainings.plain(library)
    assert "jax" not in health["notes"]
    first, second, third = NAMES[library]
    found = outputs_of(run)
    assert [info.name for info in found] == [
        f"{first}:output",
        "model:relu_0",
        f"{second}:output",
        "model:relu_1",
        f"{third}:output",
    ]
    layer = "Dense" if library == "linen" else "Linear"
    assert [info.module_type for info in found] == [layer, "ReLU", layer, "ReLU", layer]
    assert [info.shape for info in found] == [(32, 16)] * 4 + [(32, 3)]
    assert {info.module for info in found} >= {info.module for info in run.catalogue if info.role == "weight"}
    for info in found:
        assert run.tensor(info.name).steps() == list(range(HEALTHY_STEPS))
    assert set(probe(run, "model:relu_0", "channels")) == {16.0}
    assert max(probe(run, "model:relu_0", "dead_channels")) <= 2
    assert min(values(run, "model:relu_0", "min")) == 0.0
    assert not modules.observes_modules()


@pytest.mark.parametrize(
    "library",
    [pytest.param(name, marks=[] if name == "nnx" else pytest.mark.release) for name in LIBRARIES],
)
def test_a_scan_over_steps_has_the_rows_of_single_steps(library: str, trainings: Trainings) -> None:
    losses, _, run = trainings.scan(library)
    assert losses == SCAN[library]()
    _, _, single = trainings.train(library)
    assert [info.name for info in outputs_of(run)] == [info.name for info in outputs_of(single)]
    for info in outputs_of(run):
        assert run.tensor(info.name).steps() == list(range(STEPS))
        for column in ("count", "mean", "max", "square_sum"):
            of_scan, of_steps = values(run, info.name, column), values(single, info.name, column)
            assert of_scan == pytest.approx(of_steps[:STEPS], rel=1e-5)


def test_figures_are_those_of_the_output_before_the_update(tmp_path: Path) -> None:
    network = module_programs.LinenNetwork()
    params = network.init(jax.random.key(0), batches()[0])
    train = adam_step_of(network)
    _, _, run = recorded(tmp_path, lambda: train(params, 2))
    for step in range(2):
        _, captured = network.apply(train(params, step)[0], batches()[step], capture_intermediates=True)
        output = np.asarray(captured["intermediates"]["second"]["__call__"][0])
        assert values(run, "second:output", "count")[step] == output.size
        assert values(run, "second:output", "max")[step] == pytest.approx(output.max(), rel=1e-5)
        assert values(run, "second:output", "square_sum")[step] == pytest.approx((output**2).sum(), rel=1e-5)


def adam_step_of(network: Any) -> Callable[[Any, int], tuple[Any, list[Any]]]:
    return adam_step(lambda params, batch: loss_of(network.apply(params, batch)))


@pytest.mark.parametrize("library", LIBRARIES)
def test_dead_rectifiers_are_reported_by_the_default_rules(
    library: str, trainings: Trainings, tmp_path: Path
) -> None:
    _, _, dead = recorded(tmp_path, lambda: TRAIN[library](bias=-100.0))
    outcomes = {outcome.config.rule: outcome for outcome in backtest(dead.rows(), DEFAULT_RULES)}
    # The next layer receives zeros: without a bias its rectifier is dead, too.
    dead_layers = {"model:relu_0"} if library == "equinox" else {"model:relu_0", "model:relu_1"}
    assert {finding.tensor for finding in outcomes["dead_relu"].findings} == dead_layers
    _, _, healthy = trainings.train(library)
    assert [outcome.config.rule for outcome in backtest(healthy.rows(), DEFAULT_RULES) if outcome.fired] == []


def test_saturated_functions_of_a_module_are_reported(tmp_path: Path) -> None:
    class Network(nnx.Module):
        def __init__(self) -> None:
            scale = nnx.initializers.normal(100.0)
            self.first = nnx.Linear(4, 16, kernel_init=scale, rngs=nnx.Rngs(0))
            self.second = nnx.Linear(16, 3, rngs=nnx.Rngs(1))

        def __call__(self, batch: Any) -> Any:
            return self.second(nnx.tanh(self.first(batch)))

    graph, params = nnx.split(Network())
    train = adam_step(lambda params, batch: jnp.mean((nnx.merge(graph, params)(batch) - 50.0) ** 2))
    _, _, run = recorded(tmp_path, lambda: train(params, STEPS))
    outcomes = {outcome.config.rule: outcome for outcome in backtest(run.rows(), DEFAULT_RULES)}
    assert {finding.tensor for finding in outcomes["saturated_activation"].findings} == {"model:tanh_0"}


def test_nothing_is_wrapped_or_recorded_without_a_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules._patches, "_apply", lambda: pytest.fail("classes were changed"))
    hook = Hook(tmp_path, run="r", config=EVERYTHING)
    Recording(hook)
    TRAIN["nnx"](2)
    hook.close()
    assert outputs_of(open_run(tmp_path / "default" / "r")) == []
    without = CaptureConfig(
        collections={name: value for name, value in EVERYTHING.chosen.items() if name != "activations"}
    )
    _, _, run = recorded(tmp_path / "without", lambda: TRAIN["nnx"](2), config=without)
    assert outputs_of(run) == []


def test_classes_and_functions_are_the_programs_own_outside_of_traces(tmp_path: Path) -> None:
    before = (nnx.Linear.__call__, equinox.nn.Linear.__call__, jax.nn.sigmoid, jax.custom_jvp.__call__)
    recorded(tmp_path, lambda: (TRAIN["nnx"](2), TRAIN["equinox"](2)))
    assert (
        nnx.Linear.__call__,
        equinox.nn.Linear.__call__,
        jax.nn.sigmoid,
        jax.custom_jvp.__call__,
    ) == before


def test_a_change_of_what_is_due_compiles_nothing(tmp_path: Path) -> None:
    network = module_programs.LinenNetwork()
    traces = []

    def loss_of_params(params: Any, batch: Any) -> Any:
        traces.append(batch)
        return loss_of(network.apply(params, batch))

    train = adam_step(loss_of_params)
    params = network.init(jax.random.key(0), batches()[0])
    _, _, run = recorded(tmp_path, lambda: train(params, 130), config=CaptureConfig())
    assert len(traces) == 1
    assert run.tensor("first:output").steps() == [*range(0, 101, 10)]


@pytest.mark.parametrize("figures", ["host", "device"])
def test_a_shared_module_has_its_first_row_and_micro_batches_the_last(figures: str, tmp_path: Path) -> None:
    class Network(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, batch: Any) -> Any:
            shared = flax.linen.Dense(4, name="shared")
            return shared(shared(batch) * 100.0)

    network = Network()
    start = network.init(jax.random.key(0), batches()[0])
    optimizer = optax.MultiSteps(optax.sgd(1e-6), 2)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda params: loss_of(network.apply(params, batch)))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def train() -> None:
        params, state = start, optimizer.init(start)
        for batch in batches(4):
            params, state, _ = step(params, state, batch)

    _, _, run = recorded(tmp_path, train, figures=figures)
    assert run.tensor("shared:output").steps() == [0, 1]
    shared = start["params"]["shared"]
    largest = float((batches(4)[1] @ shared["kernel"] + shared["bias"]).max())
    assert values(run, "shared:output", "max")[0] == pytest.approx(largest, rel=1e-4)


def test_layers_under_a_scan_and_recomputation_have_the_row_of_the_first_layer(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    stack, static = equinox.partition(
        equinox.filter_vmap(lambda key: equinox.nn.Linear(4, 4, key=key))(keys), equinox.is_array
    )

    def apply(stack: Any, batch: Any) -> Any:
        @jax.checkpoint
        def layer(batch: Any, params: Any) -> Any:
            output = jax.vmap(equinox.combine(params, static))(batch)
            return jnp.tanh(output), output

        return jax.lax.scan(layer, batch, stack)

    train = adam_step(lambda stack, batch: loss_of(apply(stack, batch)[0]))
    plain = train(stack, 3)[1]
    (_, losses), _, run = recorded(
        tmp_path, lambda: adam_step(lambda stack, batch: loss_of(apply(stack, batch)[0]))(stack, 3)
    )
    assert losses == plain
    assert [info.name for info in outputs_of(run)] == ["model:output"]
    first = jax.vmap(equinox.combine(jax.tree_util.tree_map(lambda leaf: leaf[0], stack), static))(
        batches()[0]
    )
    assert values(run, "model:output", "max")[0] == pytest.approx(float(first.max()), rel=1e-4)


def test_evaluations_are_not_recorded(tmp_path: Path) -> None:
    network = module_programs.LinenNetwork()
    start = network.init(jax.random.key(0), batches()[0])
    train = adam_step_of(network)

    @jax.jit
    def sensitivity(params: Any, batch: Any) -> Any:
        return jax.grad(lambda batch: loss_of(network.apply(params, batch)))(batch)

    def program() -> None:
        params, _ = train(start, 2)
        sensitivity(params, batches()[0][:5] * 1000)
        jax.jit(network.apply)(params, batches()[0][:7] * 1000)
        train(params, 1)

    _, _, run = recorded(tmp_path, program)
    assert [info.shape for info in outputs_of(run)] == [(32, 16)] * 4 + [(32, 3)]
    assert max(values(run, "first:output", "max")) < 100


def test_parts_of_a_model_have_the_names_of_the_whole(tmp_path: Path) -> None:
    class Critic(nnx.Module):
        def __init__(self) -> None:
            self.actor = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.relu)
            self.value = nnx.Linear(8, 3, rngs=nnx.Rngs(1))

    graph, params = nnx.split(Critic())

    def loss_of_params(params: Any, batch: Any) -> Any:
        model = nnx.merge(graph, params)
        return loss_of(model.value(model.actor(batch)))

    _, _, run = recorded(tmp_path, lambda: adam_step(loss_of_params)(params, 2))
    assert [info.name for info in outputs_of(run)] == [
        "actor.layers.0:output",
        "actor:relu_0",
        "value:output",
    ]


def test_transformations_without_rows_leave_the_program_as_it_is(tmp_path: Path) -> None:
    layer = equinox.nn.Linear(4, 4, key=jax.random.key(0))

    def loss_of_layer(layer: Any, batch: Any) -> Any:
        return loss_of(jax.vmap(jax.jit(layer))(batch))

    params, static = equinox.partition(layer, equinox.is_array)

    def train() -> Any:
        step = adam_step(lambda params, batch: loss_of_layer(equinox.combine(params, static), batch))
        return step(params, 3)[1]

    plain = train()
    losses, health, run = recorded(tmp_path, train)
    assert losses == plain
    assert "not observed" in health["notes"]["activations"]
    assert run.tensor("loss").steps() == [0, 1, 2]


def test_updates_of_a_population_are_not_observed(tmp_path: Path) -> None:
    network = flax.linen.Dense(4)
    start = {"params": {"kernel": jnp.ones((2, 4, 4)), "bias": jnp.zeros((2, 4))}}
    optimizer = optax.sgd(0.1)

    def train() -> Any:
        @jax.jit
        def step(params: Any, batch: Any) -> Any:
            def update(params: Any) -> Any:
                gradients = jax.grad(lambda params: loss_of(network.apply(params, batch)))(params)
                updates, _ = optimizer.update(gradients, optimizer.init(params), params)
                return optax.apply_updates(params, updates)

            return jax.vmap(update)(params)

        params = start
        for batch in batches(3):
            params = step(params, batch)
        return float(jax.tree_util.tree_leaves(params)[0].sum()).hex()

    plain = train()
    result, health, _ = recorded(tmp_path, train)
    assert result == plain
    assert "vmap" in health["notes"]["jax"]


def test_a_fault_of_the_recorder_is_counted_and_the_program_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TRAIN["nnx"](3)

    def fail(*_: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(activation_ring, "write", fail)
    hook = Hook(tmp_path, run="r", config=EVERYTHING)
    Recording(hook, activations=True)
    losses = TRAIN["nnx"](3)
    hook.close()
    assert losses == plain
    assert "a fault" in hook.health["faults"]["activations"]


def test_a_step_whose_rows_jax_cannot_transform_is_compiled_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = jax.new_ref(jnp.zeros(2))

    def write(_: Any, array: Any) -> None:  # has no rule for jax.checkpoint
        jax.lax.cond(array.sum() > 0, lambda: reference.__setitem__(0, 1.0), lambda: None)

    monkeypatch.setattr(activation_ring, "write", write)
    network = flax.linen.Dense(3)
    params = network.init(jax.random.key(0), batches()[0])

    def train() -> Any:
        return adam_step(lambda params, batch: loss_of(jax.checkpoint(network.apply)(params, batch)))(
            params, 3
        )[1]

    plain = train()
    losses, health, run = recorded(tmp_path, train)
    assert losses == plain
    assert "not observed" in health["notes"]["activations"]
    assert run.tensor("loss").steps() == [0, 1, 2]


def recorded_with_faults(store: Path, program: Callable[[], Any]) -> tuple[Any, Any, Any]:
    hook = Hook(store, run="r", config=EVERYTHING)
    Recording(hook, activations=True)
    try:
        result = program()
    finally:
        hook.close()
    return result, hook.health, open_run(store / "default" / "r")


def test_a_failed_dispatch_leaves_the_next_ones_usable(tmp_path: Path) -> None:
    network = module_programs.LinenNetwork()
    start = network.init(jax.random.key(0), batches()[0])
    optimizer = optax.sgd(0.1)

    def check(value: Any) -> None:
        if not np.isfinite(value):
            raise ValueError("not finite")

    @jax.jit
    def step(params: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda params: loss_of(network.apply(params, batch)))(params)
        jax.debug.callback(check, loss)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates), loss

    def train() -> int:
        params, failed = start, 0
        for number, batch in enumerate(batches(6)):
            try:
                after, loss = step(params, batch * np.nan if number == 2 else batch)
                jax.block_until_ready((after, loss))
                jax.effects_barrier()
                params = after
            except Exception:  # noqa: BLE001 - of the program
                failed += 1
        return failed

    failed, _, run = recorded_with_faults(tmp_path, train)
    assert failed == 1
    assert len(run.tensor("first:output").steps()) >= 4


PROGRAM = """
from tests.frameworks.jax.module_programs import train_linen
train_linen(3)
"""


@pytest.mark.parametrize("names_it", [True, pytest.param(False, marks=pytest.mark.release)])
def test_watchstep_run_records_them_if_the_configuration_names_them(names_it: bool, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    collections = {("activations" if names_it else "gradients"): {"cadence": {"every": 1}}}
    environment = environment_of(
        tmp_path,
        JAX_PLATFORMS="cpu",
        WATCHSTEP_STORE=str(tmp_path / "store"),
        WATCHSTEP_RUN="r",
        WATCHSTEP_CAPTURE=json.dumps({"collections": collections}),
    )
    command = ("-m", "watchstep.command", "run", "--", sys.executable, program)
    run_python(*command, cwd=ROOT, env=environment, timeout=120)
    run = open_run(tmp_path / "store" / "default" / "r")
    names = [info.name for info in outputs_of(run)]
    assert ("first:output" in names) == names_it
    if names_it:
        assert run.tensor("first:output").steps() == [0, 1, 2]
