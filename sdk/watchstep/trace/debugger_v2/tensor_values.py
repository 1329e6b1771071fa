"""What a dump has recorded of a tensor: the vectors of numbers of each debug mode, and full tensors, as health and values.

The vectors are defined by TensorFlow's ``DebugNumericSummaryV2``, all of float64:

==================  ==========================================================================================
CURT_HEALTH         tensor id, whether an element is not finite
CONCISE_HEALTH      tensor id, elements, -inf, +inf, NaN
FULL_HEALTH         tensor id, device, dtype, rank, elements, -inf, +inf, NaN, negative, zero, positive
SHAPE               tensor id, dtype, rank, elements, and six dimensions; of a higher rank the last six
==================  ==========================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.trace.debugger_v2.wire import (
    FIXED32,
    WireError,
    fields,
    integers,
    message_of,
    numbers_of,
    signed,
)
from watchstep.trace.operations import TensorHealth, TraceMode


class DebugMode(IntEnum):
    """TensorFlow's ``TensorDebugMode``."""

    NO_TENSOR = 1
    CURT_HEALTH = 2
    CONCISE_HEALTH = 3
    FULL_HEALTH = 4
    SHAPE = 5
    FULL_TENSOR = 7


MODES = {
    DebugMode.NO_TENSOR: TraceMode.NO_TENSOR,
    DebugMode.CURT_HEALTH: TraceMode.CURT_HEALTH,
    DebugMode.CONCISE_HEALTH: TraceMode.CONCISE_HEALTH,
    DebugMode.FULL_HEALTH: TraceMode.FULL_HEALTH,
    DebugMode.SHAPE: TraceMode.SHAPE,
    DebugMode.FULL_TENSOR: TraceMode.FULL_TENSOR,
}

UNKNOWN_SHAPE = (-1,)
MAX_RANK = 254
MAX_ELEMENTS = 2**53
_DIMENSIONS = 6
"""Number of dimensions in mode SHAPE."""

DTYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    7: "string",
    8: "complex64",
    9: "int64",
    10: "bool",
    11: "qint8",
    12: "quint8",
    13: "qint32",
    14: "bfloat16",
    15: "qint16",
    16: "quint16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    20: "resource",
    21: "variant",
    22: "uint32",
    23: "uint64",
    24: "float8_e5m2",
    25: "float8_e4m3fn",
}
"""Names of TensorFlow's ``DataType``."""

_CONTENT = {
    "float32": "<f4",
    "float64": "<f8",
    "int32": "<i4",
    "uint8": "|u1",
    "int16": "<i2",
    "int8": "|i1",
    "complex64": "<c8",
    "int64": "<i8",
    "bool": "|b1",
    "bfloat16": "<u2",
    "uint16": "<u2",
    "complex128": "<c16",
    "float16": "<f2",
    "uint32": "<u4",
    "uint64": "<u8",
}
"""NumPy dtypes of ``tensor_content``; bfloat16 as its bits."""

_LISTS = {5: "<f4", 6: "<f8", 9: "<f4", 12: "<f8"}
"""NumPy dtypes of the repeated fields of numbers of fixed size: float_val, double_val, scomplex_val, dcomplex_val."""
_INTEGERS = frozenset({7, 10, 11, 13, 16, 17})
"""The repeated fields of variable size: int_val, int64_val, bool_val, half_val, uint32_val, uint64_val."""
_MAX_INTEGERS = 2**24


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """What was recorded of one output.

    Attributes:
        shape: its shape; -1 for a dimension that was not recorded.
        dtype: its name; empty if it was not recorded.
        nonfinite: whether an element is NaN or infinite; None if it was not recorded.
        health: counts; None if they were not recorded.
        values: its elements, of its shape; None if they were not recorded. A view of the record, or a repetition of one element.
    """

    shape: tuple[int, ...] = UNKNOWN_SHAPE
    dtype: str = ""
    nonfinite: bool | None = None
    health: TensorHealth | None = None
    values: NDArray[Any] | None = None


