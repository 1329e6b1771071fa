"""Recording what XGBoost trains: ``from watchstep.xgboost import Recording``."""

from __future__ import annotations

from watchstep.xgboost.callback import Recording

__all__ = ["Recording"]
