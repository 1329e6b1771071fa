"""Recording of an unmodified program that trains with Keras. Called by the start-up code of `watchstep run`."""

from __future__ import annotations

import functools
import logging

_log = logging.getLogger("watchstep")


@functools.cache
def attach() -> None:
    """Record from the first update on, once Keras is imported. Never raises."""
    try:
        import keras

        from watchstep.keras.recording import KerasRecording
        from watchstep.unattended import start_hook

        # A backend whose own recording sees the updates of Keras too is not another framework.
        framework = {"tensorflow": "TensorFlow", "jax": "JAX"}.get(keras.backend.backend(), "Keras")
        KerasRecording(functools.partial(start_hook, framework))
    except Exception as error:  # noqa: BLE001 - no fault may end the program
        _log.error("watchstep: not recording Keras: %s", error)