def recorded_tensor(mode: int, message: memoryview) -> RecordedTensor:
    """Return what a ``TensorProto`` says about an output.

    Args:
        mode: Number of the debug mode.
        message: The ``TensorProto``; empty for an output that the mode does not examine.

    Raises:
        WireError: it is damaged, or not what the mode records.
    """
    if not len(message) or mode not in MODES or mode == DebugMode.NO_TENSOR:
        return RecordedTensor()
    tensor = _parsed(message)
    if mode == DebugMode.FULL_TENSOR:
        return _full(tensor)
    numbers = tensor.listed
    if numbers is None or numbers.dtype != np.float64 or len(numbers) > _MAX_NUMBERS:
        raise WireError(f"no vector of float64 for debug mode {DebugMode(mode).name}")
    if not len(numbers):
        return RecordedTensor()
    vector = [float(number) for number in numbers]
    # A vector may end with repetitions of its last number, which the message leaves out.
    vector += vector[-1:] * (_NUMBERS[mode] - len(vector))
    if len(vector) != _NUMBERS[mode]:
        raise WireError(f"{len(vector)} numbers for debug mode {DebugMode(mode).name}")
    return _summary(mode, vector)


_NUMBERS = {
    int(DebugMode.CURT_HEALTH): 2,
    int(DebugMode.CONCISE_HEALTH): 5,
    int(DebugMode.FULL_HEALTH): 11,
    int(DebugMode.SHAPE): 4 + _DIMENSIONS,
}
_MAX_NUMBERS = 16


def _summary(mode: int, vector: list[float]) -> RecordedTensor:
    if mode == DebugMode.CURT_HEALTH:
        return RecordedTensor(nonfinite=bool(vector[1]))
    if mode == DebugMode.CONCISE_HEALTH:
        elements, negative_infinite, positive_infinite, nan = map(_count, vector[1:])
        health = TensorHealth(elements, nan, positive_infinite, negative_infinite)
        return RecordedTensor(nonfinite=not health.is_finite, health=health)
    if mode == DebugMode.SHAPE:
        rank, elements = _count(vector[2]), _count(vector[3])
        if rank > MAX_RANK:
            raise WireError(f"rank {rank}")
        last = tuple(_count(size) for size in vector[4:][: min(rank, _DIMENSIONS)])
        return RecordedTensor((-1,) * (rank - len(last)) + last, _dtype(vector[1]))
    rank, elements, negative_infinite, positive_infinite, nan, negative, zero, positive = map(
        _count, vector[3:]
    )
    if rank > MAX_RANK:
        raise WireError(f"rank {rank}")
    health = TensorHealth(
        elements,
        nan,
        positive_infinite,
        negative_infinite,
        negative=negative,
        zero=zero,
        positive=positive,
    )
    shape = (elements,) if rank == 1 else (-1,) * rank
    return RecordedTensor(shape, _dtype(vector[2]), not health.is_finite, health)


def _count(number: float) -> int:
    if not 0 <= number <= MAX_ELEMENTS or number != int(number):
        raise WireError(f"count {number}")
    return int(number)


def _dtype(number: float) -> str:
    return (
        DTYPES.get(int(number) % 100, "") if 0 <= number < 200 else ""
    )  # 101 and above are references to variables


@dataclass(frozen=True, slots=True)
class _TensorProto:
    """A ``TensorProto``: its dtype, its shape, and its elements, of which the last one may stand for all further ones."""

    dtype: str
    shape: tuple[int, ...]
    content: memoryview | None
    listed: NDArray[Any] | None


def _parsed(message: memoryview) -> _TensorProto:
    dtype = ""
    shape: tuple[int, ...] = ()
    content: memoryview | None = None
    listed: list[NDArray[Any]] = []
    for number, kind, value in fields(message):
        if number == 1:
            dtype = _dtype(signed(value))
        elif number == 2:
            shape = _shape(message_of(value))
        elif number == 4:
            content = message_of(value)
        elif number in _LISTS:
            listed.append(numbers_of(value, kind, _LISTS[number]))
        elif number in _INTEGERS:
            if kind == FIXED32:
                raise WireError(f"wire type {kind} of integers")
            listed.append(np.array(integers(value, _MAX_INTEGERS), np.int64))
        if len(listed) > _MAX_LISTS:
            raise WireError(f"more than {_MAX_LISTS} unpacked elements")
    if content is not None and dtype in _CONTENT:
        return _TensorProto(dtype, shape, content, _of_content(content, dtype))
    if not listed:
        return _TensorProto(dtype, shape, content, np.zeros(0, _CONTENT.get(dtype, "<f8")))
    if len({each.dtype for each in listed}) > 1:
        raise WireError("elements of several types")
    return _TensorProto(dtype, shape, content, _of_list(np.concatenate(listed), dtype))


_MAX_LISTS = 65_536
_MAX_EXPANDED_BYTES = 16 * 2**20
"""Maximum size of a tensor whose last element is repeated."""


