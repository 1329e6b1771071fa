"""The first bad operation of JAX programs: planted faults are named with operation, line and iteration, and healthy programs have none."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_python

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from jax import lax  # noqa: E402

from watchstep.errors import ConfigError  # noqa: E402
from watchstep.jax.replay.first_bad import FirstBad, JaxOperation  # noqa: E402
from watchstep.jax.replay.interpreter import evaluate_step, find_first_bad  # noqa: E402

ROOT = Path(__file__).parents[3]


def operation_of(first: FirstBad | None) -> JaxOperation:
    assert first is not None
    assert first.operation is not None
    return first.operation


def source_line(function: Callable[..., Any], text: str) -> int:
    """The number of the line of a function's source that contains a text."""
    lines, start = inspect.getsourcelines(function)
    (place,) = [place for place, line in enumerate(lines) if text in line]
    return start + place


def check(
    first: FirstBad | None, primitive: str, function: Callable[..., Any], text: str, path: str = ""
) -> None:
    operation = operation_of(first)
    assert first is not None
    assert first.cause == "operation"
    assert operation.primitive == primitive
    assert operation.site is not None
    assert Path(operation.site.file) == Path(__file__)
    assert operation.site.line == source_line(function, text)
    assert operation.path == (f"{path}/{primitive}" if path else primitive)
    assert all(value.health is None or value.health.is_finite for value in operation.inputs)
    assert any(value.health is not None and not value.health.is_finite for value in operation.outputs)


# Planted faults


def log_loss(weights: Any, x: Any) -> Any:
    probability = jax.nn.relu(x @ weights)
    return -jnp.log(probability).mean()


def test_log_of_zero_in_the_loss() -> None:
    first = find_first_bad(jax.jit(jax.value_and_grad(log_loss)), jnp.ones((3, 2)), jnp.zeros((4, 3)))
    check(first, "log", log_loss, "jnp.log")
    operation = operation_of(first)
    assert first is not None
    assert (operation.phase, operation.site and operation.site.function) == ("forward", "log_loss")
    assert operation.outputs[0].health is not None
    assert operation.outputs[0].health.negative_infinite == 8
    assert operation.inputs[0].shape == (4, 2)
    assert first.reaches[0] == "result[0]"
    assert "first bad operation: log (operation" in str(first)
    assert "return -jnp.log(probability).mean()" in str(first)
    assert "8 -inf of 8" in str(first)
    assert first.data()["operation"]["line"]["line"] == source_line(log_loss, "jnp.log")


def division(x: Any) -> Any:
    total = x.sum()
    return x / total


def test_a_division_of_zero_by_zero() -> None:
    first = find_first_bad(division, jnp.zeros(4))
    check(first, "div", division, "x / total")
    assert operation_of(first).outputs[0].health.nan == 4  # type: ignore[union-attr]


def exponential(x: Any) -> Any:
    return jnp.exp(x * 30).sum()


def test_an_overflow_of_exp() -> None:
    check(find_first_bad(jax.jit(exponential), jnp.arange(4.0)), "exp", exponential, "jnp.exp")


def conversion(x: Any) -> Any:
    return (x * 2).astype(jnp.float16)


def test_an_overflow_of_a_conversion() -> None:
    first = find_first_bad(conversion, jnp.array([1.0, 40_000.0]))
    check(first, "convert_element_type", conversion, "astype")


def layer(x: Any, weights: Any) -> tuple[Any, Any]:
    hidden = x @ weights
    return jnp.tanh(hidden) * hidden, hidden.mean()


def layers(weights: Any, x: Any) -> Any:
    x, means = lax.scan(layer, x, weights)
    return x.sum() + means.sum()


def test_an_overflow_in_a_scanned_layer() -> None:
    weights = jnp.stack([jnp.eye(4)] * 4).at[2].set(3e38)
    for step in (layers, jax.jit(jax.grad(layers))):
        first = find_first_bad(step, weights, jnp.ones((2, 4)))
        check(first, "dot_general", layer, "x @ weights", "scan[2]")
        assert [(each.loop, each.number) for each in operation_of(first).iterations] == [("scan", 2)]


