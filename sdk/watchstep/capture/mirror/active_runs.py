"""The program's active runs of other tools, and their adapters.

`find_active` is called on the training thread, because MLflow and Trackio know the active run of each thread. It reads a variable of a module that the program
has imported, and imports nothing. An adapter is created and used on the mirror's thread only.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

from watchstep.capture.mirror.mirrored_run import MirroredRun
from watchstep.capture.mirror.settings import MirrorTarget, Tool


def _wandb_run() -> Any:
    return getattr(sys.modules.get("wandb"), "run", None)


def _mlflow_run() -> Any:
    module = sys.modules.get("mlflow")
    return module.active_run() if module is not None and hasattr(module, "active_run") else None


def _trackio_run() -> Any:
    current = getattr(sys.modules.get("trackio.context_vars"), "current_run", None)
    return None if current is None else current.get()


_ACTIVE: dict[Tool, Callable[[], Any]] = {
    "wandb": _wandb_run,
    "mlflow": _mlflow_run,
    "trackio": _trackio_run,
    "tensorboard": lambda: True,
}

_COMMON_RUN = {"wandb": "WANDB_RUN_ID", "mlflow": "MLFLOW_RUN_ID"}
"""Variables with which all processes of a job use one run."""


def find_active(target: MirrorTarget) -> Any:
    """Return the program's active run of a tool on this thread; None without one. Never raises."""
    with contextlib.suppress(Exception):  # a module that is being imported, or another version
        return _ACTIVE[target.tool]()
    return None


def is_mirrored_by(target: MirrorTarget, worker: int) -> bool:
    """Whether a worker mirrors: the first one, and others for tools whose run may be a process's own."""
    if worker == 0:
        return True
    return target.tool != "tensorboard" and not os.environ.get(_COMMON_RUN.get(target.tool, ""))


def connect(target: MirrorTarget, active: Any) -> MirroredRun:
    """Return the adapter of an active run."""
    if target.tool == "wandb":
        from watchstep.capture.mirror.wandb_run import WandbRun

        return WandbRun(active, has_own_rows=target.has_own_rows)
    if target.tool == "mlflow":
        from watchstep.capture.mirror.mlflow_run import MlflowRun

        return MlflowRun(active)
    if target.tool == "trackio":
        from watchstep.capture.mirror.trackio_run import TrackioRun

        return TrackioRun(active)
    from watchstep.capture.mirror.tensorboard_run import TensorBoardRun

    return TensorBoardRun(target.folder)
