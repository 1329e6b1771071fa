"""Recording of TensorFlow 2 programs with loops of their own: ``from watchstep.tensorflow import Recording``."""

from watchstep.tensorflow.recording import TapeRecording as Recording

__all__ = ["Recording"]
