"""Recording of LightGBM training: ``from watchstep.lightgbm import Recording``."""

from __future__ import annotations

import lightgbm  # noqa: F401 - a program without LightGBM cannot go on

from watchstep.capture.framework_names import unrecorded

try:
    from watchstep.lightgbm.callback import LightgbmRecording as Recording
except Exception as error:  # noqa: BLE001 - the training goes on without a recording
    Recording = unrecorded("LightGBM", error)  # type: ignore[misc]

__all__ = ["Recording"]
