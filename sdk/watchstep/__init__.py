"""Watchstep monitors training jobs from the inside: it records tensors, evaluates rules during training, stops faulty runs and explains why."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watchstep.capture.config import (
        Bounds,
        Bundles,
        Cadence,
        CaptureConfig,
        Collection,
        Snapshots,
        SystemSampling,
        TensorLimits,
    )
    from watchstep.capture.mirror.settings import Mirror
    from watchstep.client import Client
    from watchstep.errors import WatchstepError
    from watchstep.format.samples.skip_list import SkipList, load_skip_list
    from watchstep.hook import Hook
    from watchstep.pytorch.loaders.skipping import SkippingBatchSampler, SkippingSampler
    from watchstep.reading.run import Run, open_run
    from watchstep.replay.replay_step import ReplayStep
    from watchstep.seeds import SeedReport, data_generator, seed_all
    from watchstep.stopping import OnNonfinite, StopTraining
    from watchstep.trace.trace_steps import TraceSteps

__version__ = "0.1.0"
__all__ = [
    "Bounds",
    "Bundles",
    "Cadence",
    "CaptureConfig",
    "Client",
    "Collection",
    "Hook",
    "Mirror",
    "OnNonfinite",
    "ReplayStep",
    "Run",
    "SeedReport",
    "SkipList",
    "SkippingBatchSampler",
    "SkippingSampler",
    "Snapshots",
    "StopTraining",
    "SystemSampling",
    "TensorLimits",
    "TraceSteps",
    "WatchstepError",
    "data_generator",
    "load_skip_list",
    "open_run",
    "resume_from",
    "seed_all",
]

_MODULES = {
    "Bounds": "watchstep.capture.config",
    "Bundles": "watchstep.capture.config",
    "Cadence": "watchstep.capture.config",
    "Collection": "watchstep.capture.config",
    "CaptureConfig": "watchstep.capture.config",
    "Client": "watchstep.client",
    "Hook": "watchstep.hook",
    "Mirror": "watchstep.capture.mirror.settings",
    "OnNonfinite": "watchstep.stopping",
    "ReplayStep": "watchstep.replay.replay_step",
    "Run": "watchstep.reading.run",
    "SeedReport": "watchstep.seeds",
    "SkipList": "watchstep.format.samples.skip_list",
    "SkippingBatchSampler": "watchstep.pytorch.loaders.skipping",
    "SkippingSampler": "watchstep.pytorch.loaders.skipping",
    "Snapshots": "watchstep.capture.config",
    "StopTraining": "watchstep.stopping",
    "SystemSampling": "watchstep.capture.config",
    "TensorLimits": "watchstep.capture.config",
    "TraceSteps": "watchstep.trace.trace_steps",
    "WatchstepError": "watchstep.errors",
    "data_generator": "watchstep.seeds",
    "load_skip_list": "watchstep.format.samples.skip_list",
    "open_run": "watchstep.reading.run",
    "resume_from": "watchstep.stopping",
    "seed_all": "watchstep.seeds",
}


def __getattr__(name: str) -> Any:
    """Load a name's module on first use, so that importing watchstep stays cheap."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'watchstep' has no attribute {name!r}")
