"""Arrays, numbers and lists that a program records itself: conversion to NumPy, statistics and full tensors.

Arrays of other frameworks are converted by ``__array__`` or, without it, by ``__dlpack__``. No framework is imported. An array on a device
is copied to the host when it is due, which waits for the device; the time counts against the overhead budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.capture.config import TensorLimits
from watchstep.capture.given.array_probes import ArrayProbes
from watchstep.capture.given.confusion import ArrayConfusion
from watchstep.capture.given.gate import GivenGate
from watchstep.capture.given.names import Given, GivenNames
from watchstep.capture.steps.session import Session
from watchstep.capture.tensors.collections import SELECTABLE, DueTensor, TensorCapture
from watchstep.format.snapshot import TensorPart
from watchstep.format.tensors import Mode, TensorInfo
from watchstep.kernels import native_kernel
from watchstep.kernels.array_kernel import MAX_OVERLAPPING_BYTES, measure_array
from watchstep.kernels.measurement import Completed, Measurement, Repeated
from watchstep.kernels.native_kernel import KINDS, MemoryRange

FORMAT_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names of NumPy's dtypes in a safetensors header."""

_NUMERIC_KINDS = "biufc"


class GivenArrays:
    """Records the arrays that the program passes, into one session."""

    def __init__(self, session: Session, names: GivenNames) -> None:
        self._session = session
        self._names = names
        self._confusion = ArrayConfusion(session)
        self._probes = ArrayProbes(session.config.probes)
        self._gate = GivenGate(session)

    def record(self, given: Given, value: Any) -> None:
        """Record one value if its collection is due.

        Args:
            given: its checked arguments.
            value: an array, or a value that `as_array` converts.

        Raises:
            TypeError: the value is not numeric. The conversion may raise any other exception.
        """
        session, step, mode = self._session, self._session.recorder.step, given.mode
        due = self._names.due(given)
        takes_part = self._confusion.takes_part(given.name, mode)
        if due.measured is None:
            due = due._replace(measured=self._gate.onset(given, lambda: memory_of(value)))
        if due.measured is None and due.saved is None and not takes_part:
            return
        since = session.schedule.now()
        array = as_array(value)
        elements = elements_of(array)
        group = self._names.group(given, array.shape, array.dtype.name)
        (info,) = group.tensors
        if due.saved is not None:
            save_array(session.full_tensors, due.saved, step, mode, info, array)
            session.schedule.report_extra(since)
            since = session.schedule.now()
        if due.measured is not None:
            probes = self._probes.measure(info, elements, mode)
            session.recorder.add(group, measure(elements), mode, probes)
            session.schedule.spent(due.measured, since)
        if takes_part:
            self._confusion.give(given.name, elements, mode)


def memory_of(value: Any) -> list[MemoryRange] | None:
    """Return the memory of an array of NumPy that the compiled kernel can read without conversion; None for any other value."""
    if type(value) is not np.ndarray or not value.size:
        return None
    kind = KINDS.get(value.dtype.name)
    if kind is None or not (value.flags.forc and value.flags.aligned and value.dtype.isnative):
        return None
    return [MemoryRange(value.ctypes.data, value.size, kind)]


