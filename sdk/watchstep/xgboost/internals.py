"""Names of XGBoost that another version may lack: the one place where they are looked up."""

from __future__ import annotations

from typing import Any

from watchstep.capture.framework_names import FrameworkName, FrameworkNames

_BOOSTER = "trees, importance, hyperparameters and predictions"

at = FrameworkName.at
xgboost_names = FrameworkNames(
    "XGBoost",
    {
        "train": at("trainings of programs that do not record themselves", "xgboost.training:train"),
        "train_of_estimators": at("trainings of estimators", "xgboost.sklearn:train"),
        "error": at("trees with several outputs", "xgboost.core:XGBoostError"),
        "configuration": at(_BOOSTER, "xgboost:*.save_config"),
        "rounds": at(_BOOSTER, "xgboost:*.num_boosted_rounds"),
        "trees": at(_BOOSTER, "xgboost:*.get_dump"),
        "importance": at(_BOOSTER, "xgboost:*.get_score"),
        "features": at(_BOOSTER, "xgboost:*.num_features"),
        "feature_names": at(_BOOSTER, "xgboost:*.feature_names"),
    },
)

_OF_BOOSTERS = ("configuration", "rounds", "trees", "importance", "features", "feature_names")


def is_readable(booster: Any) -> bool:
    """Return whether a booster has all that its figures are read by. Otherwise only evaluations are recorded."""
    return xgboost_names.have(booster, *_OF_BOOSTERS)


def errors() -> tuple[type[BaseException], ...]:
    """Return the class of XGBoost's errors, for an except clause; nothing if it is missing."""
    kind = xgboost_names.find("error")
    return () if kind is None else (kind,)
