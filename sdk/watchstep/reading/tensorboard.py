"""Export of a run as TensorBoard event files: figures as scalars, exponent histograms as histograms."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from watchstep.errors import ConfigError
from watchstep.format.segment import PROBE
from watchstep.format.statistics import StatisticsBatch, exponent_of_bin, is_negative_bin
from watchstep.format.tensors import LOSSES, METRICS
from watchstep.reading.run import Run, Tensor

FIGURES = ("mean", "std", "rms", "abs_max")
"""Figures of a tensor that become scalars, in addition to its probes; losses and metrics have only their value."""

_INVALID_IN_TAGS = re.compile(r"[^-/\w.]")


def export(run: Run, folder: str | os.PathLike[str], figures: tuple[str, ...] = FIGURES) -> int:
    """Write a run as event files, one folder for each mode and worker.

    Scalars are ``<tensor>/<figure>`` and ``<tensor>/<probe>`` (for losses and metrics: ``<name>``), histograms
    ``<tensor>``; characters that TensorBoard does not accept in names, such as ``:``, become ``_``. Figures
    that do not exist are omitted.

    Args:
        run: the run.
        folder: the target folder; created if missing.
        figures: figures of each tensor.

    Returns:
        Number of written events.

    Raises:
        ConfigError: the extra ``tensorboard`` is not installed, or the folder contains event files already.
        StoreError: the run cannot be read.
    """
    try:
        import tensorboardX  # noqa: F401
    except ImportError:
        raise ConfigError(
            "TensorBoard: tensorboardX is not installed",
            "install it with: pip install 'watchstep[tensorboard]'",
        ) from None
    target = Path(folder)
    if any(target.rglob("events.out.tfevents.*")):
        raise ConfigError(
            f"folder {target} contains event files already", "use a new folder, to avoid duplicate steps"
        )
    writers: dict[str, Any] = {}
    try:
        return sum(_export_tensor(run.tensor(name), target, figures, writers) for name in run.tensors())
    finally:
        for writer in writers.values():
            writer.close()


def _export_tensor(tensor: Tensor, target: Path, figures: tuple[str, ...], writers: dict[str, Any]) -> int:
    from tensorboardX import SummaryWriter

    rows, table = tensor.rows, tensor.statistics()
    is_scalar = bool({LOSSES, METRICS} & set(tensor.info.collections))
    name = _INVALID_IN_TAGS.sub(
        "_", tensor.name
    )  # tensorboardX does this for scalars, but not for histograms
    tags = {"mean": name} if is_scalar else {figure: f"{name}/{figure}" for figure in figures}
    probes = [] if is_scalar else [column for column in table.column_names if column.startswith(PROBE)]
    tags |= {probe: f"{name}/{probe.removeprefix(PROBE)}" for probe in probes}
    columns = {tag: table[figure].to_pylist() for figure, tag in tags.items()}
    written = 0
    for row in range(len(rows)):
        writer_name = f"{rows.mode_name(row)}-{rows.worker[row]}"
        if writer_name not in writers:
            writers[writer_name] = SummaryWriter(str(target / writer_name))
        position = {"global_step": int(rows.step[row]), "walltime": float(rows.time_ns[row]) / 1e9}
        for tag, values in columns.items():
            if values[row] is not None:
                writers[writer_name].add_scalar(tag, values[row], **position)
                written += 1
        if not is_scalar and int(rows.statistics.finite[row]):
            writers[writer_name].add_histogram_raw(name, **_buckets(rows.statistics, row), **position)
            written += 1
    return written


def _buckets(statistics: StatisticsBatch, row: int) -> dict[str, Any]:
    """Return the histogram's buckets: upper limits, ascending, and their numbers of elements."""
    bins, counts = statistics.histogram.row(row)
    sign = np.where(is_negative_bin(bins), -1.0, 1.0)
    power = exponent_of_bin(bins).astype(np.int64)
    near, far = sign * np.ldexp(1.0, power), sign * np.ldexp(1.0, np.minimum(power + 1, 1023))
    edges = [
        *zip(np.minimum(near, far), np.maximum(near, far), counts, strict=True),
        (0.0, 0.0, statistics.zero[row]),
    ]
    limits: list[float] = []
    numbers: list[float] = []
    for low, high, count in sorted(edges):
        if count and limits and limits[-1] < low < high:  # nothing between two bins
            limits.append(float(low))
            numbers.append(0.0)
        if count:
            limits.append(float(high))
            numbers.append(float(count))
    finite = float(statistics.finite[row])
    return {
        "min": float(statistics.min[row]),
        "max": float(statistics.max[row]),
        "num": finite,
        "sum": float(statistics.mean[row]) * finite,
        "sum_squares": float(statistics.square_sum[row]),
        "bucket_limits": limits or [0.0],
        "bucket_counts": numbers or [0.0],
    }
