"""Recording of TensorFlow 2 programs with loops of their own: ``from watchstep.tensorflow import Recording``."""

import tensorflow as tf  # noqa: F401 - a program without TensorFlow cannot go on

from watchstep.capture.framework_names import unrecorded

try:
    from watchstep.tensorflow.recording import TapeRecording as Recording
except Exception as error:  # noqa: BLE001 - the training goes on without a recording
    Recording = unrecorded("TensorFlow", error)  # type: ignore[misc]

__all__ = ["Recording"]
