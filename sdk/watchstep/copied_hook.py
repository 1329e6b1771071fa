"""What a hook becomes in another process: something to call, that records nothing."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

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
