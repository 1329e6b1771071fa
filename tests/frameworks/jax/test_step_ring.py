"""A ring of steps records updates inside of scans and loops, changes no loss, compiles nothing again, and never breaks the program."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import run_python

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402

from tests.frameworks.jax.rows import assert_same_rows, native_rows  # noqa: E402
from watchstep.errors import ConfigError  # noqa: E402
from watchstep.jax.internals import has_rings  # noqa: E402
from watchstep.jax.ring.ring_reader import RingReader  # noqa: E402
from watchstep.jax.ring.ring_snapshots import RingStep  # noqa: E402
from watchstep.jax.ring.step_ring import StepRing, check_rings  # noqa: E402
from watchstep.jax.traced_updates import TracedUpdate, outputs_of  # noqa: E402

if not has_rings():
    pytest.skip("this JAX has no jax.new_ref", allow_module_level=True)

WIDTH, LAYERS, LENGTH, BATCH = 8, 3, 5, 2
OPTIMIZER = optax.adamw(1e-2)
Record = Callable[..., Any]


def parameters() -> dict[str, Any]:
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(generator.standard_normal(shape) * 0.3, np.float32)

    stack = {name: normal(LAYERS, WIDTH, WIDTH) for name in ("hidden", "key", "output", "query", "value")}
    return {**stack, "head": normal(WIDTH, WIDTH)}


STACKED = (False, True, True, True, True, True)
"""In the order of the leaves: the head first."""


def loss_of(params: dict[str, Any], batch: Any) -> Any:
    """A transformer whose layers are scanned."""

    def layer(x: Any, weights: dict[str, Any]) -> tuple[Any, None]:
        q, k, v = (x @ weights[name] for name in ("query", "key", "value"))
        x = x + jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2), axis=-1) @ v
        return x + jax.nn.gelu(x @ weights["hidden"]) @ weights["output"], None

    stack = {name: value for name, value in params.items() if name != "head"}
    x, _ = lax.scan(layer, batch, stack)
    return jnp.mean((x @ params["head"] - batch) ** 2)


def step_of(record: Record) -> Callable[[Any, Any], tuple[Any, Any]]:
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, optimizer_state = state
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        record(jax.tree.leaves(gradients), jax.tree.leaves(params), loss, stacked=STACKED)
        updates, optimizer_state = OPTIMIZER.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    return step


def scanned(record: Record) -> Any:
    """Several steps in one dispatch."""
    return jax.jit(lambda state, batches: lax.scan(step_of(record), state, batches), donate_argnums=0)


def start() -> Any:
    params = parameters()
    return params, OPTIMIZER.init(params)


def batches(steps: int, bad: int | None = None) -> Any:
    values = np.random.default_rng(1).standard_normal((steps, BATCH, LENGTH, WIDTH)).astype(np.float32)
    if bad is not None:
        values[bad, 0, 0, 0] = np.nan
    return jnp.asarray(values)


def nothing(*_: Any, **__: Any) -> None:
    return None


def unreachable(reason: str) -> None:
    raise AssertionError(reason)


def run(
    ring: StepRing | None, program: Any, data: Any, per_dispatch: int
) -> tuple[list[float], list[RingStep]]:
    state, losses, steps, snapshot = start(), [], [], None
    for first in range(0, len(data), per_dispatch):
        part = data[first : first + per_dispatch]
        state, loss = program(state, part if per_dispatch > 1 else part[0])
        losses.extend(np.asarray(loss).reshape(-1).tolist())
        if ring is not None:
            if snapshot is not None:
                steps.extend(ring.read(snapshot))
            snapshot = ring.snapshot()
    if ring is not None:
        while more := ring.read(snapshot):
            steps.extend(more)
            snapshot = ring.snapshot()
        snapshot = ring.snapshot()
        steps.extend(ring.read(snapshot))
    return losses, steps


def test_steps_of_a_scan_are_numbered_and_losses_are_equal() -> None:
    data = batches(40)
    plain, _ = run(None, scanned(nothing), data, 10)
    ring = StepRing(every=15, note=unreachable)
    losses, steps = run(ring, scanned(ring.record), data, 10)
    assert losses == plain
    assert [step.number for step in steps] == list(range(40))
    assert [step.loss for step in steps] == losses
    assert [step.number for step in steps if step.gradients is not None] == [0, 15, 30]
    assert not any(step.is_bad or step.is_skipped for step in steps)
    assert (ring.missed_steps, ring.missed_rows) == (0, 0)


def test_one_step_per_dispatch_is_recorded_without_recompilation() -> None:
    data = batches(200)
    plain_program = jax.jit(step_of(nothing), donate_argnums=0)
    plain, _ = run(None, plain_program, data, 1)
    ring = StepRing(every=50, note=unreachable)
    program = jax.jit(step_of(ring.record), donate_argnums=0)
    losses, steps = run(ring, program, data, 1)
    assert losses == plain
    assert [step.loss for step in steps] == losses
    assert [step.number for step in steps if step.gradients is not None] == [0, 50, 100, 150]
    assert program._cache_size() == plain_program._cache_size() == 1


def test_rows_are_those_of_the_gradients_and_weights() -> None:
    ring = StepRing(every=2, note=unreachable)
    _, steps = run(ring, scanned(ring.record), batches(3), 3)
    params = parameters()
    gradients = jax.jit(jax.grad(loss_of))(params, batches(3)[0])
    for rows, tree in ((steps[0].gradients, gradients), (steps[0].weights, params)):
        assert rows is not None
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        parts = [
            part for leaf, flag in zip(leaves, STACKED, strict=True) for part in (leaf if flag else [leaf])
        ]
        native, batch = native_rows(parts), rows.statistics
        assert len(batch) == 5 * LAYERS + 1
        if tree is params:
            assert_same_rows(batch, native)
        else:  # another program may round otherwise
            np.testing.assert_allclose(batch.square_sum, native.square_sum, rtol=1e-3)
    assert steps[1].gradients is None
    assert steps[2].gradients is not None


def test_bad_steps_are_flagged_and_the_first_of_them_has_rows() -> None:
    ring = StepRing(every=100, row_slots=2, note=unreachable)
    losses, steps = run(ring, scanned(ring.record), batches(30, bad=17), 30)
    assert [step.number for step in steps if step.is_bad] == list(range(17, 30))
    assert math.isnan(losses[17])
    assert [step.number for step in steps if step.gradients is not None] == [0, 17]
    bad = steps[17]
    assert bad.gradients is not None
    assert bad.weights is not None
    assert bad.gradients.has_nonfinite(0, 1)
    assert not bad.weights.has_nonfinite(0, 1)


def test_large_rows_arrive_with_the_next_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watchstep.jax.ring.step_ring._SMALL_ROWS", 0)
    ring = StepRing(every=100, note=unreachable)
    program, state = scanned(ring.record), start()
    state, _ = program(state, batches(10, bad=4))
    first = ring.snapshot()
    assert first is not None
    assert not first.has_rows
    assert ring.read(first) == []
    assert ring.has_pending_bad
    second = ring.snapshot()
    assert second is not None
    steps = ring.read(second)
    assert [step.number for step in steps] == list(range(10))
    assert [step.number for step in steps if step.gradients is not None] == [0, 4]
    assert not ring.has_pending_bad
    third, last = ring.snapshot(), ring.snapshot(with_rows=True)
    assert third is not None
    assert not third.has_rows
    assert last is not None
    assert last.has_rows


def test_overwritten_steps_are_counted() -> None:
    ring = StepRing(every=4, slots=8, max_slots=8, row_slots=1, note=unreachable)
    _, steps = run(ring, scanned(ring.record), batches(20), 20)
    assert [step.number for step in steps] == list(range(12, 20))
    assert ring.missed_steps == 12
    assert [step.number for step in steps if step.gradients is not None] == [16]
    assert ring.missed_rows == 1


def test_the_cadence_changes_without_recompilation() -> None:
    ring = StepRing(every=0, note=unreachable)
    program, state = scanned(ring.record), start()
    state, _ = program(state, batches(6))
    ring.every = 2
    steps = ring.read(ring.snapshot())
    state, _ = program(state, batches(6))
    steps += ring.read(ring.snapshot())
    assert [step.number for step in steps if step.gradients is not None] == [6, 8, 10]
    assert program._cache_size() == 1
    with pytest.raises(ConfigError, match="every=-1"):
        ring.every = -1


def test_loops_and_updates_that_are_not_emitted() -> None:
    """As `optax.MultiSteps` and `optax.apply_if_finite` make them."""
    ring = StepRing(every=1, row_slots=8, note=unreachable)

    def body(index: Any, weight: Any) -> Any:
        ring.record([weight * 2], [weight], index * 0.5, emitted=index % 3 == 2, skipped=index == 5)
        return weight * 0.5

    with_loop = jax.jit(lambda weight: lax.fori_loop(0, 9, body, weight))
    assert float(with_loop(jnp.ones(()))) == 2.0**-9
    steps = ring.read(ring.snapshot())
    assert [(step.number, step.loss, step.is_skipped) for step in steps] == [
        (0, 1.0, False),
        (1, 2.5, True),
        (2, 4.0, False),
    ]
    assert [step.weights.statistics.mean[0] for step in steps if step.weights] == [2.0**-2, 2.0**-5, 2.0**-8]


def test_a_ring_inside_of_while_remat_and_grad() -> None:
    ring = StepRing(every=1, note=unreachable)

    def inner(weight: Any) -> Any:
        return jnp.sin(weight).sum()

    def program(weight: Any) -> Any:
        def body(carry: tuple[Any, Any]) -> tuple[Any, Any]:
            count, weight = carry
            loss, gradient = jax.value_and_grad(jax.checkpoint(inner))(weight)
            ring.record([gradient], loss=loss)
            return count + 1, weight - 0.1 * gradient

        return lax.while_loop(lambda carry: carry[0] < 3, body, (0, weight))[1]

    jax.jit(program)(jnp.ones(4))
    steps = ring.read(ring.snapshot())
    assert [step.number for step in steps] == [0, 1, 2]
    assert all(step.weights is None and step.gradients is not None for step in steps)


def test_updates_inside_of_a_differentiated_function_are_noted() -> None:
    """As meta-learning makes them."""
    notes: list[str] = []
    ring = StepRing(note=notes.append)

    def inner(weight: Any) -> Any:
        def body(carry: Any, _: Any) -> tuple[Any, None]:
            loss, gradient = jax.value_and_grad(lambda x: (x**2).sum())(carry)
            ring.record([gradient], [carry], loss)
            return carry - 0.5 * gradient, None

        return lax.scan(jax.checkpoint(body), weight, None, length=3)[0].sum()

    assert jax.jit(jax.grad(inner))(jnp.ones(2)).tolist() == [0, 0]
    assert set(notes) == {"an update inside of a differentiated function is not observed"}


@pytest.mark.release
def test_a_program_over_several_devices_runs(tmp_path: Path) -> None:
    """Neither a ring with a sharding nor one without breaks it."""
    program = Path(__file__).parent / "sharded_ring_program.py"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    output = run_python(program, env=environment, timeout=120)
    assert json.loads(output) == [[[0, 1, 2, 3], [0, 2], 1]] * 2 + [[True, [32, 16] * 14]]


@pytest.mark.parametrize("transformation", ["vmap", "vmap of jit", "pmap", "shard_map", "export"])
def test_other_transformations_run_unchanged_with_a_note(transformation: str) -> None:
    notes: list[str] = []
    ring = StepRing(note=notes.append)

    def update(weight: Any) -> Any:
        ring.record([weight], loss=weight.sum())
        return weight * 2

    weights = jnp.arange(3.0).reshape(1, 3)
    if transformation == "vmap":
        result = jax.jit(jax.vmap(update))(weights)
    elif transformation == "vmap of jit":
        result = jax.vmap(jax.jit(update))(weights)
    elif transformation == "pmap":
        result = jax.pmap(update)(weights)
    elif transformation == "shard_map":
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("x")
        result = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=spec, out_specs=spec))(weights)
    else:
        from jax import export

        result = export.export(jax.jit(update))(weights).call(weights)
    assert result.tolist() == [[0, 2, 4]]
    assert notes == [f"an update inside of {transformation.partition(' ')[0]} is not observed"]
    assert ring.snapshot() is None


def test_what_cannot_be_recorded_is_noted_and_the_program_runs() -> None:
    notes: list[str] = []
    ring = StepRing(note=notes.append)

    def update(weight: Any) -> Any:
        ring.record([weight], loss=weight)
        ring.record([weight], loss=weight[0])
        ring.record([weight, weight])
        ring.record([weight], [weight, weight])
        ring.record([jax.random.key(0)])
        return weight + 1

    assert jax.jit(update)(jnp.zeros(2)).tolist() == [1, 1]
    for note, words in zip(
        notes,
        ("a loss of shape", "of other tensors than before", "2 weights", "key<fry> cannot"),
        strict=True,
    ):
        assert words in note
    assert [step.number for step in ring.read(ring.snapshot())] == [0]


def test_entries_of_the_persistent_cache_are_written(tmp_path: Path) -> None:
    from jax.experimental.compilation_cache import compilation_cache

    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = [getattr(jax.config, name) for name in names]
    try:
        for name, value in zip(names, (str(tmp_path), 0, -1), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        ring = StepRing(note=unreachable)

        def recorded_program(weight: Any) -> Any:
            ring.record([weight])
            return weight + 1

        jax.jit(recorded_program)(jnp.ones(3))
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert any("recorded_program" in path.name for path in tmp_path.iterdir())


def failing(ring: StepRing, calls: list[int]) -> Any:
    """A program of three updates whose callback raises in calls of numbers below 0."""

    def load(number: Any) -> Any:
        if number < 0:
            raise ValueError("a sample that cannot be read")
        return np.float32(number)

    def program(weight: Any, number: Any) -> Any:
        calls.append(1)

        def body(weight: Any, _: Any) -> tuple[Any, Any]:
            sample = jax.pure_callback(load, jax.ShapeDtypeStruct((), jnp.float32), number)
            ring.record([weight * sample], [weight], weight.sum())
            return weight + sample, None

        return lax.scan(body, weight, None, length=3)[0]

    return jax.jit(program, donate_argnums=0)


class Owner:
    """Reads a ring."""


def incrementing(ring: StepRing) -> Any:
    """A program of one update."""

    def program(weight: Any) -> Any:
        ring.record([weight])
        return weight + 1

    return jax.jit(program)


def test_a_failed_dispatch_breaks_no_later_one(caplog: pytest.LogCaptureFixture) -> None:
    notes: list[str] = []
    traces: list[int] = []
    ring = StepRing(every=3, note=notes.append)
    program, steps, snapshot = failing(ring, traces), [], None
    for number in (1, 2, -1, -1, 3, -1, 4):
        try:
            assert ring.check()
            result = program(jnp.ones(2), number)
            assert result.tolist() == [1 + 3 * number] * 2
            snapshot = ring.snapshot()
        except jax.errors.JaxRuntimeError:
            assert ring.repair()
            assert number < 0
            continue
        steps.extend(ring.read(snapshot))
    assert "has been deleted" not in caplog.text
    assert [step.number for step in steps] == list(range(12))
    assert [step.loss for step in steps[-3:]] == [2, 10, 18]
    assert [step.number for step in steps if step.gradients is not None] == [0, 3, 6, 9]
    assert (ring.missed_steps, notes, len(traces)) == (0, [], 1)


def test_a_snapshot_from_before_a_failed_dispatch_is_read_after_it() -> None:
    ring = StepRing(every=0, note=unreachable)
    program = failing(ring, [])
    program(jnp.ones(2), 1)
    before = ring.snapshot()
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(program(jnp.ones(2), -1))
    assert ring.repair()
    program(jnp.ones(2), 2)
    after = ring.snapshot()
    assert [step.number for step in (*ring.read(before), *ring.read(after))] == list(range(6))


def test_deleted_memory_is_replaced_and_waiting_for_it_does_not_raise() -> None:
    ring = StepRing(every=1, note=unreachable)
    program = incrementing(ring)
    program(jnp.ones(2))
    snapshot = ring.snapshot()
    assert snapshot is not None
    for array in snapshot.arrays:
        array.delete()
    snapshot.wait()
    assert snapshot.is_ready
    assert ring.read(snapshot) == []
    for ref in ring._storages[0].refs:
        ref._refs._buf.delete()
    assert check_rings()
    program(jnp.ones(2))
    assert [step.number for step in ring.read(ring.snapshot())] == [0]


def test_without_access_to_the_memory_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watchstep.jax.ring.step_ring.buffer_of", lambda _: None)
    notes: list[str] = []
    ring = StepRing(note=notes.append)
    assert incrementing(ring)(jnp.ones(2)).tolist() == [2, 2]
    assert len(notes) == 1
    assert "has other Refs" in notes[0]
    assert not ring.is_traced


def test_a_nan_among_overwritten_steps_is_found() -> None:
    ring = StepRing(every=0, slots=8, max_slots=8, note=unreachable)
    data = np.zeros((60, 2), np.float32)
    data[[5, 6, 45, 46]] = np.nan

    def body(weight: Any, values: Any) -> tuple[Any, None]:
        ring.record([values], loss=values.sum())
        return weight, None

    program = jax.jit(lambda values: lax.scan(body, 0.0, values)[0])
    for expected in ([(5, True), (12, False)], [(25 + 20, True), (52, False)]):
        part = data[:20] if expected[0][0] == 5 else data[20:]
        program(jnp.asarray(part))
        steps = ring.read(ring.snapshot())
        assert [(step.number, step.is_bad) for step in steps[:2]] == expected
        assert not any(step.is_bad for step in steps[1:])
        assert steps[0].loss is None
        # Rows of the first bad update of a streak outlast its own entry.
        assert steps[0].gradients is not None
        ring.read(ring.snapshot())
        ring.snapshot()
    assert ring.missed_steps == 12 + 32


def test_slots_grow_with_the_length_of_a_scan() -> None:
    ring = StepRing(every=0, note=unreachable)

    def body(weight: Any, _: Any) -> tuple[Any, None]:
        ring.record([weight])
        return weight + 1, None

    def nested(weight: Any, _: Any) -> tuple[Any, None]:
        return lax.scan(body, weight, None, length=100)[0], None

    jax.jit(lambda weight: lax.scan(nested, weight, None, length=10)[0])(jnp.zeros(1))
    assert [step.number for step in ring.read(ring.snapshot())] == list(range(1000))
    assert ring.missed_steps == 0


def test_a_later_owner_continues_with_the_programs_of_an_earlier_one() -> None:
    def take(owner: object) -> StepRing:
        return StepRing.shared(("a model",), owner, every=2, row_slots=4, note=unreachable)

    first, second, third = Owner(), Owner(), Owner()
    traces: list[int] = []
    ring = take(first)
    program = failing(ring, traces)
    program(jnp.ones(2), 1)
    assert len(ring.read(ring.snapshot())) == 3
    other = take(second)
    assert other is not ring
    program(jnp.ones(2), 1)  # not read by its owner
    ring.release()
    again = take(third)
    assert again is ring
    assert again.is_traced
    assert again.check()
    program(jnp.ones(2), 2)
    steps = again.read(again.snapshot())
    assert [(step.number, step.loss) for step in steps] == [(0, 2), (1, 6), (2, 10)]
    assert [step.number for step in steps if step.gradients is not None] == [0, 2]
    assert len(traces) == 1


def test_a_ring_without_programs_and_owner_is_collected() -> None:
    owner = Owner()
    ring = StepRing.shared(("collected",), owner, every=1, row_slots=1, note=unreachable)
    program, reference = incrementing(ring), weakref.ref(ring)
    program(jnp.ones(2))
    del ring
    gc.collect()
    assert reference() is not None
    del program
    jax.clear_caches()
    gc.collect()
    assert reference() is None


def looping(reader: RingReader) -> Any:
    """A program that makes as many updates as its argument has rows, whose number is not fixed."""

    def program(values: Any, count: Any) -> Any:
        def body(index: Any, weight: Any) -> Any:
            gradient = [values[index]]
            update = TracedUpdate(gradient, None)
            reader.trace(update, outputs_of(update, values[index].sum(), {}))
            return weight + 1

        return lax.fori_loop(0, count, body, 0)

    return jax.jit(program)


def test_steps_are_numbered_across_overwritten_ones_and_recordings(tmp_path: Path) -> None:
    """The second recording has no trace of its own."""
    from watchstep import Hook, open_run
    from watchstep.format.tensors import TensorInfo
    from watchstep.updates.update_recorder import UpdateRecorder

    data, program = np.ones((900, 2), np.float32), None
    data[610, 0] = np.inf
    for name, parts in (("first", [(0, 10), (10, 900), (0, 3)]), ("second", [(0, 10), (0, 3)])):
        with Hook(tmp_path, run=name) as hook:
            session = hook._session
            info = TensorInfo("w", (), "weight", shape=(2,), dtype="float32")
            reader = RingReader(session, UpdateRecorder(session, [info]), key=("two hooks",))
            program = program or looping(reader)
            for first, last in parts:
                reader.wait()
                assert reader.check()
                program(jnp.asarray(np.resize(data[first:last], (900, 2))), last - first)
                if reader.dispatched():
                    for step in reader.take():
                        reader.record(step, "loss")
            for step in reader.take_rest():
                reader.record(step, "loss")
            reader.release()
        run = open_run(tmp_path / "default" / name)
        losses = run.tensor("loss").steps()
        if name == "first":
            # 890 updates in one dispatch, of which 256 are in the ring.
            assert losses == [*range(10), *range(900 - 256, 903)]
            applied = run.tensor("gradients:nonfinite_applied")
            assert applied.steps()[0] == 610
        else:
            assert losses == list(range(13))


def test_wrong_arguments_raise() -> None:
    with pytest.raises(ConfigError, match="slots=0"):
        StepRing(slots=0)