def backward_layer(x: Any, scale: Any) -> tuple[Any, None]:
    return jnp.sqrt(x * scale), None


def scanned_root(x: Any, scales: Any) -> Any:
    return lax.scan(backward_layer, x, scales)[0].sum()


def test_a_fault_in_the_backward_pass_of_a_scan() -> None:
    # The derivative of the root at zero, in the last iteration, which the backward pass of the scan begins with.
    first = find_first_bad(jax.grad(scanned_root), jnp.ones(2), jnp.array([1.0, 1.0, 0.0]))
    operation = operation_of(first)
    assert operation.phase == "backward" or operation.path.startswith("scan[2]")
    assert operation.path.startswith("scan[2]/")
    assert operation.site is not None
    assert operation.site.line == source_line(backward_layer, "jnp.sqrt")


def doubling(x: Any) -> Any:
    def body(state: Any) -> Any:
        number, value = state
        return number + 1, value * value

    return lax.while_loop(lambda state: state[0] < 9, body, (0, x))[1]


def test_a_fault_in_a_while_loop() -> None:
    first = find_first_bad(doubling, jnp.full(3, 10.0))
    check(first, "mul", doubling, "value * value", "while[5]")  # 10 to the power of 64
    assert operation_of(first).iterations[0].loop == "while"


def test_a_while_loop_of_a_batch_is_evaluated_as_a_whole() -> None:
    def powers(values: Any) -> Any:
        return jax.vmap(lambda value: lax.while_loop(lambda x: x < 10, lambda x: x * 2, value))(values)

    values = jnp.arange(1.0, 5.0)
    evaluation = evaluate_step(powers, values)
    assert evaluation.first_bad is None
    assert evaluation.results.tolist() == powers(values).tolist()


def branch(flag: Any, x: Any) -> Any:
    def logarithm(x: Any) -> Any:
        return jnp.log(x)

    return lax.cond(flag, logarithm, lambda x: x + 1, x)


def test_a_fault_in_a_branch() -> None:
    check(find_first_bad(branch, True, jnp.zeros(3)), "log", branch, "jnp.log(x)", "cond[1]")
    assert find_first_bad(branch, False, jnp.zeros(3)) is None


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.minimum(x, 1.0)


def clipped_forward(x: Any) -> tuple[Any, Any]:
    return clipped(x), x


def clipped_backward(x: Any, gradient: Any) -> tuple[Any]:
    return (gradient / (x - x),)


clipped.defvjp(clipped_forward, clipped_backward)


def test_a_fault_in_the_backward_pass_of_the_program() -> None:
    assert find_first_bad(lambda x: clipped(x).sum(), jnp.ones(3)) is None
    first = find_first_bad(jax.grad(lambda x: clipped(x).sum()), jnp.ones(3))
    check(first, "div", clipped_backward, "gradient /")
    assert operation_of(first).phase == "backward"


@jax.custom_jvp
def safe(x: Any) -> Any:
    return jnp.log(x)


safe.defjvp(lambda primals, tangents: (safe(*primals), tangents[0]))


def test_a_fault_in_a_function_with_a_derivative_of_its_own() -> None:
    operation = operation_of(find_first_bad(safe, jnp.zeros(3)))
    assert (operation.primitive, operation.site and operation.site.line) == (
        "log",
        source_line(safe, "jnp.log"),
    )


@jax.checkpoint
def block(x: Any) -> Any:
    return jnp.exp(jnp.sin(x) * 100)