def as_array(value: Any) -> NDArray[Any]:
    """Return a value as an array of numbers in the machine's byte order, which may share its memory.

    Args:
        value: an array of NumPy, or of a framework with ``__array__`` or ``__dlpack__``; a number; or nested lists of numbers.

    Raises:
        TypeError: the elements are not numbers. The conversion of a framework's array may raise any other exception.
    """
    array = value if isinstance(value, np.ma.MaskedArray) else _converted(value)
    if not _is_numeric(array.dtype):
        raise TypeError(
            f"a value of type {type(value).__name__} with elements of type {array.dtype} is not numeric: "
            "use an array, a number or a list of numbers"
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _converted(value: Any) -> NDArray[Any]:
    if isinstance(value, np.ndarray) or not hasattr(value, "__array__"):
        if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray):
            return np.from_dlpack(value)
        return np.asarray(value)
    try:
        # Called directly: numpy would pass a keyword that older frameworks do not accept, with a warning.
        return np.asarray(value.__array__())
    except Exception:
        if not hasattr(value, "__dlpack__"):
            raise
        return np.from_dlpack(value)


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in _NUMERIC_KINDS or is_narrow(dtype)


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of the package ml_dtypes: bfloat16, or a number of at most 8 bits."""
    return dtype.type.__module__.partition(".")[0] == "ml_dtypes"


def elements_of(array: NDArray[Any]) -> NDArray[Any]:
    """Return the elements that are measured: of a masked array those that are not masked, in one dimension."""
    elements: NDArray[Any] = array.compressed() if isinstance(array, np.ma.MaskedArray) else array
    return elements


def measure(array: NDArray[Any]) -> Measurement:
    """Return the statistics of an array in host memory, as one row. A complex array is measured as its real and imaginary parts."""
    distinct, factor = _collapsed(array)
    measurement = _measured(_real(distinct))
    return measurement if factor == 1 else Repeated(measurement, np.array([factor], np.int64))


def _collapsed(array: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """Return an array without the dimensions along which it repeats its elements, and the number of repetitions.

    A copy of a broadcast array of a few bytes may take gigabytes.
    """
    if not array.size or array.flags.forc:
        return array, 1
    if 0 not in array.strides:
        return _distinct_memory(array), 1
    distinct = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
    return distinct, array.size // distinct.size


def _distinct_memory(array: NDArray[Any]) -> NDArray[Any]:
    """Return a large array with elements that overlap, as a sliding window, as the memory that it shows; any other array unchanged."""
    if array.nbytes <= MAX_OVERLAPPING_BYTES or min(array.strides) < 0:
        return array
    span = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    if span % array.itemsize or array.size <= 2 * (span // array.itemsize + 1):
        return array
    return np.lib.stride_tricks.as_strided(
        array, (span // array.itemsize + 1,), (array.itemsize,), writeable=False
    )


def _real(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind != "c":
        return array
    return np.ascontiguousarray(array).view(array.real.dtype)


def _measured(array: NDArray[Any]) -> Measurement:
    kind, native = KINDS.get(array.dtype.name), native_kernel.load()
    if native is None or kind is None:
        return Completed(measure_array(array.astype(np.float32) if is_narrow(array.dtype) else array))
    dense = array if array.flags.forc and array.flags.aligned else array.copy()
    return native.measure([MemoryRange(dense.ctypes.data, dense.size, kind)])


def save_array(
    capture: TensorCapture, collection: str, step: int, mode: Mode, info: TensorInfo, array: NDArray[Any]
) -> None:
    """Save an array in a collection that is due. One that cannot be saved is counted, and named in health.

    Masked elements are saved as the array's fill value.
    """
    dtype = FORMAT_NAMES.get(array.dtype.name)
    if dtype is None:
        capture.unsupported(collection, info.name, f"have a dtype that is not saved ({array.dtype})")
        return
    values, part = array, None
    if info.role in SELECTABLE:
        values, part = _selected(array, capture.limits(collection))
    if isinstance(values, np.ma.MaskedArray):
        values = values.filled()
    due = DueTensor(info, dtype, values.shape, part)
    capture.add(collection, step, mode, due, _copy_of(values))


def _selected(array: NDArray[Any], limits: TensorLimits) -> tuple[NDArray[Any], TensorPart | None]:
    """Return the rows and channels that the limits select, and their place."""
    start, index = [0] * array.ndim, [slice(None)] * array.ndim
    for dimension, part in enumerate((limits.rows, limits.channels)):
        if part is not None and dimension < array.ndim:
            first, end = (min(bound, array.shape[dimension]) for bound in part)
            start[dimension], index[dimension] = first, slice(first, end)
    values = array[tuple(index)]
    if values.shape == array.shape:
        return array, None
    return values, TensorPart(array.shape, tuple(start), is_shard=False)


def _copy_of(values: NDArray[Any]) -> Callable[[NDArray[np.uint8]], None]:
    """Return a function that copies elements to memory in row-major order, little-endian."""

    def copy(memory: NDArray[np.uint8]) -> None:
        bits = np.ascontiguousarray(values).view(f"u{values.itemsize}") if is_narrow(values.dtype) else values
        np.copyto(memory.view(bits.dtype.newbyteorder("<")).reshape(values.shape), bits.reshape(values.shape))

    return copy
