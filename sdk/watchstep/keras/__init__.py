"""Recording of Keras 3 programs on TensorFlow, JAX and PyTorch: ``from watchstep.keras import Recording``."""

import keras

from watchstep.capture.framework_names import unrecorded

try:
    from watchstep.keras.recording import KerasCallback as Recording
except Exception as error:  # noqa: BLE001 - the training goes on without a recording
    Recording = unrecorded("Keras", error, keras.callbacks.Callback)  # type: ignore[misc]

__all__ = ["Recording"]
