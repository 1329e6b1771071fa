"""The Triton kernels: statistics of spans, their merge, and a search for NaN and infinity.

All kernels work on the bits of float32, to which bfloat16, float16 and both fp8 formats widen exactly. A *span* is 32,768
elements of one tensor, processed by one program, so that one launch handles tensors of any size and mixed types. Each block of
2,048 elements of a span is kept in registers.

- Extremes are compared as integers, so flushing of subnormals does not affect them.
- The histogram counts signs and exponent fields in a window of 31 fields, 62 bins, downwards from just above the largest
  element of the first block. Elements outside the window are rare, and are counted again by all nine bits. Up to Triton 3.7 the
  cost of a histogram grows with its number of bins (a vote for each bit, a population count for each 32 bins); later versions
  count in shared memory. A block with subnormals counts them by the highest bit of their mantissa. Integers are added to the
  tensor's row by atomics, so their order does not matter.
- A block is scaled by a power of two before it is summed, so that no square over- or underflows, and subnormals are scaled up by
  integer arithmetic if they matter. Its second moment is computed around its own mean (the corrected two-pass algorithm of Chan,
  Golub, LeVeque 1983, "Algorithms for computing the sample variance"). Sums within a block are float32: 16 terms per thread, then
  seven levels of a tree. Blocks and spans are merged in float64, in order.

With u = 2**-24, the error of a sum of a block is at most 22 u of the sum of its terms' magnitudes, and one u more for squares.
So ``abs_sum`` and ``square_sum`` have a relative error of at most 24 u = 1.5e-6, ``mean`` of twice that of the mean magnitude (of
differences from a block's mean), ``m2`` of 26 u = 1.6e-6. The order of execution does not change results: two passes over the same
tensors agree to the last bit.
"""

# Triton's style: many arguments, constants of a kernel in capitals, no Python types, no sets, no chained comparisons.
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0913, PLR0915, PLR0917, PLR1714, SIM109
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from watchstep.pytorch.cuda import figures
from watchstep.pytorch.cuda.block_reading import (
    BFLOAT16,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    inside,
    load_block,
    widen,
)

BLOCK: Final = 2048
BLOCKS: Final = 16
SPAN: Final = BLOCK * BLOCKS
REGION: Final = 5
"""Number of int64 that describe a tensor: address (a multiple of 16), start and end index from there, kind, first program."""
PARTIAL: Final = 5
"""Number of float64 results of a span: finite elements, mean, m2, sum of magnitudes, sum of squares."""
MERGED: Final = 256

_REGION = tl.constexpr(REGION)
_PARTIAL = tl.constexpr(PARTIAL)
_HEAD = tl.constexpr(figures.HEAD)
_CODES = tl.constexpr(figures.CODES)
_SUBNORMALS = tl.constexpr(figures.SUBNORMALS)
_WIDTH = tl.constexpr(figures.WIDTH)
_NAN = tl.constexpr(figures.NAN)
_POS_INF = tl.constexpr(figures.POS_INF)
_NEG_INF = tl.constexpr(figures.NEG_INF)
_HIGH = tl.constexpr(figures.HIGH)
_LOW = tl.constexpr(figures.LOW)
_ABS_LOW = tl.constexpr(figures.ABS_LOW)
_FINITE = tl.constexpr(figures.FINITE)

_BELOW_SIGN = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_SIGN_BIT = tl.constexpr(2**31)
# Exponent fields of a window: 62 of its 64 bins. The last two count elements outside.
_WINDOW = tl.constexpr(31)
_ABOVE = tl.constexpr(4)
_BINS = tl.constexpr(64)
# Below this exponent field, 2**-55, subnormals in the same block are not negligible.
_LIFTED = tl.constexpr(72)


