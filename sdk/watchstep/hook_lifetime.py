"""The boundary of a hook: containing faults of its methods, copies in other processes, and logged values of any type."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, TypeVar

from watchstep.capture.health import RecorderHealth
from watchstep.capture.recorder import Recorder
from watchstep.errors import ConfigError
from watchstep.format.tensors import Mode
from watchstep.stopping import StopTraining


class _HasEnding(Protocol):
    @property
    def ended(self) -> bool: ...


class _Recording(Protocol):
    """The attributes that `contained` needs."""

    _ending: _HasEnding
    _health: RecorderHealth


_Method = TypeVar("_Method", bound=Callable[..., Any])


def contained(method: _Method) -> _Method:
    """Make a hook's method do nothing once the hook has ended, and count its faults in health.

    `StopTraining` and `ConfigError` are raised.
    """

    @functools.wraps(method)
    def call(self: _Recording, *args: Any, **kwargs: Any) -> Any:
        if self._ending.ended:
            return None
        try:
            return method(self, *args, **kwargs)
        except (StopTraining, ConfigError):
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._health.fault(method.__name__, error)
            return None

    return call  # type: ignore[return-value]


_log = logging.getLogger("watchstep")


class CopiedHook:
    """Accepts every call of `watchstep.Hook` and records nothing. The process with the original hook records the run."""

    mode: str = "train"
    run = run_url = store_url = project = ""
    stopped: None = None

    @property
    def health(self) -> dict[str, Any]:
        """Empty: nothing was recorded."""
        return {"counts": {}, "faults": {}, "notes": {}}

    def watch(self, *_: Any, **__: Any) -> None:
        """Log that nothing is recorded in this process."""
        _log.warning(
            "watchstep: not recording: this hook was sent from another process; create one in this process"
        )

    def log(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    record = step = snapshot = guard_with = begin_pass = checkpoint_saved = close = log

    def protected_checkpoints(self) -> frozenset[str]:
        """Return no paths."""
        return frozenset()

    def __enter__(self) -> CopiedHook:  # noqa: PYI034 - Self comes with Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""


def log_scalars(recorder: Recorder, health: RecorderHealth, values: Mapping[str, Any], mode: Mode) -> None:
    """Record numbers at the current step. An invalid value does not affect the others."""
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
        from watchstep.pytorch.losses import record_tensor

        record_tensor(recorder, name, value, mode)
    else:
        recorder.scalar(name, value, mode)
