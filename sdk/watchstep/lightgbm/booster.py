"""A booster of LightGBM: its trees, importance and hyperparameters, and predictions on samples."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import lightgbm
import numpy as np
from numpy.typing import NDArray

from watchstep.boosting.figures import TreeFigures
from watchstep.boosting.model import DataSample, Task, sample_arrays
from watchstep.errors import ConfigError
from watchstep.format.statistics import Floats
from watchstep.lightgbm.internals import errors

IMPORTANCES = ("weight", "gain", "total_gain")
"""Kinds of importance, by XGBoost's names for them."""

_HYPERPARAMETERS = (
    "learning_rate",
    "num_leaves",
    "max_depth",
    "min_data_in_leaf",
    "min_sum_hessian_in_leaf",
    "min_gain_to_split",
    "bagging_fraction",
    "bagging_freq",
    "feature_fraction",
    "feature_fraction_bynode",
    "lambda_l1",
    "lambda_l2",
    "max_delta_step",
    "max_bin",
    "scale_pos_weight",
    "drop_rate",
    "num_class",
    "seed",
)
_SETTINGS = ("objective", "boosting", "tree_learner", "data_sample_strategy", "device_type")
_LEARNING_RATES = ("learning_rate", "eta", "shrinkage_rate")

_PARAMETER = re.compile(r"\[(\w+): (.*)\]")
_REGRESSION = frozenset(
    {"regression", "regression_l1", "huber", "fair", "poisson", "mape", "gamma", "tweedie"}
)