def _shape(message: memoryview) -> tuple[int, ...]:
    sizes: list[int] = []
    for number, _, value in fields(message):
        if number == 2:
            size = 0
            for inner, _kind, content in fields(message_of(value)):
                if inner == 1:
                    size = signed(content)
            sizes.append(size)
        if len(sizes) > MAX_RANK:
            raise WireError(f"more than {MAX_RANK} dimensions")
    if any(size < 0 for size in sizes) or math.prod(sizes) > MAX_ELEMENTS:
        raise WireError(f"shape {sizes[:10]}")
    return tuple(sizes)


def _of_content(content: memoryview, dtype: str) -> NDArray[Any]:
    if len(content) % np.dtype(_CONTENT[dtype]).itemsize:
        raise WireError(f"{len(content)} bytes of {dtype}")
    values: NDArray[Any] = np.frombuffer(content, _CONTENT[dtype])
    return _widened(values, dtype)


def _of_list(numbers: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return listed numbers in the tensor's dtype: real and imaginary parts are joined, and bits of half precision are interpreted."""
    if dtype not in _CONTENT:
        return numbers
    if dtype in {"complex64", "complex128"}:
        if len(numbers) % 2 or numbers.dtype.kind != "f":
            raise WireError(f"{len(numbers)} parts of {dtype}")
        return numbers.astype(_CONTENT[dtype].replace("c16", "f8").replace("c8", "f4")).view(_CONTENT[dtype])
    if dtype in {"float16", "bfloat16"}:
        if numbers.dtype.kind != "i":
            raise WireError(f"no bits of {dtype}")
        bits = (numbers & 0xFFFF).astype("<u2")
        return _widened(bits, dtype) if dtype == "bfloat16" else bits.view("<f2")
    if (numbers.dtype.kind == "f") != (_CONTENT[dtype][1] == "f"):
        raise WireError(f"elements of another type than {dtype}")
    return numbers.astype(_CONTENT[dtype])


def _widened(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return bits of bfloat16 as float32, and other values as they are."""
    if dtype != "bfloat16":
        return values
    return (values.astype("<u4") << 16).view("<f4")


def _full(tensor: _TensorProto) -> RecordedTensor:
    elements = math.prod(tensor.shape)
    if tensor.dtype not in _CONTENT or tensor.listed is None:
        return RecordedTensor(tensor.shape, tensor.dtype)
    listed = tensor.listed
    is_whole = len(listed) == elements
    if len(listed) > elements or (tensor.content is not None and not is_whole):
        raise WireError(f"{len(listed)} elements for shape {tensor.shape}")
    if not len(listed):
        listed = np.zeros(min(elements, 1), listed.dtype)
    values: NDArray[Any] | None = None
    if is_whole:
        values = listed.reshape(tensor.shape)
    elif len(listed) == 1:
        values = np.broadcast_to(listed[0], tensor.shape)  # takes no memory
    elif len(listed) and elements * listed.itemsize <= _MAX_EXPANDED_BYTES:
        values = np.concatenate([listed, np.broadcast_to(listed[-1], elements - len(listed))])
        values = values.reshape(tensor.shape)
    health = _health(listed, elements, tensor.shape) if listed.dtype.kind in "fc" else None
    return RecordedTensor(
        tensor.shape, tensor.dtype, None if health is None else not health.is_finite, health, values
    )


def _health(listed: NDArray[Any], elements: int, shape: tuple[int, ...]) -> TensorHealth:
    """Count elements, of which the last listed one stands for all further ones."""
    parts = listed.view(listed.real.dtype) if listed.dtype.kind == "c" else listed

    def count(mask: NDArray[np.bool_]) -> int:
        more = bool(mask[-1]) * (elements - len(listed)) if len(mask) else 0
        return int(np.count_nonzero(mask)) + more

    if listed.dtype.kind == "c":
        # A complex element is counted once, by the worst of its parts.
        pairs = parts.reshape(-1, 2)
        nan = np.isnan(pairs).any(axis=1)
        positive = ~nan & (pairs == np.inf).any(axis=1)
        negative = ~nan & ~positive & (pairs == -np.inf).any(axis=1)
        bad = nan | positive | negative
        counted = TensorHealth(elements, count(nan), count(positive), count(negative))
    else:
        bad = ~np.isfinite(listed)
        counted = TensorHealth(
            elements,
            count(np.isnan(listed)),
            count(listed == np.inf),
            count(listed == -np.inf),
            negative=count(np.isfinite(listed) & (listed < 0)),
            zero=count(listed == 0),
            positive=count(np.isfinite(listed) & (listed > 0)),
        )
    if counted.is_finite:
        return counted
    first = tuple(int(index) for index in np.unravel_index(int(bad.argmax()), shape)) if shape else ()
    return replace(counted, first_bad=first)
