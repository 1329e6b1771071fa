"""Arrays and tables in the answers of queries. A separate module, so that commands without them never import numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import ServiceError
from watchstep.format.snapshot import DTYPES
from watchstep.platform.arrow import require_arrow
from watchstep.reading.queries import Heatmap, HistogramSeries, Reduce

if TYPE_CHECKING:
    import pyarrow as pa


ARROW = "application/vnd.apache.arrow.stream"


@dataclass(frozen=True)
class TensorBytes:
    """A tensor of a snapshot.

    Attributes:
        dtype: name of the dtype as in safetensors; ``values`` contains the bits of bfloat16 and fp8.
        values: array with the tensor's shape; read-only.
    """

    dtype: str
    values: NDArray[Any]


def table(content: bytes) -> pa.Table:
    """Parse an Arrow stream.

    Raises:
        ConfigError: pyarrow is not installed.
        ServiceError: the content is invalid.
    """
    require_arrow("a table of a service")
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(pa.py_buffer(content)).read_all()
    except pa.ArrowInvalid as error:
        raise _invalid("Arrow", error) from error


def heatmap(data: Any, reduce: Reduce) -> Heatmap:
    """Parse a heatmap with one reduction; cells without a finite value are NaN."""
    try:
        values = np.array(data[reduce], np.float64).reshape(len(data["tensors"]), -1)
        return Heatmap(list(data["tensors"]), np.array(data["edges"], np.int64), values)
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid("a heatmap", error) from error


def histogram(data: Any) -> HistogramSeries:
    """Parse histograms over time."""
    try:
        edges = np.array(data["edges"], np.int64)
        counts = np.array(data["counts"], np.int64).reshape(len(edges) - 1, len(data["lower"]))
        lower, upper = (np.array(data[name], np.float64) for name in ("lower", "upper"))
        names = ("zeros", "nonfinite", "first", "last")
        zeros, nonfinite, first, last = (np.array(data[name], np.int64) for name in names)
        return HistogramSeries(edges, lower, upper, counts, zeros, nonfinite, first, last)
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid("histograms", error) from error


def tensor(content: bytes, dtype: str, shape: str) -> TensorBytes:
    """Parse a tensor from its bytes and the headers that describe them."""
    try:
        sizes = [int(size) for size in shape.split(",") if size]
        return TensorBytes(dtype, np.frombuffer(content, DTYPES[dtype]).reshape(sizes))
    except (KeyError, ValueError) as error:
        raise _invalid("a tensor", error) from error


def _invalid(kind: str, error: Exception) -> ServiceError:
    return ServiceError(f"an answer is not {kind} ({error})", "use a client of the service's version")
