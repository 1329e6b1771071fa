"""Names of LightGBM that another version may lack: the one place where they are looked up."""

from __future__ import annotations

from typing import Any

from watchstep.capture.framework_names import FrameworkName, FrameworkNames

_BOOSTER = "trees, importance, hyperparameters and predictions"
_ROUNDS = "rounds"

at = FrameworkName.at
lightgbm_names = FrameworkNames(
    "LightGBM",
    {
        "train": at("trainings of programs that do not record themselves", "lightgbm.engine:train"),
        "train_of_estimators": at("trainings of estimators", "lightgbm.sklearn:train"),
        "error": at("data sets without their raw data", "lightgbm.basic:LightGBMError"),
        "iteration": at(_ROUNDS, "lightgbm:*.iteration"),
        "first_iteration": at(_ROUNDS, "lightgbm:*.begin_iteration"),
        "end_of_iterations": at(_ROUNDS, "lightgbm:*.end_iteration"),
        "evaluations": at(_ROUNDS, "lightgbm:*.evaluation_result_list"),
        "model": at(_BOOSTER, "lightgbm:*.model"),
        "parameters": at(_BOOSTER, "lightgbm:*.params"),
        "rounds": at(_BOOSTER, "lightgbm:*.current_iteration"),
        "text": at(_BOOSTER, "lightgbm:*.model_to_string"),
        "feature_names": at(_BOOSTER, "lightgbm:*.feature_name"),
        "importance": at(_BOOSTER, "lightgbm:*.feature_importance"),
        "trees_of_round": at(_BOOSTER, "lightgbm:*.num_model_per_iteration"),
    },
)

_OF_ROUNDS = ("iteration", "first_iteration", "end_of_iterations", "evaluations")
_OF_BOOSTERS = ("rounds", "text", "feature_names", "importance", "trees_of_round")


def has_round(environment: Any) -> bool:
    """Return whether LightGBM's ``CallbackEnv`` has all that a round is recorded by."""
    return lightgbm_names.have(environment, *_OF_ROUNDS)


def readable_model(environment: Any) -> Any:
    """Return the booster, or the folds, of LightGBM's ``CallbackEnv``; None if their figures cannot be read."""
    if not lightgbm_names.have(environment, "model", "parameters"):
        return None
    model = lightgbm_names.of(environment, "model")
    return model if lightgbm_names.have(model, *_OF_BOOSTERS) else None


def errors() -> tuple[type[BaseException], ...]:
    """Return the class of LightGBM's errors, for an except clause; nothing if it is missing."""
    kind = lightgbm_names.find("error")
    return () if kind is None else (kind,)
