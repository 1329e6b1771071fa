"""Recording of Keras 3 with a hook: a callback for ``fit``, and a recorder of programs that do not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras

from watchstep.capture.framework_names import contained, health_of
from watchstep.errors import ConfigError
from watchstep.hook import Hook
from watchstep.keras import optimizer_calls
from watchstep.keras.backends import JaxUpdates, KerasUpdates, TensorFlowUpdates, TorchUpdates
from watchstep.keras.internals import keras_names
from watchstep.updates.program_updates import ProgramUpdates

OpenHook = Callable[[], "Hook | None"]
"""Returns the hook, and creates it at the first call; None if nothing is recorded."""


class KerasRecording:
    """Records the updates of all Keras optimizers of this process, until its hook is closed."""

    def __init__(self, open_hook: OpenHook) -> None:
        """Start observing.

        Args:
            open_hook: returns the hook at the first update.
        """
        optimizer_calls.install()
        self._open_hook = open_hook
        self.updates = self._updates_of(keras.backend.backend())
        self.traced: weakref.WeakSet[Any] = weakref.WeakSet()  # models
        optimizer_calls.observe(self.updates)

    def _updates_of(self, backend: str) -> KerasUpdates:
        if backend == "tensorflow":
            return TensorFlowUpdates(self._open)
        if backend == "torch":
            return TorchUpdates(self._open)
        if backend == "jax":
            return JaxUpdates(self._opened_for_jax)
        raise ConfigError(f"the backend {backend!r} of Keras is not recorded", "use tensorflow, jax or torch")

    def _open(self) -> ProgramUpdates | None:
        hook = self._open_hook()
        if hook is None:
            self.close()
            return None
        keras_names.report_to(health_of(hook))
        updates = ProgramUpdates(hook._session, hook._on_nonfinite)  # noqa: SLF001 - part of the hook's own package
        hook.attach_updates(updates.count_by_hand, self.close)
        return updates

    def _opened_for_jax(self) -> Hook | None:
        hook = self._open_hook()
        if hook is not None:
            hook.attach_updates(lambda: None, self.close)
        return hook

    def close(self) -> None:
        """Stop observing."""
        optimizer_calls.forget(self.updates)
        self.updates.close()


_recordings: weakref.WeakValueDictionary[int, KerasRecording] = weakref.WeakValueDictionary()
"""Recordings of callbacks by the id of their hook, which they reference: a program may create a callback for each ``fit``."""


class KerasCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Records the training of a Keras model with a hook: its updates, losses and evaluations.

    It has no method for batches, which would make Keras wait for each batch. Another one with the same hook is the same recording, and so is a copy, so that estimators with
    callbacks can be cloned. In another process, or read from a file, it records nothing.

    Example::

        hook = watchstep.Hook("s3://bucket/runs")
        model.fit(x, y, callbacks=[watchstep.keras.Recording(hook)])
        hook.close()
    """

    def __init__(self, hook: Hook) -> None:
        """Record with a hook.

        Args:
            hook: an open hook; it stays open when training ends. Programs with a loop of their own create this object before the loop.

        Raises:
            ConfigError: the hook's gate policy skips updates, which is not possible from outside of a compiled step.
        """
        super().__init__()
        self._recording: KerasRecording | None = None
        with contained(hook, "Keras"):
            recording = _recordings.get(id(hook))
            if recording is None:
                recording = KerasRecording(lambda: hook)
                recording.updates.start()
                _recordings[id(hook)] = recording
            self._recording = recording

    def set_model(self, model: Any) -> None:
        """Let Keras trace its training step again if it was traced before the recording began."""
        super().set_model(model)
        if self._recording is not None and model not in self._recording.traced:
            self._recording.traced.add(model)
            model.train_function = None

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasCallback:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return keras.callbacks.Callback, ()

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras' interface
        """Note the beginning of ``fit``, which Python may have looked up before this object was created."""
        if self._recording is not None:
            self._recording.updates.begins(self.model, is_inner=optimizer_calls.fits_in_progress() > 1)

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - as above
        """Note the end of ``fit``."""
        if self._recording is not None:
            self._recording.updates.ends(self.model)
