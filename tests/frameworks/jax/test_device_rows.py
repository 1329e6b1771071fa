"""Rows that a device computes equal those of the compiled kernel: counts, extremes and histograms exactly, sums within its bounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from tests.frameworks.jax.rows import assert_same_rows, native_rows  # noqa: E402
from tests.laws import examples  # noqa: E402
from watchstep.errors import ConfigError  # noqa: E402
from watchstep.format.statistics import merge_rows  # noqa: E402
from watchstep.jax import device_rows  # noqa: E402
from watchstep.jax.device_rows import RowWords, measure, statistics  # noqa: E402

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
SETTINGS = settings(max_examples=examples(60), deadline=None, derandomize=True, database=None)
compiled = jax.jit(measure, static_argnames="stacked")


def check(arrays: list[NDArray[Any]]) -> None:
    words = jax.tree.map(np.asarray, compiled([jnp.asarray(array) for array in arrays]))
    assert_same_rows(statistics(words), native_rows(arrays))


elements = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 2.0**-149, 65504.0]),
    st.floats(width=32),
    st.floats(-1e6, 1e6, width=32),
)


@pytest.mark.parametrize("name", DTYPES)
@SETTINGS
@given(values=st.lists(elements, min_size=24, max_size=24))
def test_every_dtype_and_value(name: str, values: list[float]) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.array(values, np.float32).astype(DTYPES[name])
    check([array.reshape(4, 6)])


@SETTINGS
@given(
    seed=st.integers(0, 1000),
    exponent=st.integers(-149, 127),
    spread=st.integers(0, 30),
    offset=st.sampled_from([0.0, 1.0, -1000.0]),
)
def test_every_magnitude(seed: int, exponent: int, spread: int, offset: float) -> None:
    """Sums of values whose squares float32 cannot represent, and of values far from zero."""
    generator = np.random.default_rng(seed)
    powers = np.clip(exponent - generator.integers(0, spread + 1, 3000), -149, 127)
    with np.errstate(over="ignore"):
        array = np.ldexp(generator.uniform(-1.9, 1.9, 3000), powers)
        check([(array + offset * 2.0 ** max(exponent - 10, -140)).astype(np.float32)])


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_bit_pattern(name: str) -> None:
    dtype = np.dtype(DTYPES[name])
    patterns = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    check([patterns.view(dtype)])


def test_every_exponent_of_float32() -> None:
    generator = np.random.default_rng(0)
    mantissas = generator.integers(0, 2**23, (512, 8), dtype=np.uint32)
    mantissas[:, 0] = 0
    check([((np.arange(512, dtype=np.uint32) << 23)[:, None] | mantissas).view(np.float32)])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 5), (2, 3, 4, 5), (1025,)])
def test_shapes(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    check([np.asarray(array), np.full(shape, np.nan, np.float32)])


def test_equal_elements_have_no_variance() -> None:
    words = compiled([jnp.full((70, 70), 1.1), jnp.full(5000, 3e-39), jnp.zeros(9)])
    rows = statistics(words)
    np.testing.assert_allclose(rows.m2 / np.maximum(rows.square_sum, 1e-300), 0, atol=1e-13)
    assert rows.square_sum[1] == pytest.approx(5000 * float(np.float32(3e-39)) ** 2, rel=4e-6)


def test_rows_are_in_the_order_of_the_tensors() -> None:
    generator = np.random.default_rng(2)
    shapes = [(3, 4), (5,), (3, 4), (4, 3), (5,), (3, 4)]
    arrays: list[NDArray[Any]] = [generator.standard_normal(shape).astype(np.float32) for shape in shapes]
    arrays[4] = arrays[4].astype(np.float16)
    check(arrays)


def test_stacked_tensors_have_a_row_per_layer() -> None:
    generator = np.random.default_rng(3)
    layers = generator.standard_normal((3, 8, 8)).astype(np.float32)
    bias = generator.standard_normal(5).astype(np.float32)
    more = generator.standard_normal((3, 64)).astype(np.float32)
    words = compiled([jnp.asarray(layers), jnp.asarray(bias), jnp.asarray(more)], stacked=(True, False, True))
    assert words.layout.tensor_rows == (3, 1, 3)
    assert_same_rows(statistics(words), native_rows([*layers, bias, *more]))


def test_complex_tensors_are_their_parts() -> None:
    parts = [-2.5, 0, 1, np.nan, np.inf, 2, -np.inf, -1e-40]
    array = np.array(parts, np.float32).view(np.complex64)
    assert_same_rows(statistics(compiled([jnp.asarray(array)])), native_rows([array.view(np.float32)]))


def test_integers_and_booleans() -> None:
    rows = statistics(compiled([jnp.array([3, -4, 0]), jnp.array([True, False])]))
    assert (rows.min.tolist(), rows.max.tolist(), rows.zero.tolist()) == ([-4, 0], [3, 1], [1, 1])


def test_other_dtypes_are_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="key<fry> cannot be measured"):
        measure([jax.random.key(0)])
    assert not device_rows.is_measurable(jax.random.key(0).dtype)


def test_more_elements_than_float32_counts() -> None:
    """2 ** 24 is where float32 ends to count, and sums without control of errors are wrong in the third digit."""
    size = 2**24 + 3
    array = (np.random.default_rng(4).standard_normal(size) * 1e-3 + 0.5).astype(np.float32)
    array[::5] = 0.25
    array[7] = np.nan
    check([array])


def test_rows_of_too_many_elements_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rows, "MAX_ROW_ELEMENTS", 1000)
    array = np.random.default_rng(5).standard_normal((2, 1300)).astype(np.float32)
    words = jax.jit(lambda x: measure([x], stacked=[True]))(array)
    assert words.layout.narrow == (0, 1, 0, 1)
    assert_same_rows(statistics(words), native_rows(list(array)))


def test_float64_where_it_is_on() -> None:
    generator = np.random.default_rng(6)
    special = [0.0, -0.0, 5e-324, -1e-310, math.inf, -math.inf, math.nan, 1.7e308, -2.0]
    arrays = [
        np.array(special),
        generator.standard_normal(3000) * 1e-200,
        np.ldexp(generator.uniform(-2, 2, 4000), generator.integers(-1074, 1023, 4000)),
        generator.standard_normal(10).astype(np.float32),
    ]
    with jax.enable_x64(True), np.errstate(over="ignore"):
        words = jax.jit(measure)([jnp.asarray(array) for array in arrays])
        assert words.wide.shape[0] == 3
    rows = native_rows(arrays)
    assert np.isinf(rows.square_sum[2])
    assert_same_rows(statistics(words), rows)


def test_rows_inside_of_scan_cond_and_grad() -> None:
    def loss(x: Any, weight: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            rows = jax.lax.cond(
                carry.sum() > 1e9,
                lambda: jax.tree.map(jnp.zeros_like, measure([carry])),
                lambda: measure([carry]),
            )
            return jnp.tanh(carry @ w), rows

        out, rows = jax.lax.scan(layer, x, weight)
        return (out**2).sum(), rows

    generator = np.random.default_rng(7)
    x, weight = (
        generator.standard_normal((4, 8)).astype(np.float32),
        generator.standard_normal((3, 8, 8)).astype(np.float32),
    )
    (_, rows), gradient = jax.jit(jax.value_and_grad(loss, argnums=1, has_aux=True))(x, weight)
    plain = jax.jit(jax.grad(lambda x, w: loss(x, w)[0], argnums=1))(x, weight)
    np.testing.assert_array_equal(gradient, plain)
    first = jax.tree.map(lambda leaf: leaf[0], rows)
    assert_same_rows(statistics(first), native_rows([x]))


def test_the_program_does_not_grow_with_the_number_of_equal_tensors() -> None:
    def size(count: int) -> int:
        arrays = [jax.ShapeDtypeStruct((16, 16), np.float32)] * count
        return str(jax.jit(measure).lower(arrays).compile().as_text()).count("\n")

    assert size(24) < size(4) + 20 * 12


def test_finite() -> None:
    check_finite = jax.jit(device_rows.finite)
    dtypes = [*DTYPES.values(), np.complex64, np.int32]
    arrays = [np.ones((3, 3), dtype) for dtype in dtypes]
    assert bool(check_finite(arrays))
    assert bool(check_finite([np.full(3, 3e38, np.float32), np.zeros(0, np.float32)]))
    for place, array in enumerate(arrays[:-1]):
        bad = array.copy()
        bad[1, 1] = np.nan
        assert not bool(check_finite([*arrays[:place], bad, *arrays[place + 1 :]])), array.dtype
    for bad_value in (np.inf, -np.inf, complex(0, np.inf)):
        assert not bool(check_finite([np.array([1, bad_value], np.complex64)]))


def test_words_survive_jit_as_a_pytree() -> None:
    words = compiled([jnp.ones(3)])
    again = jax.jit(lambda tree: tree)(words)
    assert isinstance(again, RowWords)
    assert again.layout == words.layout
    merged = merge_rows(statistics(again), np.zeros(1, np.intp), 1)
    assert merged.count.tolist() == [3]
