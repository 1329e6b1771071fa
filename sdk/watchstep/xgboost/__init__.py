"""Recording of XGBoost training: ``from watchstep.xgboost import Recording``."""

from __future__ import annotations

import xgboost

from watchstep.capture.framework_names import unrecorded

try:
    from watchstep.xgboost.callback import XgboostRecording as Recording
except Exception as error:  # noqa: BLE001 - the training goes on without a recording
    Recording = unrecorded("XGBoost", error, xgboost.callback.TrainingCallback)  # type: ignore[misc]

__all__ = ["Recording"]