def test_a_fault_in_a_checkpointed_function() -> None:
    first = find_first_bad(jax.value_and_grad(lambda x: block(x).sum()), jnp.ones(3) * 1.5)
    assert first is not None
    operation = operation_of(first)
    assert (operation.primitive, operation.phase) == ("exp", "forward")
    assert operation.site is not None
    assert operation.site.line == source_line(block.__wrapped__, "jnp.exp")
    assert any(each.phase == "recomputation" for each in first.others)


def attention_block(x: Any, parameters: Any) -> tuple[Any, None]:
    length = x.shape[0]
    normal = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    query, key, value = jnp.split(normal @ parameters["attention"], 3, axis=-1)
    scores = query @ key.T / np.sqrt(x.shape[1])
    mask = jnp.tril(jnp.ones((length, length), bool))
    x = x + jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)) @ value
    hidden = jnp.exp(x @ parameters["up"])
    return x + jnp.log1p(hidden) @ parameters["down"], None


def transformer(parameters: Any, tokens: Any, targets: Any) -> Any:
    x = parameters["embedding"][tokens]
    x, _ = lax.scan(jax.checkpoint(attention_block), x, parameters["layers"])
    logits = jax.nn.log_softmax(x @ parameters["embedding"].T)
    return -jnp.take_along_axis(logits, targets[:, None], axis=-1).mean()


def transformer_arguments() -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    parameters = {
        "embedding": jax.random.normal(keys[0], (11, 8)),
        "layers": {
            "attention": jax.random.normal(keys[1], (4, 8, 24)) * 0.3,
            "up": jax.random.normal(keys[2], (4, 8, 16)) * 0.3,
            "down": jax.random.normal(keys[3], (4, 16, 8)) * 0.3,
        },
    }
    return parameters, jnp.arange(6), jnp.arange(1, 7)


@jax.jit
def transformer_step(parameters: Any, tokens: Any, targets: Any) -> Any:
    loss, gradients = jax.value_and_grad(transformer)(parameters, tokens, targets)
    return loss, jax.tree.map(lambda value, gradient: value - 0.1 * gradient, parameters, gradients)


@pytest.mark.release
def test_a_scanned_transformer() -> None:
    parameters, tokens, targets = transformer_arguments()
    evaluation = evaluate_step(transformer_step, parameters, tokens, targets)
    assert evaluation.first_bad is None
    loss, updated = transformer_step(parameters, tokens, targets)
    np.testing.assert_allclose(evaluation.results[0], loss, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), evaluation.results[1], updated
    )
    parameters["layers"]["up"] = parameters["layers"]["up"].at[2].multiply(1000)
    first = find_first_bad(transformer_step, parameters, tokens, targets)
    check(first, "exp", attention_block, "jnp.exp", "scan[2]")
    assert first is not None
    assert "result[0]" in first.reaches
    assert "iteration 2 of scan" in str(first)


# Masks and other values that are not finite on purpose


def test_masks_are_healthy() -> None:
    mask = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), 0.0, -jnp.inf)
    x = jnp.linspace(-1, 1, 16).reshape(4, 4)
    bias = np.asarray(mask)
    healthy: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (lambda x: jax.nn.softmax(jnp.where(x > 0.9, -jnp.inf, x)).sum(), (x,)),
        (lambda x, mask: (jax.nn.softmax(x + mask) * x).sum(), (x, mask)),
        (lambda x: (jax.nn.softmax(x + bias) * x).sum(), (x,)),
        (lambda x: jax.nn.logsumexp(x + bias, axis=-1).sum(), (x,)),
        (lambda x: jnp.max(x, where=x < 0, initial=-jnp.inf) + jnp.nanmax(x), (x,)),
        (lambda x: jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), 0.0).sum(), (x,)),
        (lambda x: (jnp.nan_to_num(jnp.log(x)) * 0 + x).sum(), (jnp.abs(x) * 0,)),
        (lambda x: jnp.logaddexp(x + bias, bias)[0, 0], (x,)),
        (lambda x: lax.scan(lambda best, row: (jnp.minimum(best, row.sum()), row), jnp.inf, x)[0], (x,)),
    ]
    for number, (function, arguments) in enumerate(healthy):
        assert find_first_bad(function, *arguments) is None, number
        if number < 5:
            assert find_first_bad(jax.value_and_grad(function), *arguments) is None, number
    # Kept, returned and passed on.
    assert find_first_bad(lambda x, best: (x + mask, jnp.minimum(best, x.sum())), x, jnp.inf) is None
    assert find_first_bad(lambda x, best: (x.sum(), best), x, jnp.inf) is None


