"""Reading a run during and after the recording: tensors, steps, losses, rows with their statistics, and compaction.

``watchstep.reading.comparison.diff.diff`` compares two runs. Its module has the same name, so it is not exported here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watchstep.format.block import Block, concatenate
    from watchstep.format.layout import SnapshotKey
    from watchstep.format.samples.samples import SampleBatch
    from watchstep.format.snapshot import Snapshot, TensorPart
    from watchstep.format.statistics import (
        StatisticsBatch,
        abs_max,
        abs_mean,
        abs_std,
        abs_variance,
        l1,
        l2,
        nonfinite_share,
        quantile_bounds,
        rms,
        std,
        total,
        variance,
        zero_share,
    )
    from watchstep.reading.compaction import Compaction, compact
    from watchstep.reading.comparison.tolerances import Tolerances
    from watchstep.reading.run import Run, open_run
    from watchstep.reading.saved.saved_tensor import SavedTensor
    from watchstep.reading.tensor import Tensor

__all__ = [
    "Block",
    "Compaction",
    "Run",
    "SampleBatch",
    "SavedTensor",
    "Snapshot",
    "SnapshotKey",
    "StatisticsBatch",
    "Tensor",
    "TensorPart",
    "Tolerances",
    "abs_max",
    "abs_mean",
    "abs_std",
    "abs_variance",
    "compact",
    "concatenate",
    "l1",
    "l2",
    "nonfinite_share",
    "open_run",
    "quantile_bounds",
    "rms",
    "std",
    "total",
    "variance",
    "zero_share",
]

_MODULES = {
    "Block": "watchstep.format.block",
    "Compaction": "watchstep.reading.compaction",
    "Run": "watchstep.reading.run",
    "SampleBatch": "watchstep.format.samples.samples",
    "SavedTensor": "watchstep.reading.saved.saved_tensor",
    "Snapshot": "watchstep.format.snapshot",
    "SnapshotKey": "watchstep.format.layout",
    "StatisticsBatch": "watchstep.format.statistics",
    "Tensor": "watchstep.reading.tensor",
    "TensorPart": "watchstep.format.snapshot",
    "Tolerances": "watchstep.reading.comparison.tolerances",
    "abs_max": "watchstep.format.statistics",
    "abs_mean": "watchstep.format.statistics",
    "abs_std": "watchstep.format.statistics",
    "abs_variance": "watchstep.format.statistics",
    "compact": "watchstep.reading.compaction",
    "concatenate": "watchstep.format.block",
    "l1": "watchstep.format.statistics",
    "l2": "watchstep.format.statistics",
    "nonfinite_share": "watchstep.format.statistics",
    "open_run": "watchstep.reading.run",
    "quantile_bounds": "watchstep.format.statistics",
    "rms": "watchstep.format.statistics",
    "std": "watchstep.format.statistics",
    "total": "watchstep.format.statistics",
    "variance": "watchstep.format.statistics",
    "zero_share": "watchstep.format.statistics",
}


def __getattr__(name: str) -> Any:
    """Load the module of a name on first use, so that a recorder that imports one module of this package loads no other."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'watchstep.reading' has no attribute {name!r}")
