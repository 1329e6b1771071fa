"""Rows of statistics of JAX arrays, computed on the device inside of the traced program.

`measure` is called at trace time, in any ``jit``, ``scan``, ``cond`` or ``grad``, and returns integer words. The host converts them by `statistics`,
outside of the training thread. The figures are those of `watchstep.kernels.native_kernel`: counts, extremes and histograms are exact.

XLA has no fixed order of summation, flushes subnormals, and has no float64 unless ``jax_enable_x64`` is set. Therefore:

- Elements are classified by their bits. The *position* of an element is its exponent field plus the number of bits of the mantissa, and for a subnormal
  the number of its significant bits. Positions are contiguous from zero (0) over the smallest subnormal (1) to infinity and NaN. One histogram of position and
  sign contains all counts; the largest finite position is the exponent of the largest magnitude.
- Sums are over elements divided by that power of two, so that squares neither overflow nor vanish. Subnormals enter as integers.
- A variadic reduction of two levels adds distances from a *shift*, the mean of a sample, and extremes as ordered integers. Every sum has a second word with
  its rounding error (Knuth's two-sum), so that the order of summation does not matter: the relative error is that of one rounding of each element.
- The host adds both words in float64, and multiplies by the power of two.

Tensors of one shape and dtype are measured in a loop whose body selects one of them: the program does not grow with their number, and at most a few
of them are copied at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from watchstep.errors import ConfigError
from watchstep.format.statistics import Histograms, StatisticsBatch, merge_rows

MAX_ROW_ELEMENTS = 2**30
"""Elements that one device row counts. Rows of larger tensors are merged on the host: counts on the device are int32."""

_BLOCK = 2**14
"""Elements of a block of the first level of a reduction: rounding errors of so many additions add up in one float32 without loss."""

_HISTOGRAM_ELEMENTS = 2**22
"""Elements that are counted at a time. XLA stores eight bytes for each."""

_LOOP_FROM = 2
"""Tensors of one shape and dtype from which on they are measured in a loop."""

_SAMPLE = 256
"""Minimum number of elements of the sample whose mean is the shift, if there are as many."""

_SUMS = 3
_LEAD = 2 * _SUMS + 1 + 4
"""Words before the histogram: sums with their rounding errors, the shift, smallest, largest, smallest magnitude, exponent of the unit."""


Operands = tuple[jax.Array, ...]
"""Operands of the reduction: three sums with their errors, smallest, largest, smallest magnitude."""


@dataclass(frozen=True)
class BitFormat:
    """A binary format of IEEE 754 in which elements are measured.

    Attributes:
        floating: Type of the elements.
        integer: Signed integer of the same width, the type of the words.
        mantissa: Bits of the mantissa without the leading one.
        exponent: Bits of the exponent.
    """

    floating: type[np.floating[Any]]
    integer: type[np.signedinteger[Any]]
    mantissa: int
    exponent: int

    @property
    def bias(self) -> int:
        """Value of the exponent field of one."""
        return int(2 ** (self.exponent - 1) - 1)

    @property
    def infinity(self) -> int:
        """Bits of infinity."""
        return int((2**self.exponent - 1) << self.mantissa)

    @property
    def positions(self) -> int:
        """Number of positions, from zero to NaN."""
        return int(2**self.exponent + self.mantissa + 1)

    @property
    def offset(self) -> int:
        """Position minus exponent of a finite, non-zero element."""
        return self.bias + self.mantissa

    @property
    def words(self) -> int:
        """Words of a row."""
        return _LEAD + 2 * self.positions


NARROW = BitFormat(np.float32, np.int32, 23, 8)
WIDE = BitFormat(np.float64, np.int64, 52, 11)


@dataclass(frozen=True)
class RowLayout:
    """What the words of a measurement belong to.

    Attributes:
        tensor_rows: Number of rows of each tensor; more than one for a stacked tensor.
        narrow: Row of the result of each narrow device row. Several device rows of one row merge.
        wide: The same of wide device rows.
    """

    tensor_rows: tuple[int, ...]
    narrow: tuple[int, ...]
    wide: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of rows of the result."""
        return sum(self.tensor_rows)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("narrow", "wide"), meta_fields=("layout",))