def test_values_that_are_removed_are_counted() -> None:
    evaluation = evaluate_step(lambda x: jnp.where(x > 0, jnp.log(x), 0.0), jnp.zeros(3))
    assert evaluation.first_bad is None
    assert evaluation.contained == 1


def masked_row(x: Any, allowed: Any) -> Any:
    scores = jnp.where(allowed, x, -jnp.inf)
    return jnp.exp(scores - scores.max(-1, keepdims=True)).sum()


def test_nan_of_a_mask_is_a_fault_of_what_made_it() -> None:
    first = find_first_bad(masked_row, jnp.ones((2, 3)), jnp.array([[True] * 3, [False] * 3]))
    operation = operation_of(first)
    assert (operation.primitive, operation.site and operation.site.line) == (
        "sub",
        source_line(masked_row, "scores.max"),
    )


def overflow_before_mask(x: Any, allowed: Any) -> Any:
    scores = x * 1e38
    scores = jnp.where(allowed, scores, -jnp.inf)
    return jax.nn.softmax(scores).sum()


def test_an_overflow_before_a_mask_is_the_fault() -> None:
    first = find_first_bad(overflow_before_mask, jnp.array([1.0, 100.0, 1.0]), jnp.array([True, True, False]))
    check(first, "mul", overflow_before_mask, "x * 1e38")


def gradient_of_where(x: Any) -> Any:
    root = jnp.sqrt(x)
    return jnp.where(x > 0, root, 0.0).sum()


def test_the_gradient_of_a_removed_value() -> None:
    first = find_first_bad(jax.grad(gradient_of_where), jnp.array([0.0, 1.0]))
    operation = operation_of(first)
    assert operation.site is not None
    assert operation.site.line == source_line(gradient_of_where, "jnp.sqrt")


# Arguments


def test_an_argument_that_is_not_finite() -> None:
    parameters = {"layer": {"kernel": jnp.ones((3, 2)).at[1, 1].set(jnp.nan), "bias": jnp.zeros(2)}}

    def step(params: Any, x: Any) -> Any:
        return (x @ params["layer"]["kernel"] + params["layer"]["bias"]).sum()

    first = find_first_bad(step, parameters, jnp.ones((4, 3)))
    assert first is not None
    assert (first.cause, first.argument) == ("argument", "params.layer.kernel")
    operation = operation_of(first)
    assert operation.primitive == "dot_general"
    assert operation.inputs[1].name == "params.layer.kernel"
    assert "argument params.layer.kernel was not finite before the step: " in str(first)
    assert "1 NaN of 6" in str(first)
    assert "first operation that read it: dot_general" in str(first)


def test_nan_that_is_only_passed_on() -> None:
    first = find_first_bad(lambda x, metric: (x + 1, metric), jnp.ones(2), jnp.array(jnp.nan))
    assert first is not None
    assert (first.argument, first.operation, first.reaches) == ("metric", None, ("result[1]",))
    first = find_first_bad(lambda x, metric: (jnp.log(x), metric), jnp.zeros(2), jnp.array(jnp.nan))
    assert operation_of(first).primitive == "log"


