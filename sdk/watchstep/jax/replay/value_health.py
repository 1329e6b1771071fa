"""Counts and extremes of JAX arrays, and whether they are finite.

Arrays in host memory are read without a copy. On other devices the check is a reduction there, and only an array that is not finite is copied.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from numpy.typing import NDArray

from watchstep.jax.internals import jax_names
from watchstep.trace.operations import TensorHealth


def is_reference(value: Any) -> bool:
    """Return whether a value is a mutable reference to an array (``jax.Ref``)."""
    kind = jax_names.find("ref")
    return kind is not None and isinstance(value, kind)


def contents(value: Any) -> Any:
    """Return the array that a reference refers to; another value itself."""
    return value[...] if is_reference(value) else value


def is_checkable(array: Any) -> bool:
    """Return whether an array has elements that can be NaN or infinite: not integers, booleans, random keys or references."""
    dtype = getattr(array, "dtype", None)
    if is_reference(array):
        return False
    if dtype is None:
        return isinstance(array, (float, complex))
    return bool(jax.dtypes.issubdtype(dtype, np.inexact)) and bool(getattr(array, "size", 1))


def has_nonfinite(array: Any) -> bool:
    """Return whether an element of an array is NaN or infinite. Waits for the device."""
    array = contents(array)
    if not is_checkable(array):
        return False
    if isinstance(array, jax.Array) and not _is_on_host(array):
        return not bool(_device_check()(array))
    return not bool(np.isfinite(host_values(array)).all())


def host_values(array: Any) -> NDArray[Any]:
    """Return the elements of a checkable array in host memory. 16-bit and 8-bit floating-point elements are widened to float32."""
    values = np.asarray(array)
    if (
        values.dtype.kind == "V" or values.dtype.itemsize < 4
    ):  # ml_dtypes' types lack some of NumPy's functions
        return values.astype(np.float32)
    return values


def health_of_array(array: Any) -> TensorHealth | None:
    """Return counts of an array's elements and the extremes of the finite ones; None for one that is not checkable.

    A complex array counts as its real and imaginary parts.
    """
    array = contents(array)
    if not is_checkable(array):
        return None
    values = host_values(array)
    shape = values.shape
    bad = ~np.isfinite(values)
    first = tuple(int(index) for index in np.unravel_index(int(bad.argmax()), shape)) if bad.any() else ()
    if values.dtype.kind == "c":
        values = np.ascontiguousarray(values).reshape(-1).view(values.real.dtype)
    finite = values[np.isfinite(values)]
    nan = int(np.isnan(values).sum())
    positive_infinite = int(np.isposinf(values).sum())
    negative, zero = int((finite < 0).sum()), int((finite == 0).sum())
    return TensorHealth(
        elements=int(values.size),
        nan=nan,
        positive_infinite=positive_infinite,
        negative_infinite=int(values.size - finite.size) - nan - positive_infinite,
        negative=negative,
        zero=zero,
        positive=int(finite.size) - negative - zero,
        minimum=float(finite.min()) if finite.size else None,
        maximum=float(finite.max()) if finite.size else None,
        first_bad=first,
    )


def _is_on_host(array: Any) -> bool:
    return all(device.platform == "cpu" for device in array.devices())


@cache
def _device_check() -> Any:
    return jax.jit(lambda array: jnp.isfinite(array).all())