@dataclass(frozen=True)
class RowWords:
    """Words of device rows, a pytree of arrays.

    Attributes:
        narrow: int32, shape (rows, words), of elements measured as float32; None without such rows.
        wide: int64, shape (rows, words), of elements measured as float64; None without such rows.
        layout: What they belong to.
    """

    narrow: Any
    wide: Any
    layout: RowLayout


@dataclass(frozen=True)
class _Part:
    """An array of shape (rows, elements) to be measured, and the row of the result of each of its rows."""

    array: jax.Array
    owners: tuple[int, ...]

    @property
    def format(self) -> BitFormat:
        return WIDE if self.array.dtype in (jnp.float64, jnp.complex128) else NARROW


def is_measurable(dtype: Any) -> bool:
    """Return whether `measure` accepts arrays of this dtype: real, complex, integer and boolean ones."""
    return any(
        jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.complexfloating, jnp.integer, jnp.bool_)
    )


def measure(tensors: Sequence[jax.Array], *, stacked: Sequence[bool] | None = None) -> RowWords:
    """Measure arrays inside of a traced program. Nothing is differentiated through the result.

    Float types of up to 32 bits are measured as float32, which is exact, float64 as float64, and complex ones as their real and imaginary parts.
    Integers are converted to float32, which rounds those of more than 24 bits.

    Args:
        tensors: Arrays or tracers of any shape.
        stacked: Whether a tensor gets a row for each index of its first dimension. Default: none does.

    Raises:
        ConfigError: A dtype cannot be measured, or a stacked tensor has no dimension.
    """
    flags = [False] * len(tensors) if stacked is None else stacked
    parts: list[_Part] = []
    tensor_rows: list[int] = []
    for tensor, is_stacked in zip(tensors, flags, strict=True):
        if not is_measurable(tensor.dtype):
            raise ConfigError(
                f"an array of dtype {tensor.dtype} cannot be measured", "leave it out, see is_measurable"
            )
        if is_stacked and not tensor.ndim:
            raise ConfigError("a stacked array has no dimension", "pass stacked=False for scalars")
        rows = tensor.shape[0] if is_stacked else 1
        first = sum(tensor_rows)
        parts.extend(_parts(lax.stop_gradient(tensor), range(first, first + rows)))
        tensor_rows.append(rows)
    narrow, narrow_owners = _measure_parts([part for part in parts if part.format is NARROW], NARROW)
    wide, wide_owners = _measure_parts([part for part in parts if part.format is WIDE], WIDE)
    return RowWords(narrow, wide, RowLayout(tuple(tensor_rows), narrow_owners, wide_owners))