def test_static_arguments_keywords_and_kinds_of_leaves() -> None:
    def step(x: Any, size: int, *rest: Any, scale: Any) -> Any:
        return jnp.log(x[:size] * scale) + rest[0]

    first = find_first_bad(step, np.ones(4, np.float32), 2, 1, static_argnums=1, scale=0)
    assert operation_of(first).primitive == "log"
    first = find_first_bad(step, np.ones(4, np.float32), 2, jnp.nan, static_argnums=1, scale=1.0)
    assert first is not None
    assert first.argument == "rest[0]"
    compiled = jax.jit(step, static_argnums=1)
    first = find_first_bad(compiled, jnp.ones(4), 2, 1, static_argnums=(1,), scale=jnp.nan)
    assert first is not None
    assert first.argument == "scale"


def test_donated_arguments() -> None:
    step = jax.jit(lambda state, x: state + jnp.log(x), donate_argnums=0)
    state = jnp.ones(3)
    assert operation_of(find_first_bad(step, state, jnp.zeros(3))).primitive == "log"
    assert not state.is_deleted()
    step(state, jnp.ones(3))
    with pytest.raises(ConfigError, match="argument state has been deleted"):
        find_first_bad(step, state, jnp.zeros(3))


# Kinds of values and effects


def test_random_keys_integers_and_booleans() -> None:
    def step(key: Any, legacy: Any, x: Any) -> Any:
        key, drawn = jax.random.split(key)
        noise = jax.random.normal(drawn, x.shape) + jax.random.uniform(legacy, x.shape)
        order = jnp.argsort(x) % 2 == 0
        _, keys = lax.scan(lambda carry, _: (jax.random.fold_in(carry, 1), carry), key, length=3)
        return jnp.where(order, x + noise, x), keys, jax.random.bernoulli(key), order.sum()

    arguments = (jax.random.key(1), jax.random.PRNGKey(2), jnp.arange(5.0))
    evaluation = evaluate_step(step, *arguments)
    assert evaluation.first_bad is None
    expected = jax.jit(step)(*arguments)
    np.testing.assert_allclose(evaluation.results[0], expected[0], rtol=1e-6)
    assert (jax.random.key_data(evaluation.results[1]) == jax.random.key_data(expected[1])).all()
    assert evaluation.results[3] == expected[3]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e5m2", "complex64"])
def test_other_types(dtype: str) -> None:
    def step(x: Any) -> Any:
        return (x.astype(jnp.float32) if dtype.startswith("float8") else x) / 0

    first = find_first_bad(step, jnp.ones(3, dtype))
    assert operation_of(first).primitive == "div"
    assert find_first_bad(lambda x: x.reshape(3, 1), jnp.ones(3, dtype)) is None


def test_double_precision() -> None:
    with jax.enable_x64(True):
        step = jax.jit(lambda x: x * 1e30 * 1e300)
        evaluation = evaluate_step(step, np.ones(2))
        assert evaluation.first_bad is not None
        first = find_first_bad(lambda x: x * 1e300, np.ones(2))
        assert first is None
        assert evaluate_step(lambda x: x * 1e300, np.ones(2)).results.dtype == np.float64


def test_references_are_copied() -> None:
    total = jax.new_ref(jnp.zeros(3))

    def step(x: Any, sums: Any) -> Any:
        total[...] = total[...] + jnp.log(x)
        sums[0] = x.sum()
        sums[...] += 1.0
        return total[...].sum()

    sums = jax.new_ref(jnp.zeros(2))
    first = find_first_bad(step, jnp.zeros(3), sums)
    assert operation_of(first).primitive == "log"
    assert (np.asarray(total[...]) == 0).all()
    assert (np.asarray(sums[...]) == 0).all()

    def sink(x: Any) -> Any:
        total[...] = jnp.log(x)
        return x + 1

    first = find_first_bad(jax.jit(sink), jnp.zeros(3))
    assert operation_of(first).primitive == "log"
    assert first is not None
    assert first.reaches == ("reference float32[3]",)
    assert find_first_bad(sink, jnp.ones(3)) is None


