"""Recording of LightGBM training: ``from watchstep.lightgbm import Recording``."""

from __future__ import annotations

from watchstep.lightgbm.callback import LightgbmRecording as Recording

__all__ = ["Recording"]
