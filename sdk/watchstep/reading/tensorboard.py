"""A run as TensorBoard's event files: figures as scalars, exponent histograms as histograms."""

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
"""Figures of a tensor that become scalars, its probes beside them; losses and metrics have their value alone."""

_NOT_IN_TAGS = re.compile(r"[^-/\w.]")


def export(run: Run, folder: str | os.PathLike[str], figures: tuple[str, ...] = FIGURES) -> int:
    """Write a run as event files, one folder for each mode and worker.

    Scalars are ``<tensor>/<figure>`` and ``<tensor>/<probe>`` (of losses and metrics: ``<name>``), histograms
    ``<tensor>``; of a name's characters, those that TensorBoard does not take (``:`` for one) become ``_``. Figures
    that do not exist are left out.

    Args:
        run: the run.
        folder: where to; made where it is missing.
        figures: of each tensor.

    Returns:
        How many events were written.

    Raises:
        ConfigError: the extra ``tensorboard`` is not installed, or the folder holds event files already.
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
            f"folder {target}: holds event files already", "name a new one: steps would stand twice"
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
    alone = bool({LOSSES, METRICS} & set(tensor.info.collections))
    name = _NOT_IN_TAGS.sub("_", tensor.name)  # tensorboardX does so for scalars, and not for histograms
    tags = {"mean": name} if alone else {figure: f"{name}/{figure}" for figure in figures}
    probes = [] if alone else [column for column in table.column_names if column.startswith(PROBE)]
    tags |= {probe: f"{name}/{probe.removeprefix(PROBE)}" for probe in probes}
    columns = {tag: table[figure].to_pylist() for figure, tag in tags.items()}
    written = 0
    for row in range(len(rows)):
        place = f"{rows.mode_name(row)}-{rows.worker[row]}"
        if place not in writers:
            writers[place] = SummaryWriter(str(target / place))
        at = {"global_step": int(rows.step[row]), "walltime": float(rows.time_ns[row]) / 1e9}
        for tag, values in columns.items():
            if values[row] is not None:
                writers[place].add_scalar(tag, values[row], **at)
                written += 1
        if not alone and int(rows.statistics.finite[row]):
            writers[place].add_histogram_raw(name, **_buckets(rows.statistics, row), **at)
            written += 1
    return written


def _buckets(statistics: StatisticsBatch, row: int) -> dict[str, Any]:
    """The histogram's buckets: upper limits, ascending, and how many elements each holds."""
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