def test_references_of_the_step() -> None:
    def step(x: Any) -> Any:
        sums = jax.new_ref(jnp.zeros(2))

        def body(number: Any, value: Any) -> Any:
            sums[0] = 1 / (value - 2)
            return value + 1

        value = lax.fori_loop(0, 4, body, x)
        return sums[...] + value

    assert evaluate_step(step, 0.0).first_bad is None  # the infinity of iteration 2 is overwritten
    np.testing.assert_allclose(evaluate_step(step, 0.0).results, jax.jit(step)(0.0))
    first = find_first_bad(step, -1.0)
    assert operation_of(first).path == "scan[3]/div"


def test_callbacks_with_effects_are_not_called() -> None:
    calls: list[str] = []

    def write() -> Any:
        calls.append("io")
        return np.ones(3, np.float32)

    def step(x: Any) -> Any:
        jax.debug.callback(lambda: calls.append("debug"))
        jax.debug.print("x {}", x)
        zeros = jax.experimental.io_callback(write, jax.ShapeDtypeStruct((3,), np.float32))
        pure = jax.pure_callback(lambda x: np.asarray(x) + 1, jax.ShapeDtypeStruct((3,), np.float32), x)
        return jnp.log(zeros) + pure

    first = find_first_bad(jax.jit(step), jnp.ones(3))
    assert operation_of(first).primitive == "log"
    assert first is not None
    assert calls == []
    assert any(
        "io_callback was not called: its results are replaced by zeros" in note for note in first.notes
    )
    assert "note: debug_callback was not called" in str(first)


def test_values_are_freed_after_their_last_use() -> None:
    counts: list[int] = []

    def count(x: Any) -> Any:
        counts.append(sum(each.size == 50_000 for each in jax.live_arrays()))
        return np.asarray(x)

    def step(x: Any) -> Any:
        for _ in range(20):
            x = jnp.sin(x) + 1
        x, _ = lax.scan(lambda carry, _: (jnp.cos(carry) * 2, None), x, length=10)
        return jax.pure_callback(count, jax.ShapeDtypeStruct((), x.dtype), x[0]) + x.sum()

    present = sum(each.size == 50_000 for each in jax.live_arrays())
    assert find_first_bad(jax.jit(step), jnp.zeros(50_000)) is None
    assert counts[-1] - present <= 3


# Shards

SHARDS = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from watchstep.jax.replay.interpreter import evaluate_step, find_first_bad

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

def layer(x, w):
    hidden = lax.psum(x @ w, "model")
    return jnp.tanh(hidden) + 0 * x.sum(), hidden.mean()

def body(x, w):
    x, means = lax.scan(layer, x, w)
    index = lax.axis_index("data")
    x = lax.cond(index >= 0, lambda x: x + 1, lambda x: x, x)
    x = jnp.log(x * x)
    return lax.pmean(x.sum(), ("data", "model")), means

step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("data", None), P(None, None, None)),
                             out_specs=(P(), P()), check_vma=False))
x = jnp.ones((4, 4)) * 0.5
w = jnp.stack([jnp.eye(4)] * 3)
evaluation = evaluate_step(step, x, w)
assert evaluation.first_bad is None, str(evaluation.first_bad)
np.testing.assert_allclose(evaluation.results[0], step(x, w)[0], rtol=1e-5)
first = find_first_bad(step, x.at[2:].set(-jnp.arctanh(jnp.ones(())*0.9999999)*0 + 3e38), w * 2)
print(first)
assert first.operation.primitive in ("dot_general", "reduce_sum"), first
assert first.operation.path.startswith("shard_map["), first.operation.path
assert first.operation.shard in (2, 3), first.operation.shard
assert first.operation.iterations[0].number == 0

# Replication is checked, gradients, and branches that differ.
def checked(x, w):
    loss = jnp.log(lax.pmean((x @ w).sum(), "data"))
    return lax.pmean(loss, "model")

