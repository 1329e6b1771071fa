"""Arrow's arrays from numpy's and back, over the same memory.

`pyarrow.array` and ``to_numpy`` import pandas where it is installed: a sixth of a second and some 60 MB, in a training
process or before a first answer, for nothing that is used here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

_DTYPES = {"int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64, "double": np.float64}


def from_numbers(values: NDArray[Any], *, nan_is_null: bool = False) -> pa.Array:
    """An array of numpy's numbers, shape (n,), over their memory where they are contiguous.

    Args:
        values: integers or floats; not to be changed while the array lives.
        nan_is_null: NaN becomes null; only for floats.
    """
    import pyarrow as pa

    held = np.ascontiguousarray(values)
    missing = np.isnan(held) if nan_is_null else None
    nulls = 0 if missing is None else int(np.count_nonzero(missing))
    valid = pa.py_buffer(np.packbits(~missing, bitorder="little")) if nulls and missing is not None else None
    kind = pa.from_numpy_dtype(held.dtype)
    return pa.Array.from_buffers(kind, len(held), [valid, pa.py_buffer(held)], nulls)


def from_words(words: Sequence[str]) -> pa.StringArray:
    """An array of strings."""
    import pyarrow as pa

    packed = [word.encode() for word in words]
    ends = np.cumsum([0, *map(len, packed)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(packed), pa.py_buffer(ends), pa.py_buffer(b"".join(packed)))


def from_codes(codes: NDArray[Any], words: Sequence[str]) -> pa.DictionaryArray:
    """An array of words as places (int32) in a dictionary of them."""
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(from_numbers(codes.astype(np.int32)), from_words(words))


def to_places(column: pa.ChunkedArray, known: Mapping[str, int], dtype: type, name: str) -> NDArray[Any]:
    """A column of words as the place of each, shape (n,).

    Args:
        column: of words, plain or in a dictionary.
        known: word → its place.
        dtype: of the places.
        name: the column's, for an error.

    Raises:
        KeyError: a word is not known.
        ValueError: one is null.
    """
    import pyarrow as pa

    merged = pa.concat_arrays(column.chunks) if column.num_chunks else from_words([])
    if not pa.types.is_dictionary(merged.type):
        merged = merged.dictionary_encode()
    if merged.null_count:
        raise ValueError(f"column {name} has nulls")
    place: NDArray[Any] = np.array([known[word] for word in merged.dictionary.to_pylist()] or [0], dtype)
    found: NDArray[Any] = place[to_numbers(merged.indices)]
    return found


def to_numbers(column: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
    """A column of numbers as numpy's, shape (n,), NaN where a float is null; read-only.

    Raises:
        TypeError: it is of no type that a segment's numbers have.
        ValueError: an integer is null.
    """
    import pyarrow as pa

    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [_numbers(chunk) for chunk in chunks]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, _dtype(column.type))


def _numbers(array: pa.Array) -> NDArray[Any]:
    dtype = np.dtype(_dtype(array.type))
    if not len(array):
        return np.empty(0, dtype)
    valid, data = array.buffers()
    values = np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)
    if not array.null_count:
        return values
    if dtype.kind != "f":
        raise ValueError(f"{array.null_count} of {len(array)} integers are null")
    bits = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")
    return np.where(bits[array.offset : array.offset + len(array)], values, np.nan)


def _dtype(kind: pa.DataType) -> type:
    found = _DTYPES.get(str(kind))
    if found is None:
        raise TypeError(f"numbers of type {str(kind)[:80]} are not read")
    return found
