"""Watchstep monitors training jobs from the inside: it records tensors, evaluates rules during training, stops faulty runs and explains why."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watchstep.capture.config import (
        Bounds,
        Cadence,
        CaptureConfig,
        Collection,
        Snapshots,
        SystemSampling,
        TensorLimits,
    )
    from watchstep.client import Client
    from watchstep.errors import WatchstepError
    from watchstep.hook import Hook
    from watchstep.reading.run import Run, open_run
    from watchstep.stopping import StopTraining

__version__ = "0.1.0"
__all__ = [
    "Bounds",
    "Cadence",
    "CaptureConfig",
    "Client",
    "Collection",
    "Hook",
    "Run",
    "Snapshots",
    "StopTraining",
    "SystemSampling",
    "TensorLimits",
    "WatchstepError",
    "open_run",
    "resume_from",
]

_MODULES = {
    "Bounds": "watchstep.capture.config",
    "Cadence": "watchstep.capture.config",
    "Collection": "watchstep.capture.config",
    "CaptureConfig": "watchstep.capture.config",
    "Client": "watchstep.client",
    "Hook": "watchstep.hook",
    "Run": "watchstep.reading.run",
    "Snapshots": "watchstep.capture.config",
    "StopTraining": "watchstep.stopping",
    "SystemSampling": "watchstep.capture.config",
    "TensorLimits": "watchstep.capture.config",
    "WatchstepError": "watchstep.errors",
    "open_run": "watchstep.reading.run",
    "resume_from": "watchstep.stopping",
}


def __getattr__(name: str) -> Any:
    """Load a name's module on first use, so that importing watchstep stays cheap."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'watchstep' has no attribute {name!r}")
