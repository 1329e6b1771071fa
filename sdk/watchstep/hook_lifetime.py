"""The edges of a hook: faults contained in its methods, the hook in another process, and logged values of any type."""

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
    """What `contained` needs of the object whose methods it wraps."""

    _ending: _HasEnding
    _health: RecorderHealth


_Method = TypeVar("_Method", bound=Callable[..., Any])


def contained(method: _Method) -> _Method:
    """A hook's method that does nothing once the hook has ended, and whose faults are counted in its health.

    `StopTraining` and wrong arguments pass.
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
    """Takes every call that `watchstep.Hook` takes. The run is recorded by the process that holds the hook itself."""

    mode: str = "train"
    run = run_url = store_url = project = ""
    stopped: None = None

    @property
    def health(self) -> dict[str, Any]:
        """Nothing was recorded."""
        return {"counts": {}, "faults": {}, "notes": {}}

    def watch(self, *_: Any, **__: Any) -> None:
        """Say that nothing is recorded here."""
        _log.warning(
            "watchstep: not recording: this hook was sent from another process; make one in this process"
        )

    def log(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    record = step = snapshot = guard_with = begin_pass = checkpoint_saved = close = log

    def protected_checkpoints(self) -> frozenset[str]:
        """None: nothing was recorded of any."""
        return frozenset()

    def __enter__(self) -> CopiedHook:  # noqa: PYI034 - Self comes with Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing."""


def log_scalars(recorder: Recorder, health: RecorderHealth, values: Mapping[str, Any], mode: Mode) -> None:
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
        from watchstep.pytorch.losses import record_tensor

        record_tensor(recorder, name, value, mode)
    else:
        recorder.scalar(name, value, mode)
