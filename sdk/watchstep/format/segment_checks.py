"""Limits of a segment's sizes and figures, in any form.

Sizes are checked before memory is allocated for them, and figures before they are used.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import FormatError
from watchstep.format.block import Block
from watchstep.format.statistics import BIN_RANGE, COUNT_COLUMNS, Histograms, UnreadHistograms

MAX_BYTES = 256 * 1024 * 1024
"""Maximum size of a segment for readers, compressed or not."""

MAX_ROWS = 1_000_000
"""Maximum number of rows of one segment; with their columns they take about 250 MB."""

MAX_PROBES = 64
"""Maximum number of probes of one segment."""

MAX_BINS = 32 * MAX_ROWS
"""Maximum number of histogram bins of one segment."""

HISTOGRAM_COLUMNS = frozenset({"histogram_bins", "histogram_counts"})

PROBE = "probe."
"""Prefix of a probe's column."""

WORD_COLUMNS = ("mode", "tensor", "stage")
"""Columns of text. Readers read them as indices into a dictionary, so that rows have no copies of their text."""

CONSTANT = ("mode", "worker", "shard_index", "shard_count", "replica", "stage")
"""Columns that usually have one value in an object. Its metadata then have the value, and they need not be read."""

_MAX_WORKER = 2**28 - 1  # what `Block.series_key` has room for
_MAX_COUNT = 2**48  # elements; sums of whole segments stay within int64
LIMITS: Mapping[str, tuple[int, int | None]] = {
    "step": (0, None),
    "worker": (0, _MAX_WORKER),
    "replica": (0, None),
    "shard_count": (1, None),
    "shard_index": (0, None),
    **dict.fromkeys(COUNT_COLUMNS, (0, _MAX_COUNT)),
}
"""Smallest and largest value of columns of whole numbers."""

_MEND = "the writer or the transfer damaged it; other segments can still be read"


def check_values(block: Block) -> Block:
    """Return the same block if its figures are possible for a tensor.

    Raises:
        ValueError: A figure is invalid; the message has the column's name.
    """
    statistics = block.statistics
    counts = {name: getattr(statistics, name) for name in COUNT_COLUMNS}
    check_columns({"step": block.step, "worker": block.worker, **vars(block.places), **counts})
    if not isinstance(statistics.histogram, UnreadHistograms):
        check_histograms(statistics.histogram)
    return block


def check_columns(columns: Mapping[str, NDArray[Any]]) -> None:
    """Check the present columns of a segment against the limits of its figures, individually and combined.

    Args:
        columns: Numbers by name, all of the same length.

    Raises:
        ValueError: A figure is invalid; the message has the column's name.
    """
    for name, (least, most) in LIMITS.items():
        if name in columns:
            _within(name, columns[name], least, most)
    if "shard_count" in columns and "shard_index" in columns:
        _within("shard_index", columns["shard_count"] - columns["shard_index"], 1)
    if columns.keys() >= {*COUNT_COLUMNS}:
        taken = sum(columns[name] for name in COUNT_COLUMNS if name != "count")
        _within("count", columns["count"] - taken, 0)


def check_steps(step: NDArray[np.int64], first: int, last: int) -> None:
    """Check the steps of a segment against those in its name or footer.

    Raises:
        ValueError: The segment has other steps.
    """
    if len(step) and not (first <= int(step.min()) and int(step.max()) <= last):
        raise ValueError(f"holds steps {step.min()} to {step.max()}, not only {first} to {last}")


def _within(name: str, values: NDArray[Any], least: int, most: int | None = None) -> None:
    if (values < least).any() or (most is not None and (values > most).any()):
        raise ValueError(f"column {name} holds a number that cannot be")


def check_histograms(histogram: Histograms) -> None:
    """Check that bins and counts are possible, and bins ascend within a row.

    Raises:
        ValueError: They are not; the message has the column's name.
    """
    _within("histogram_bins", histogram.bins, *BIN_RANGE)
    _within("histogram_counts", histogram.counts, 1, _MAX_COUNT)
    starts = np.zeros(len(histogram.bins) + 1, np.bool_)
    starts[histogram.offsets] = True
    # Compared without the differences, which would take several times the memory of the bins.
    if ((histogram.bins[1:] <= histogram.bins[:-1]) & ~starts[1:-1]).any():
        raise ValueError("column histogram_bins is not in ascending order")


@contextmanager
def whole(name: str) -> Iterator[None]:
    """Convert every error that damaged bytes cause in the body to one error.

    Raises:
        FormatError: The bytes are damaged. The message has the name of the object.
        MemoryError: Memory is exhausted, which does not depend on the bytes.
    """
    try:
        yield
    except (FormatError, MemoryError):  # an ArrowMemoryError is both an ArrowException and a MemoryError
        raise
    except _damage() as error:
        reason = str(error).split("\n", 1)[0][:200]
        raise FormatError(f"segment {name} is not a complete segment ({reason})", _MEND) from error


def _damage() -> tuple[type[Exception], ...]:
    """Return the exceptions that damaged bytes cause; those of Arrow where it is loaded."""
    arrow = sys.modules.get("pyarrow")
    return _DAMAGE if arrow is None else (*_DAMAGE, arrow.ArrowException)


_DAMAGE: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    OverflowError,
    RecursionError,
    RuntimeError,  # of LZ4
    struct.error,
    zlib.error,
)
