"""Recording of an unmodified TensorFlow program. Called by the start-up code of `watchstep run`."""

from __future__ import annotations

import functools
import logging

_log = logging.getLogger("watchstep")


@functools.cache
def attach() -> None:
    """Record from the first gradients of a tape on, once TensorFlow is imported. Never raises."""
    try:
        from watchstep.tensorflow.recording import TapeUpdates
        from watchstep.unattended import start_hook

        TapeUpdates(functools.partial(start_hook, "TensorFlow"))
    except Exception as error:  # noqa: BLE001 - no fault may end the program
        _log.error("watchstep: not recording TensorFlow: %s", error)
