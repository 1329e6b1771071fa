"""Recording of an unmodified program that trains with LightGBM: `lightgbm.train` and the estimators that use it."""

from __future__ import annotations

import logging
import sys
from typing import Any

from watchstep.boosting.attach import patch_train
from watchstep.hook import Hook
from watchstep.lightgbm.callback import LightgbmRecording
from watchstep.lightgbm.internals import lightgbm_names

_log = logging.getLogger("watchstep")


def attach() -> None:
    """Record each training from now on, once LightGBM is imported. Never raises."""
    try:
        if lightgbm_names.find("train") is not None:
            names = ["lightgbm", *lightgbm_names.modules_of("train", "train_of_estimators")]
            patch_train([sys.modules[name] for name in names], (LightgbmRecording,), _recording)
    except Exception as error:  # noqa: BLE001 - no fault may end the program
        _log.error("watchstep: not recording LightGBM: %s", error)


def _recording(hook: Hook, arguments: dict[str, Any]) -> LightgbmRecording:
    """Return the callback; the training data are recognized among the evaluated sets by identity."""
    data, sets = arguments.get("train_set"), arguments.get("valid_sets") or ()
    evaluated = list(sets) if isinstance(sets, list | tuple) else [sets]
    given = arguments.get("valid_names") or ()
    names = [given] if isinstance(given, str) else list(given)
    places = [place for place, entry in enumerate(evaluated) if entry is data]
    training = names[places[0]] if places and places[0] < len(names) else "training"
    return LightgbmRecording(hook, training=training)
