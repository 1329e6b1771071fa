"""Recording of Keras 3 programs on TensorFlow, JAX and PyTorch: ``from watchstep.keras import Recording``."""

from watchstep.keras.recording import KerasCallback as Recording

__all__ = ["Recording"]
