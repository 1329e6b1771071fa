"""Numbers that a program logs, in whatever form it has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from watchstep.capture.health import Health
from watchstep.capture.recorder import Recorder
from watchstep.tensors import Mode


def log_scalars(recorder: Recorder, health: Health, values: Mapping[str, Any], mode: Mode) -> None:
    """Record numbers at the current step; one value that is none does not take the others with it."""
    for name, value in values.items():
        try:
            _log_one(recorder, name, value, mode)
        except Exception as error:  # noqa: BLE001 - as above
            health.fault(f"log {name!r}"[:80], error)


def _log_one(recorder: Recorder, name: str, value: Any, mode: Mode) -> None:
    if not isinstance(name, str):
        raise TypeError("a name must be a string")
    name.encode()
    if hasattr(value, "detach"):
        from watchstep.pytorch.scalars import record_tensor

        record_tensor(recorder, name, value, mode)
    else:
        recorder.scalar(name, value, mode)