def _parts(tensor: jax.Array, owners: range) -> Iterator[_Part]:
    """Yield the parts of a tensor: real and imaginary, and slices of rows with too many elements. None of a tensor without elements."""
    if not tensor.size:
        return
    if jnp.issubdtype(tensor.dtype, jnp.complexfloating):
        yield from _parts(lax.real(tensor), owners)
        yield from _parts(lax.imag(tensor), owners)
        return
    rows = lax.reshape(tensor, (len(owners), tensor.size // len(owners)))
    for start in range(0, rows.shape[1], MAX_ROW_ELEMENTS):
        yield _Part(rows[:, start : start + MAX_ROW_ELEMENTS], tuple(owners))


def _measure_parts(parts: Sequence[_Part], bit_format: BitFormat) -> tuple[Any, tuple[int, ...]]:
    """Measure parts of one format. Return their words and the row of the result of each."""
    groups: dict[tuple[Any, ...], list[_Part]] = {}
    for part in parts:
        groups.setdefault((part.array.dtype, part.array.shape), []).append(part)
    if not groups:
        return None, ()
    words = [_measure_group([part.array for part in group], bit_format) for group in groups.values()]
    owners = tuple(owner for group in groups.values() for part in group for owner in part.owners)
    return jnp.concatenate(words), owners


def _measure_group(arrays: Sequence[jax.Array], bit_format: BitFormat) -> jax.Array:
    """Measure arrays of one shape and dtype: shape (arrays * rows, words)."""
    if len(arrays) < _LOOP_FROM:
        return jnp.concatenate([measure_rows(array, bit_format) for array in arrays])
    select = [functools.partial(_selected, place) for place in range(len(arrays))]
    rows = arrays[0].shape[0]

    def measure_next(place: Any, words: jax.Array) -> jax.Array:
        measured = measure_rows(lax.switch(place, select, *arrays), bit_format)
        return lax.dynamic_update_slice(words, measured, (place * rows, 0))

    words = jnp.zeros((len(arrays) * rows, bit_format.words), bit_format.integer)
    looped: jax.Array = lax.fori_loop(0, len(arrays), measure_next, words)
    return looped


def _selected(place: int, *arrays: jax.Array) -> jax.Array:
    return arrays[place]


def measure_rows(array: jax.Array, bit_format: BitFormat) -> jax.Array:
    """Return the words of each row of an array of shape (rows, elements): shape (rows, words)."""
    values = _widened(array, bit_format)
    histogram = _histogram(values, bit_format)
    exponent = _top_exponent(histogram, bit_format)
    stride = max(1, values.shape[1] // _SAMPLE) | 1
    sample, is_finite = _scaled(values[:, ::stride], exponent, bit_format)
    shift = jnp.sum(sample, axis=1) / jnp.maximum(jnp.sum(is_finite, axis=1), 1).astype(values.dtype)
    sums = _sums(values, exponent, shift, bit_format)
    as_words = functools.partial(lax.bitcast_convert_type, new_dtype=bit_format.integer)
    lead = [*map(as_words, (*sums[: 2 * _SUMS], shift)), *sums[2 * _SUMS :], exponent]
    return jnp.concatenate([jnp.stack(lead, axis=1), histogram], axis=1)


def _widened(array: jax.Array, bit_format: BitFormat) -> jax.Array:
    """Convert to the type of the format. A conversion of bfloat16 might flush subnormals, a shift of its bits does not."""
    if array.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(array, np.uint16).astype(np.uint32) << np.uint32(16)
        return lax.bitcast_convert_type(bits, np.float32)
    return array.astype(bit_format.floating)


def _bits(values: jax.Array, bit_format: BitFormat) -> tuple[jax.Array, jax.Array]:
    """Return the bits of values as signed integers, and those of their magnitudes."""
    bits = lax.bitcast_convert_type(values, bit_format.integer)
    return bits, bits & bit_format.integer(np.iinfo(bit_format.integer).max)


def _histogram(values: jax.Array, bit_format: BitFormat) -> jax.Array:
    """Count elements by position and sign: shape (rows, 2 * positions)."""
    rows, size = values.shape
    width = max(1, _HISTOGRAM_ELEMENTS // rows)
    blocks = size // width
    table = jnp.zeros(rows * 2 * bit_format.positions, np.int32)
    if blocks > 1:

        def count_block(block: Any, counts: jax.Array) -> jax.Array:
            part = lax.dynamic_slice_in_dim(values, block * width, width, axis=1)
            return _counted(part, counts, bit_format)

        table = lax.fori_loop(0, blocks, count_block, table)
        values = values[:, blocks * width :]
    if values.size:
        table = _counted(values, table, bit_format)
    return table.reshape(rows, -1).astype(bit_format.integer)


def _counted(values: jax.Array, table: jax.Array, bit_format: BitFormat) -> jax.Array:
    """Add the elements of rows to a table of shape (rows * 2 * positions,)."""
    bits, magnitude = _bits(values, bit_format)
    integer = bit_format.integer
    code = magnitude >> integer(bit_format.mantissa)
    significant = integer(8 * integer().itemsize) - lax.clz(magnitude)
    is_nan = (magnitude > integer(bit_format.infinity)).astype(integer)
    position = jnp.where(code == 0, significant, code + integer(bit_format.mantissa) + is_nan)
    first = np.arange(len(values), dtype=np.int32) * np.int32(2 * bit_format.positions)
    key = (2 * position + (bits < 0)).astype(np.int32) + first[:, None]
    return table.at[key.reshape(-1)].add(1, mode="promise_in_bounds")


def _top_exponent(histogram: jax.Array, bit_format: BitFormat) -> jax.Array:
    """Return the exponent of the largest finite magnitude of each row, less one for the largest exponent, so that its negative is one, too."""
    finite = histogram.reshape(-1, bit_format.positions, 2)[:, :-2].sum(axis=2)
    positions = np.arange(finite.shape[1], dtype=bit_format.integer)
    top = jnp.max(jnp.where(finite > 0, positions, bit_format.integer(0)), axis=1)
    return jnp.clip(top, 1, bit_format.positions - 4) - bit_format.integer(bit_format.offset)


def _scaled(values: jax.Array, exponent: jax.Array, bit_format: BitFormat) -> tuple[jax.Array, jax.Array]:
    """Return elements divided by ``2 ** exponent``, zero where they are not finite, and whether they are."""
    bits, magnitude = _bits(values, bit_format)
    is_subnormal = magnitude < bit_format.integer(1 << bit_format.mantissa)
    is_finite = magnitude < bit_format.integer(bit_format.infinity)
    count = jnp.where(bits < 0, -magnitude, magnitude).astype(bit_format.floating)
    unit = bit_format.offset - 1  # the smallest subnormal is 2 ** -unit
    of_row = exponent.reshape(-1, *[1] * (values.ndim - 1))
    scale = jnp.where(
        is_subnormal,
        _power_of_two(-of_row - bit_format.integer(unit), bit_format),
        _power_of_two(-of_row, bit_format),
    )
    return jnp.where(is_finite, jnp.where(is_subnormal, count, values) * scale, 0), is_finite


def _power_of_two(exponent: jax.Array, bit_format: BitFormat) -> jax.Array:
    """Return ``2 ** exponent``, limited to the normal numbers. Where the limit applies, there is no such element, or it is negligible."""
    field = jnp.clip(exponent + bit_format.integer(bit_format.bias), 1, 2 * bit_format.bias)
    bits = field.astype(bit_format.integer) << bit_format.integer(bit_format.mantissa)
    return lax.bitcast_convert_type(bits, bit_format.floating)


def _sums(
    values: jax.Array, exponent: jax.Array, shift: jax.Array, bit_format: BitFormat
) -> tuple[jax.Array, ...]:
    """Reduce each row to sums of distances, squared distances and magnitudes, each with its rounding error, and three extremes as bits."""
    blocks = values.shape[1] // _BLOCK
    if blocks <= 1:
        return _reduced(_addends(values, exponent, shift, bit_format), bit_format, _combine)
    border = blocks * _BLOCK
    whole = values[:, :border].reshape(len(values), blocks, _BLOCK)
    parts = _reduced(_addends(whole, exponent, shift, bit_format), bit_format, _combine)
    if border < values.shape[1]:
        rest = _reduced(_addends(values[:, border:], exponent, shift, bit_format), bit_format, _combine)
        parts = tuple(
            jnp.concatenate([part, one[:, None]], axis=1) for part, one in zip(parts, rest, strict=True)
        )
    return _reduced(parts, bit_format, _combine_normalized)


def _addends(
    values: jax.Array, exponent: jax.Array, shift: jax.Array, bit_format: BitFormat
) -> tuple[jax.Array, ...]:
    """Return the operands of the reduction for each element."""
    integer = bit_format.integer
    limits = np.iinfo(integer)
    bits, magnitude = _bits(values, bit_format)
    scaled, is_finite = _scaled(values, exponent, bit_format)
    distance = jnp.where(is_finite, scaled - shift.reshape(-1, *[1] * (values.ndim - 1)), 0)
    ordered = bits ^ ((bits >> integer(limits.bits - 1)) & integer(limits.max))
    zeros = jnp.zeros_like(scaled)
    return (
        distance,
        zeros,
        distance * distance,
        zeros,
        jnp.abs(scaled),
        zeros,
        jnp.where(is_finite, ordered, integer(limits.max)),
        jnp.where(is_finite, ordered, integer(limits.min)),
        jnp.where(is_finite & (magnitude > 0), magnitude, integer(limits.max)),
    )


def _reduced(
    operands: Operands, bit_format: BitFormat, combine: Callable[[Operands, Operands], Operands]
) -> Operands:
    """Reduce the last dimension."""
    limits = np.iinfo(bit_format.integer)
    extremes = (bit_format.integer(limit) for limit in (limits.max, limits.min, limits.max))
    start = (*[bit_format.floating(0)] * (2 * _SUMS), *extremes)
    reduced: Operands = lax.reduce(operands, start, combine, (operands[0].ndim - 1,))
    return reduced


def _combine(left: Operands, right: Operands) -> Operands:
    sums: list[jax.Array] = []
    for place in range(0, 2 * _SUMS, 2):
        total, error = _two_sum(left[place], right[place])
        sums.extend((total, error + (left[place + 1] + right[place + 1])))
    least, most, smallest = range(2 * _SUMS, 2 * _SUMS + 3)
    return (
        *sums,
        lax.min(left[least], right[least]),
        lax.max(left[most], right[most]),
        lax.min(left[smallest], right[smallest]),
    )


def _combine_normalized(left: Operands, right: Operands) -> Operands:
    """Combine, and move what the error has of the sum's digits to the sum: for long rows, whose errors would add up."""
    combined = _combine(left, right)
    sums = [_two_sum(combined[place], combined[place + 1]) for place in range(0, 2 * _SUMS, 2)]
    return (*(word for pair in sums for word in pair), *combined[2 * _SUMS :])


def _two_sum(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the rounded sum and its exact rounding error (Knuth, The Art of Computer Programming, volume 2, theorem 4.2.2 B)."""
    total = left + right
    part = total - left
    return total, (left - (total - part)) + (right - part)


def statistics(words: RowWords) -> StatisticsBatch:
    """Convert words to statistics, one row per tensor, several for a stacked one. Not called on the training thread: it waits for the device.

    Args:
        words: The result of `measure`, with arrays of NumPy or JAX.
    """
    layout = words.layout
    parts = [
        _decoded(np.asarray(array), bit_format)
        for array, bit_format in ((words.narrow, NARROW), (words.wide, WIDE))
        if array is not None
    ]
    owners = np.array(layout.narrow + layout.wide, np.intp)
    rows = StatisticsBatch.concatenate(parts)
    if len(owners) == layout.rows and len(np.unique(owners)) == layout.rows:
        return rows.take(np.argsort(owners))
    return merge_rows(rows, owners, layout.rows)


def _decoded(words: NDArray[Any], bit_format: BitFormat) -> StatisticsBatch:
    """Return the statistics of each device row."""
    lead, table = words[:, :_LEAD], words[:, _LEAD:].astype(np.int64)
    histogram, infinite, nan = table[:, 2:-4], table[:, -4:-2], table[:, -2:]
    zero = table[:, :2].sum(axis=1)
    finite = histogram.sum(axis=1) + zero
    counts = np.stack(
        [
            table.sum(axis=1),
            nan.sum(axis=1),
            infinite[:, 0],
            infinite[:, 1],
            zero,
            histogram[:, 1::2].sum(axis=1),
        ],
        axis=1,
    )
    return StatisticsBatch.from_matrices(
        counts, _values(lead, finite, finite > zero, bit_format), _sparse(histogram, bit_format)
    )


def _values(
    lead: NDArray[Any], finite: NDArray[np.int64], has_nonzero: NDArray[np.bool_], bit_format: BitFormat
) -> NDArray[np.float64]:
    floats = np.ascontiguousarray(lead[:, : 2 * _SUMS + 1]).view(bit_format.floating).astype(np.float64)
    distance, square, magnitude = (floats[:, 2 * place] + floats[:, 2 * place + 1] for place in range(_SUMS))
    shift, exponent = floats[:, 2 * _SUMS], lead[:, -1].astype(np.int64)
    some = finite > 0
    size = np.maximum(finite, 1)
    away = distance / size
    with np.errstate(over="ignore", under="ignore"):
        m2 = np.ldexp(np.maximum(square - distance * away, 0.0), 2 * exponent)
        square_sum = np.ldexp(
            np.maximum(square + 2 * shift * distance + finite * shift * shift, 0.0), 2 * exponent
        )
        mean = np.where(some, np.ldexp(shift + away, exponent), np.nan)
        abs_sum = np.ldexp(magnitude, exponent)
    least, most, smallest = lead[:, 2 * _SUMS + 1 : -1].T
    columns = (
        np.where(some, _unordered(least, bit_format), np.nan),
        np.where(some, _unordered(most, bit_format), np.nan),
        np.where(has_nonzero, _unordered(smallest, bit_format), np.nan),
        mean,
        m2,
        abs_sum,
        square_sum,
    )
    return np.stack(columns, axis=1)


def _unordered(ordered: NDArray[Any], bit_format: BitFormat) -> NDArray[np.float64]:
    """Return the numbers of ordered integers."""
    integer = np.iinfo(bit_format.integer)
    bits = ordered ^ ((ordered >> (integer.bits - 1)) & integer.max)
    with np.errstate(invalid="ignore"):
        numbers: NDArray[np.float64] = (
            bits.astype(bit_format.integer).view(bit_format.floating).astype(np.float64)
        )
    return numbers


def _sparse(histogram: NDArray[np.int64], bit_format: BitFormat) -> Histograms:
    """Return the counts of finite, non-zero elements by bin; column 0 counts the smallest positive subnormals."""
    rows, places = np.nonzero(histogram)
    offsets = np.searchsorted(rows, np.arange(len(histogram) + 1)).astype(np.int64)
    bins = places + 2 * (1 - bit_format.offset)
    return Histograms(offsets, bins.astype(np.int16), histogram[rows, places])


def finite(tensors: Sequence[jax.Array]) -> jax.Array:
    """Return whether all elements of all arrays are finite, a boolean scalar: the check of every step.

    Where every sum of squares is finite, all elements are. Otherwise a sum may have overflowed, and one branch of a ``cond`` decides exactly: the sum of elements
    times zero is zero or NaN. Integers and booleans are finite.

    Args:
        tensors: Arrays or tracers of any shape.
    """
    parts = [part for tensor in tensors if tensor.size for part in _floats(lax.stop_gradient(tensor))]
    if not parts:
        return jnp.asarray(True)
    squares = [jnp.sum(jnp.square(_at_least_narrow(part))) for part in parts]
    is_clear = jnp.all(jnp.stack([jnp.isfinite(square) for square in squares]))

    def is_exactly_finite() -> jax.Array:
        return jnp.all(jnp.stack([jnp.sum(_at_least_narrow(part) * 0) == 0 for part in parts]))

    decided: jax.Array = lax.cond(is_clear, lambda: jnp.asarray(True), is_exactly_finite)
    return decided


def _floats(tensor: jax.Array) -> Iterator[jax.Array]:
    """Yield the real and imaginary parts of an array; nothing of integers and booleans."""
    if jnp.issubdtype(tensor.dtype, jnp.complexfloating):
        yield from (lax.real(tensor), lax.imag(tensor))
    elif jnp.issubdtype(tensor.dtype, jnp.floating):
        yield tensor


def _at_least_narrow(array: jax.Array) -> jax.Array:
    return array.astype(np.float32) if array.dtype.itemsize < np.float32().itemsize else array
