"""Recording of XGBoost training: ``from watchstep.xgboost import Recording``."""

from __future__ import annotations

from watchstep.xgboost.callback import XgboostRecording as Recording

__all__ = ["Recording"]