class LightgbmModel:
    """Reads one booster during its training."""

    def __init__(self, booster: Any) -> None:
        self._booster = booster
        self._params: Mapping[str, Any] = {}
        text = self._newest()
        self._parameters = dict(_PARAMETER.findall(text))
        objective = re.search(r"^objective=(.*)$", text, re.MULTILINE)
        self._objective = objective[1].split(" ")[0] if objective is not None else ""
        self._names: list[str] = list(booster.feature_name())

    def is_of(self, booster: Any) -> bool:
        """Whether it reads this booster."""
        return self._booster is booster

    def begin_round(self, params: Mapping[str, Any]) -> None:
        """Set the parameters of the newest round, which a callback may have changed."""
        self._params = params

    @property
    def has_trees(self) -> bool:
        """Whether the booster consists of trees, which is always so."""
        return True

    @property
    def task(self) -> Task:
        """What it predicts, by its objective; a function of the program's own is unknown."""
        if self._objective in {"multiclass", "multiclassova"}:
            return "multiclass"
        if self._objective == "binary":
            return "binary"
        return "regression" if self._objective in _REGRESSION else "other"

    @property
    def classes(self) -> int:
        """Number of classes."""
        return {"binary": 2, "multiclass": int(self._booster.num_model_per_iteration())}.get(self.task, 0)

    def feature_names(self) -> Sequence[str]:
        """Return the names of the features, in which LightGBM has replaced spaces."""
        return self._names

    def trees(self) -> Sequence[TreeFigures]:
        """Return the trees of the newest round."""
        found = []
        for part in self._newest().split("\nTree=")[1:]:
            fields = dict(line.split("=", 1) for line in part.splitlines() if "=" in line)
            found.append(_tree(fields))
        return found

    def importance(self, kind: str) -> Floats:
        """Return the importance of each feature over all trees.

        Args:
            kind: one of `IMPORTANCES`.

        Returns:
            float64 of shape (features,).
        """
        weight = self._importance_of("split") if kind != "total_gain" else np.empty(0)
        if kind == "weight":
            return weight
        total = self._importance_of("gain")
        if kind == "total_gain":
            return total
        return np.divide(total, weight, out=np.zeros(len(weight)), where=weight > 0)

    def hyperparameters(self) -> Mapping[str, float | str]:
        """Return the numbers that determine the training, and textual settings, as the booster uses them."""
        values: dict[str, float | str] = {}
        for name in _HYPERPARAMETERS:
            number = _parsed(self._parameters.get(name))
            if number is not None and (number > 1 or name != "num_class"):
                values[name] = number
        changed = [self._params[name] for name in _LEARNING_RATES if name in self._params]
        if changed and (number := _parsed(changed[0])) is not None:
            values["learning_rate"] = number
        for name in _SETTINGS:
            if self._parameters.get(name):
                values[name] = self._parameters[name]
        return values

    def sample(self, data: Any, rows: int) -> DataSample:
        """Return a sample of a tuple of features and labels, or of a data set with its raw data.

        Raises:
            ConfigError: the data are of another type, or without raw data.
        """
        if isinstance(data, lightgbm.Dataset):
            try:
                data = data.get_data(), data.get_label()
            except errors() as error:
                raise ConfigError(
                    "a Dataset without its raw data", "pass features and labels, or set free_raw_data=False"
                ) from error
            if data[0] is None or isinstance(data[0], str):
                raise ConfigError("a Dataset without its raw data", "pass features and labels")
        if not isinstance(data, tuple) or len(data) != 2:
            raise ConfigError(
                f"data of type {type(data).__name__}", "pass features and labels, or a lightgbm.Dataset"
            )
        return DataSample(*sample_arrays(data[0], data[1], rows))

    def predict(self, data: Any) -> NDArray[Any]:
        """Return predictions of all trees so far."""
        return np.asarray(self._booster.predict(data, num_iteration=-1, **self._prediction_settings()))

    def predicted_classes(self, predictions: NDArray[Any]) -> NDArray[np.int64]:
        """Return the classes that predictions mean."""
        classes = predictions.argmax(1) if predictions.ndim == 2 else predictions > 0.5
        return np.asarray(classes, np.int64)

    def contributions(self, data: Any) -> Floats:
        """Return SHAP values of shape (rows, outputs, features), without those of the bias.

        They are computed by a copy of the booster: on one that is being trained, LightGBM 4.7 ends the process by a segmentation fault.
        """
        copy = lightgbm.Booster(model_str=self._booster.model_to_string(num_iteration=-1))
        values = copy.predict(data, pred_contrib=True, **self._prediction_settings())
        if hasattr(values, "toarray"):
            values = values.toarray()
        if isinstance(values, list):  # sparse data of several classes
            values = np.concatenate([part.toarray() for part in values], axis=1)
        array = np.asarray(values, np.float64)
        return array.reshape(len(array), -1, len(self._names) + 1)[:, :, :-1]

    def _newest(self) -> str:
        """Return the model of the newest round only, as text."""
        newest = max(0, self._booster.current_iteration() - 1)
        return str(self._booster.model_to_string(num_iteration=1, start_iteration=newest))

    def _prediction_settings(self) -> dict[str, int]:
        """Return settings of a prediction that LightGBM keeps for the process, as the training has set them: threads and log level."""
        names = [name for name in ("num_threads", "verbosity") if name in self._parameters]
        return {name: int(self._parameters[name]) for name in names}

    def _importance_of(self, importance_type: str) -> Floats:
        values = self._booster.feature_importance(importance_type, iteration=-1)
        return np.asarray(values, np.float64)


def _tree(fields: Mapping[str, str]) -> TreeFigures:
    """Return the figures of a tree by the fields of its text.

    Inner nodes are numbered in the order of their splits; a child of -1, -2, … is a leaf. The largest node is that of XGBoost's numbering,
    where each split adds two nodes.
    """
    leaves = int(fields["num_leaves"])
    if leaves < 2:
        return TreeFigures(0, 1, 0, 0.0)
    left, right = ([int(child) for child in fields[name].split()] for name in ("left_child", "right_child"))
    depths, deepest = [0] * len(left), 0
    for node, children in enumerate(zip(left, right, strict=True)):
        below = depths[node] + 1
        deepest = max(deepest, below)
        for child in children:
            if child >= 0:
                depths[child] = below
    gain = math.fsum(float(part) for part in fields["split_gain"].split())
    return TreeFigures(deepest, leaves, 2 * leaves - 2, gain)


def _parsed(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