mapped = jax.shard_map(checked, mesh=mesh, in_specs=(P("data"), P(None, "model")), out_specs=P())
for function in (mapped, jax.jit(jax.grad(mapped, argnums=1))):
    healthy = evaluate_step(function, x, jnp.ones((4, 4)))
    assert healthy.first_bad is None, str(healthy.first_bad)
    np.testing.assert_allclose(healthy.results, function(x, jnp.ones((4, 4))), rtol=1e-5)
first = find_first_bad(mapped, x, jnp.ones((4, 4)).at[:, 2:].set(0))
assert first.operation.primitive == "log", first
assert first.operation.shard in (1, 3), first.operation.shard

# A carry that begins with a number of the program, and a loop.
def counted(x):
    total, totals = lax.scan(lambda carry, row: (carry + row.sum(), carry * 2), 0.0, x)
    number = lax.while_loop(lambda number: number < 3, lambda number: number + 1, 0)
    return (total + number)[None], totals

mapped = jax.shard_map(counted, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
for made, expected in zip(evaluate_step(mapped, x).results, mapped(x)):
    np.testing.assert_allclose(made, expected, rtol=1e-6)

def differs(x):
    return lax.cond(lax.axis_index("data") == 1, lambda x: jnp.log(x), lambda x: x, x)

first = find_first_bad(jax.shard_map(differs, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False), x * 0)
assert first.operation.primitive == "cond", first
assert any("different branches" in note for note in first.notes), first.notes
"""


@pytest.mark.release
def test_shards() -> None:
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    run_python("-c", SHARDS, env=environment)


# Laws

MATRIX = np.linspace(-0.5, 0.5, 36, dtype=np.float32).reshape(6, 6)


def _loop(x: Any) -> Any:
    return lax.while_loop(
        lambda state: state[0] < 3, lambda state: (state[0] + 1, jnp.sin(state[1])), (0, x)
    )[1]


PIECES: dict[str, Any] = {
    "tanh": jnp.tanh,
    "matmul": lambda x: x @ MATRIX,
    "softmax": jax.nn.softmax,
    "masked": lambda x: jax.nn.softmax(jnp.where(np.tri(6) > 0, x, -jnp.inf)),
    "norm": lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3),
    "scan": lambda x: lax.scan(lambda carry, row: (jnp.tanh(carry + row), carry * row), x[0], x)[1],
    "reversed": lambda x: lax.scan(lambda carry, row: (carry * 0.5 + row, carry), x[0], x, reverse=True)[1],
    "cond": lambda x: lax.cond(x.sum() > 0, lambda x: x * 2, jnp.cos, x),
    "switch": lambda x: lax.switch(jnp.argmax(x[0]), [jnp.sin, jnp.cos, jnp.tanh], x),
    "checkpoint": jax.checkpoint(lambda x: jnp.exp(-x * x)),
    "vmap": jax.vmap(lambda row: row / (1 + (row * row).sum())),
    "gelu": jax.nn.gelu,
    "sort": lambda x: jnp.sort(x, axis=0),
    "gather": lambda x: x[jnp.array([1, 0, 5, 4, 3, 2])] + x.T,
    "log": lambda x: jnp.where(x > 0, jnp.log(jnp.where(x > 0, x, 1.0)), x),
    "cumulative": lambda x: jnp.cumsum(x, axis=1) / 6,
}
LAST: dict[str, Any] = {"loop": _loop, "none": lambda x: x}
"""Pieces without a derivative, before which the gradient is taken."""


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4),
    st.sampled_from(sorted(LAST)),
    st.integers(0, 2**31 - 1),
)
def test_healthy_programs_are_computed_equally_and_have_no_bad_operation(
    names: list[str], last: str, seed: int
) -> None:
    def value(x: Any) -> Any:
        x = jnp.asarray(x)
        for name in names:
            x = PIECES[name](x)
        return (x * x).sum()

    def step(x: Any) -> Any:
        loss, gradient = jax.value_and_grad(value)(x)
        return loss, LAST[last](x - 0.1 * gradient)

    x = np.random.default_rng(seed).normal(size=(6, 6)).astype(np.float32)
    evaluation = evaluate_step(step, x)
    assert evaluation.first_bad is None, str(evaluation.first_bad)
    assert evaluation.evaluated > 0
    for made, expected in zip(evaluation.results, jax.jit(step)(x), strict=True):
        np.testing.assert_allclose(made, expected, rtol=2e-3, atol=2e-4)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from(["tanh", "gelu", "gather", "cond", "sort", "vmap"]), max_size=3),
    st.integers(0, 5),
    st.integers(0, 2**31 - 1),
)
def test_a_fault_is_named_in_its_iteration(names: list[str], bad: int, seed: int) -> None:
    def faulty(carry: Any, each: Any) -> tuple[Any, Any]:
        row, scale = each
        return carry + 1, 1 / scale + row

    def step(x: Any, scales: Any) -> Any:
        for name in names:
            x = PIECES[name](x)
        return lax.scan(faulty, 0, (x, scales))[1]

    x = np.random.default_rng(seed).normal(size=(6, 6)).astype(np.float32)
    scales = np.ones(6, np.float32)
    assert find_first_bad(step, x, scales) is None
    scales[bad] = 0
    check(find_first_bad(step, x, scales), "div", faulty, "1 / scale", f"scan[{bad}]")


# Libraries


def test_a_step_of_flax_and_optax() -> None:
    linen: Any = pytest.importorskip("flax.linen")
    optax = pytest.importorskip("optax")

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.relu(linen.Dense(8, name="first")(x))
            x = linen.LayerNorm()(x)
            return linen.Dense(1, name="last")(x)

    model, optimizer = Network(), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-3, momentum=0.9))

    def loss_of(params: Any, x: Any, y: Any) -> Any:
        return ((model.apply(params, x)[:, 0] - jnp.log(y)) ** 2).mean()

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    x, y = jnp.ones((4, 3)), jnp.ones(4)
    params = model.init(jax.random.key(0), x)
    state = optimizer.init(params)
    assert find_first_bad(step, params, state, x, y) is None
    first = find_first_bad(step, params, state, x, y.at[2].set(0))
    check(first, "log", loss_of, "jnp.log(y)")
    overflow = jax.tree.map(lambda each: each, params)
    overflow["params"]["first"]["kernel"] = jnp.full((3, 8), 2e38)
    operation = operation_of(find_first_bad(step, overflow, state, x, y))
    assert operation.primitive == "dot_general"
    assert "first" in operation.module
    assert operation.site is not None
    assert (
        "linen.Dense"
        in inspect.getsource(Network).splitlines()[operation.site.line - inspect.getsourcelines(Network)[1]]
    )


def test_a_step_of_equinox() -> None:
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.MLP(3, 1, 4, 2, key=jax.random.key(0))

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        return (jax.vmap(model)(x)[:, 0] / y).mean()

    @equinox.filter_jit
    def step(model: Any, x: Any, y: Any) -> Any:
        return equinox.filter_value_and_grad(loss_of)(model, x, y)

    x, y = jnp.ones((4, 3)), jnp.ones(4)
    assert find_first_bad(step, model, x, y) is None
    first = find_first_bad(step, model, x, y.at[1].set(0))
    check(first, "div", loss_of, "/ y")


def test_a_step_of_nnx_does_not_change_the_model() -> None:
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    before = np.asarray(model.kernel[...])

    def loss_of(model: Any, x: Any) -> Any:
        return jnp.log(model(x) ** 2).mean()

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, gradients = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, gradients)
        return loss

    assert find_first_bad(step, model, optimizer, jnp.ones((2, 3))) is None
    check(find_first_bad(step, model, optimizer, jnp.zeros((2, 3))), "log", loss_of, "jnp.log")
    assert (np.asarray(model.kernel[...]) == before).all()
