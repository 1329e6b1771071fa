"""Replay: a bundled training step is computed again, compared with the recorded one, and traced to its first bad operation.

Nothing here is imported when a run is recorded. `ReplayStep` does not import PyTorch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from watchstep.replay.replay_step import ReplayStep, load_step
    from watchstep.replay.replayer import GradientDifference, Precision, ReplayResult, replay
    from watchstep.replay.report import render_replay, replay_data

__all__ = [
    "GradientDifference",
    "Precision",
    "ReplayResult",
    "ReplayStep",
    "load_step",
    "render_replay",
    "replay",
    "replay_data",
]

_MODULES = {
    "GradientDifference": "replayer",
    "Precision": "replayer",
    "ReplayResult": "replayer",
    "ReplayStep": "replay_step",
    "load_step": "replay_step",
    "render_replay": "report",
    "replay": "replayer",
    "replay_data": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
