"""Attaching to an unmodified JAX program at its first update. Called by the start-up code of `watchstep run`."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from watchstep.capture.document.files import inline_from_environment
from watchstep.format import tensors
from watchstep.hook_arguments import EXPLAIN, ON_NONFINITE
from watchstep.jax import compiled_steps, optimizers, traced_updates
from watchstep.jax.activations import modules
from watchstep.jax.compiled_steps import CompiledStep
from watchstep.jax.step_settings import StepSettings, request_settings, withdraw_settings
from watchstep.jax.traced_updates import StepOutputs, TracedUpdate

_log = logging.getLogger("watchstep")


class FirstUpdate:
    """Waits for the first update of the program, and records from then on."""

    def __init__(self) -> None:
        self._waiting = True
        # The first step is traced before there is a hook.
        explains = os.environ.get(EXPLAIN) == "1"
        request_settings(self, StepSettings(explains or os.environ.get(ON_NONFINITE, "record") != "record"))
        compiled_steps.observe(self)
        traced_updates.observers_of_inner.append(self._inner)
        traced_updates.not_observed.append(self._not_observed)
        traced_updates.activations_not_observed.append(self._activations_not_observed)

    def about_to_dispatch(self, function: CompiledStep, arguments: Any) -> None:
        """Start recording with this call."""
        recording = self._start()
        if recording is not None:
            recording.about_to_dispatch(function, arguments)

    def dispatched(self, function: CompiledStep, updates: StepOutputs, arguments: Any, result: Any) -> None:
        """Do nothing: the recording observes the call that started it itself."""

    def dispatch_failed(self, function: CompiledStep) -> None:
        """Do nothing: there is no ring yet."""

    def _inner(self, update: TracedUpdate, loss: Any) -> None:
        recording = self._start()
        if recording is not None:
            recording.inner_update(update, loss)

    def _not_observed(self, what: str) -> None:
        """Start recording at the first update too if it is not observed: health states it, and the user learns at once that nothing stops it."""
        recording = self._start()
        if recording is not None:
            recording.not_observed(what)

    def _activations_not_observed(self, what: str) -> None:
        recording = self._start()
        if recording is not None:
            recording.activations_not_observed(what)

    def _start(self) -> Any:
        """Start recording, once. Never raises, because the program did not request a recorder."""
        if not self._waiting:
            return None
        self._waiting = False
        compiled_steps.forget(self)
        traced_updates.observers_of_inner.remove(self._inner)
        traced_updates.not_observed.remove(self._not_observed)
        traced_updates.activations_not_observed.remove(self._activations_not_observed)
        from watchstep.unattended import start_hook

        hook = start_hook("JAX")
        if hook is None:
            withdraw_settings(self)
            return None
        try:
            from watchstep.jax.recording import Recording

            return Recording(hook, activations=modules.observes_modules())
        except Exception as error:  # noqa: BLE001 - as above
            hook._health.fault("attach", error)  # noqa: SLF001 - part of the hook's own package
            _log.error("watchstep: not recording: %s", error)
            return None
        finally:
            withdraw_settings(self)  # the recording has requested its own


def after_jax() -> None:
    """Observe compiled functions from now on; called when the program has imported JAX."""
    compiled_steps.install()
    optimizers.install_losses()
    modules.observe_modules(_names_activations())
    FirstUpdate()


def _names_activations() -> bool:
    """Return whether the capture document names the collection of activations. Never raises: an invalid document is reported by the hook."""
    try:
        text = inline_from_environment()
        collections = json.loads(text).get("collections") if text else None
        return bool((collections or {}).get(tensors.ACTIVATIONS))
    except Exception:  # noqa: BLE001 - as above
        return False


def after_optax() -> None:
    """Observe optimizers from now on; called when the program has imported optax."""
    optimizers.install()
