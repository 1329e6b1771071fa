"""Recording of an unmodified program that trains with XGBoost: `xgboost.train` and the estimators that use it."""

from __future__ import annotations

import logging
import sys
from typing import Any

from watchstep.boosting.attach import patch_train
from watchstep.hook import Hook
from watchstep.xgboost.callback import XgboostRecording
from watchstep.xgboost.internals import xgboost_names

_log = logging.getLogger("watchstep")


def attach() -> None:
    """Record each training from now on, once XGBoost is imported. Never raises."""
    try:
        if xgboost_names.find("train") is not None:
            names = ["xgboost", *xgboost_names.modules_of("train", "train_of_estimators")]
            patch_train([sys.modules[name] for name in names], (XgboostRecording,), _recording)
    except Exception as error:  # noqa: BLE001 - no fault may end the program
        _log.error("watchstep: not recording XGBoost: %s", error)


def _recording(hook: Hook, arguments: dict[str, Any]) -> XgboostRecording:
    """Return the callback; the training data are recognized among the evaluated sets by identity."""
    data = arguments.get("dtrain")
    sets = arguments.get("evals")
    names = [name for evaluated, name in sets if evaluated is data] if isinstance(sets, list | tuple) else []
    return XgboostRecording(hook, training=names[0] if names else "train")
