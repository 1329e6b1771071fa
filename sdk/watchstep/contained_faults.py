"""What keeps the recorder's own faults out of training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from watchstep.errors import ConfigError
from watchstep.stopping import StopTraining

if TYPE_CHECKING:
    from watchstep.hook import Hook

_Method = TypeVar("_Method", bound=Callable[..., Any])


def contained(method: _Method) -> _Method:
    """A hook's method that does nothing once the hook has ended, and whose faults are counted in its health.

    `StopTraining` and wrong arguments pass.
    """

    @functools.wraps(method)
    def call(self: Hook, *args: Any, **kwargs: Any) -> Any:
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