@triton.jit(do_not_specialize=["regions"])
def measure_spans(table, partials, rows, regions, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Measure one span per program.

    Args:
        table: int64: `REGION` numbers per tensor, then the tensor of each program.
        partials: float64 of shape (programs, `PARTIAL`).
        rows: int64 of shape (tensors, WIDTH), initially zero.
        regions: Number of tensors.
        BLOCK: Number of elements in registers.
        BLOCKS: Number of blocks of a span.
    """
    program = tl.program_id(0)
    owner = tl.load(table + regions * _REGION + program)
    region = table + owner * _REGION
    address = tl.load(region)
    start = tl.load(region + 1)
    end = tl.load(region + 2)
    kind = tl.load(region + 3)
    first = (program - tl.load(region + 4)) * (BLOCK * BLOCKS)
    row = rows + owner * _WIDTH
    partial = partials + program.to(tl.int64) * _PARTIAL
    # A separate branch for each type, so that each has its own register layout.
    if kind == FLOAT32:
        _measure(FLOAT32, address, start, end, first, row, partial, BLOCK, BLOCKS)
    elif kind == BFLOAT16:
        _measure(BFLOAT16, address, start, end, first, row, partial, BLOCK, BLOCKS)
    elif kind == FLOAT16:
        _measure(FLOAT16, address, start, end, first, row, partial, BLOCK, BLOCKS)
    elif kind == FLOAT8_E4M3FN:
        _measure(FLOAT8_E4M3FN, address, start, end, first, row, partial, BLOCK, BLOCKS)
    else:
        _measure(FLOAT8_E5M2, address, start, end, first, row, partial, BLOCK, BLOCKS)


@triton.jit(do_not_specialize=["regions", "programs"])
def merge_spans(table, partials, rows, regions, programs, MERGED: tl.constexpr):
    """Merge the sums of the spans of one tensor per program, in order.

    Args:
        table: As for `measure_spans`.
        partials: As for `measure_spans`.
        rows: Receives mean, m2 and sums, and a 1 after the last row.
        regions: Number of tensors.
        programs: Number of spans.
        MERGED: Number of spans that are merged at once.
    """
    row = tl.program_id(0)
    first = tl.load(table + row * _REGION + 4)
    last = tl.load(table + (row + 1) * _REGION + 4, mask=row + 1 < regions, other=0)
    last = tl.where(row + 1 < regions, last, programs)
    lane = tl.arange(0, MERGED)
    zero = tl.full([MERGED], 0, tl.float64)
    elements, weighted, magnitudes, squares = zero, zero, zero, zero
    for at in range(first, last, MERGED):
        valid = at + lane < last
        span = partials + (at + lane) * _PARTIAL
        count = tl.load(span, mask=valid, other=0.0)
        elements += count
        weighted += count * tl.load(span + 1, mask=valid, other=0.0)
        magnitudes += tl.load(span + 3, mask=valid, other=0.0)
        squares += tl.load(span + 4, mask=valid, other=0.0)
    total = tl.sum(elements)
    mean = tl.sum(weighted) / tl.maximum(total, 1.0)
    moment = zero
    for at in range(first, last, MERGED):
        valid = at + lane < last
        span = partials + (at + lane) * _PARTIAL
        distance = tl.load(span + 1, mask=valid, other=0.0) - mean
        count = tl.load(span, mask=valid, other=0.0)
        moment += tl.load(span + 2, mask=valid, other=0.0) + count * distance * distance
    head = rows + row.to(tl.int64) * _WIDTH + _FINITE
    tl.store(head, total.to(tl.int64))
    tl.store(head + 1, mean.to(tl.int64, bitcast=True))
    tl.store(head + 2, tl.sum(moment).to(tl.int64, bitcast=True))
    tl.store(head + 3, tl.sum(magnitudes).to(tl.int64, bitcast=True))
    tl.store(head + 4, tl.sum(squares).to(tl.int64, bitcast=True))
    if row == 0:
        tl.store(rows + regions.to(tl.int64) * _WIDTH, 1)


@triton.jit(do_not_specialize=["regions", "turn", "slices"])
def check_spans(table, flag, regions, turn, slices, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Set the flag if a span contains NaN or infinity.

    Args:
        table: As for `measure_spans`. A tensor with a negative kind (-1 - kind) is checked by slices.
        flag: int64 of shape (2,), initially zero: the result, and a 1 that signals that it is complete.
        regions: Number of tensors.
        turn: Slice of large tensors, 0 … slices - 1.
        slices: Number of slices.
        BLOCK: Number of elements in registers.
        BLOCKS: Number of blocks of a span.
    """
    program = tl.program_id(0)
    if program == 0:
        tl.store(flag + 1, 1)
    region = table + tl.load(table + regions * _REGION + program) * _REGION
    address = tl.load(region)
    start = tl.load(region + 1)
    end = tl.load(region + 2)
    kind = tl.load(region + 3)
    span = program - tl.load(region + 4)
    if kind < 0:
        kind = -1 - kind
        span = span * slices + turn
    first = span * (BLOCK * BLOCKS)
    if kind == FLOAT32:
        _check(FLOAT32, 0x7F800000, address, start, end, first, flag, BLOCK, BLOCKS)
    elif kind == BFLOAT16:
        _check(BFLOAT16, 0x7F80, address, start, end, first, flag, BLOCK, BLOCKS)
    elif kind == FLOAT16:
        _check(FLOAT16, 0x7C00, address, start, end, first, flag, BLOCK, BLOCKS)
    elif kind == FLOAT8_E4M3FN:
        _check(FLOAT8_E4M3FN, 0x7F, address, start, end, first, flag, BLOCK, BLOCKS)
    else:
        _check(FLOAT8_E5M2, 0x7C, address, start, end, first, flag, BLOCK, BLOCKS)


@triton.jit
def _check(
    KIND: tl.constexpr,
    LEAST: tl.constexpr,
    address,
    start,
    end,
    first,
    flag,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Set the flag if some bits below the sign are at least LEAST: those of infinity, or of NaN for a type without infinity."""
    largest = tl.full([BLOCK], -1, tl.int32)
    blocks = tl.minimum(tl.cdiv(end - first, BLOCK), BLOCKS).to(tl.int32)
    for number in range(blocks):
        raw = load_block(KIND, address, start, end, first + number * BLOCK, BLOCK).to(tl.int32)
        if KIND == FLOAT32:
            largest = tl.maximum(largest, raw & _BELOW_SIGN)
        elif KIND == FLOAT8_E4M3FN or KIND == FLOAT8_E5M2:
            largest = tl.maximum(largest, raw & 0x7F)
        else:
            largest = tl.maximum(largest, raw & 0x7FFF)
    if tl.max(largest) >= LEAST:
        tl.store(flag, 1)


@triton.jit
def _measure(
    KIND: tl.constexpr, address, start, end, first, row, partial, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    histogram = tl.zeros([_BINS], tl.int32)
    base = tl.full([], 0, tl.int32)
    elements = tl.full([], 0, tl.float64)
    mean = tl.full([], 0, tl.float64)
    moment = tl.full([], 0, tl.float64)
    magnitudes = tl.full([], 0, tl.float64)
    squares = tl.full([], 0, tl.float64)
    high = tl.full([], -_SIGN_BIT, tl.int32)
    low = tl.full([], _BELOW_SIGN, tl.int32)
    abs_low = tl.full([], _BELOW_SIGN, tl.int32)
    blocks = tl.minimum(tl.cdiv(end - first, BLOCK), BLOCKS).to(tl.int32)
    for number in range(blocks):
        at = first + number * BLOCK
        whole = (at >= start) & (at + BLOCK <= end)
        bits = widen(KIND, load_block(KIND, address, start, end, at, BLOCK))
        key = bits ^ ((bits >> 31) & _BELOW_SIGN)
        block_high = tl.max(key)
        block_low = tl.min(key)
        # The key of -x is -1 - (bits of x).
        clean = whole & (tl.maximum(block_high, -1 - block_low) < _INFINITY)
        finite_count = tl.full([], BLOCK, tl.int32)
        if not clean:
            finite = inside(at, start, end, BLOCK) & ((bits & _BELOW_SIGN) < _INFINITY)
            _count_nonfinite(bits, row)
            finite_count = tl.sum(finite.to(tl.int32))
            block_high = tl.max(tl.where(finite, key, -_SIGN_BIT))
            block_low = tl.min(tl.where(finite, key, _BELOW_SIGN))
            bits = tl.where(finite, bits, 0)
        if finite_count > 0:
            magnitude = bits & _BELOW_SIGN
            smallest = tl.min(tl.where(magnitude == 0, _BELOW_SIGN, magnitude))
            high = tl.maximum(high, block_high)
            low = tl.minimum(low, block_low)
            abs_low = tl.minimum(abs_low, smallest)
            largest = tl.maximum(block_high, -1 - block_low)
            if base == 0:
                base = tl.maximum((largest >> 23) + _ABOVE - (_WINDOW - 1), 1)
            # Zero is below every window: as an unsigned number its code is the largest.
            code = ((((bits >> 23) & 0xFF) - base) << 1) + ((bits >> 31) & 1)
            histogram += tl.histogram(
                tl.minimum(code.to(tl.uint32, bitcast=True), _BINS - 1).to(tl.int32), _BINS
            )
            if ((smallest >> 23) < base) | ((largest >> 23) >= base + _WINDOW):
                _count_outside(bits, base, row)
            field = tl.maximum(largest >> 23, _LIFTED)
            exponent = field - 128
            x = bits.to(tl.float32, bitcast=True) * ((255 - field) << 23).to(tl.float32, bitcast=True)
            if KIND == FLOAT32 or KIND == BFLOAT16:
                if smallest < _SMALLEST_NORMAL:
                    _count_subnormals(bits, row)
                if largest < (_LIFTED << 23):
                    x = _lifted(bits)
                    exponent = tl.full([], -109, tl.int32)
            count = finite_count.to(tl.float32)
            center = tl.sum(x) / count
            distance = x - center
            if not clean:
                # Non-finite elements have been set to zero; loading again distinguishes them from zeros.
                reloaded = widen(KIND, load_block(KIND, address, start, end, at, BLOCK))
                valid = inside(at, start, end, BLOCK) & ((reloaded & _BELOW_SIGN) < _INFINITY)
                distance = tl.where(valid, distance, 0.0)
            drift = tl.sum(distance).to(tl.float64)
            square_sum = tl.sum(distance * distance).to(tl.float64)
            size = ((exponent + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
            block_count = finite_count.to(tl.float64)
            block_mean = (center.to(tl.float64) + drift / block_count) * size
            total_count = elements + block_count
            difference = block_mean - mean
            mean += difference * (block_count / total_count)
            moment += (square_sum - drift * drift / block_count) * size * size + difference * difference * (
                elements * block_count / total_count
            )
            elements = total_count
            magnitudes += tl.sum(tl.abs(x)).to(tl.float64) * size
            squares += tl.sum(x * x).to(tl.float64) * size * size
    tl.store(partial, elements)
    tl.store(partial + 1, mean)
    tl.store(partial + 2, moment)
    tl.store(partial + 3, magnitudes)
    tl.store(partial + 4, squares)
    if elements > 0:
        tl.atomic_max(row + _HIGH, high.to(tl.int64) + _SIGN_BIT, sem="relaxed")
        tl.atomic_max(row + _LOW, -low.to(tl.int64) + _SIGN_BIT, sem="relaxed")
        tl.atomic_max(row + _ABS_LOW, -abs_low.to(tl.int64) + _SIGN_BIT, sem="relaxed")
    lane = tl.arange(0, _BINS)
    counted = (histogram > 0) & (lane < 2 * _WINDOW)
    tl.atomic_add(
        row + _HEAD + (lane >> 1) + base + ((lane & 1) << 8),
        histogram.to(tl.int64),
        mask=counted,
        sem="relaxed",
    )


@triton.jit
def _count_nonfinite(bits, row):
    """Count NaN and infinity. Elements outside the tensor were loaded as zero."""
    magnitude = bits & _BELOW_SIGN
    nan = tl.sum((magnitude > _INFINITY).to(tl.int64))
    infinite = magnitude == _INFINITY
    negative = tl.sum((infinite & (bits < 0)).to(tl.int64))
    positive = tl.sum(infinite.to(tl.int64)) - negative
    if nan + positive + negative > 0:
        tl.atomic_add(row + _NAN, nan, sem="relaxed")
        tl.atomic_add(row + _POS_INF, positive, sem="relaxed")
        tl.atomic_add(row + _NEG_INF, negative, sem="relaxed")


@triton.jit
def _count_outside(bits, base, row):
    """Count elements outside the window by sign and exponent field. Others are counted as zeros, whose bin is ignored."""
    code = (bits >> 23) & (_CODES - 1)
    field = code & 0xFF
    inside = (field >= base) & (field < base + _WINDOW)
    histogram = tl.histogram(tl.where(inside, 0, code), _CODES)
    lane = tl.arange(0, _CODES)
    counted = (histogram > 0) & ((lane & 0xFF) > 0)
    tl.atomic_add(row + _HEAD + lane, histogram.to(tl.int64), mask=counted, sem="relaxed")


@triton.jit
def _count_subnormals(bits, row):
    """Count subnormals by the highest bit of the mantissa, which is found by conversion of an integer to float32."""
    magnitude = bits & _BELOW_SIGN
    subnormal = (magnitude > 0) & (magnitude < _SMALLEST_NORMAL)
    highest = (magnitude.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    place = tl.where(subnormal, highest + tl.where(bits < 0, 32, 0), 31)
    histogram = tl.histogram(place, _SUBNORMALS)
    lane = tl.arange(0, _SUBNORMALS)
    counted = (histogram > 0) & (lane != 31)
    tl.atomic_add(row + _HEAD + _CODES + lane, histogram.to(tl.int64), mask=counted, sem="relaxed")


@triton.jit
def _lifted(bits):
    """Return values times 2**109: times 2**149 by integers, which flushing does not affect, then a product of normal numbers."""
    magnitude = bits & _BELOW_SIGN
    normal = (magnitude + (149 << 23)).to(tl.float32, bitcast=True)
    size = tl.where(magnitude < _SMALLEST_NORMAL, magnitude.to(tl.float32), normal) * 9.094947017729282e-13
    return tl.where(bits < 0, -size, size)
