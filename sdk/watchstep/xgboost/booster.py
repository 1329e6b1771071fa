"""A booster of XGBoost: its trees, importance and hyperparameters, and predictions on samples."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xgboost
from numpy.typing import NDArray

from watchstep.boosting.figures import TreeFigures
from watchstep.boosting.model import MAX_LABELS, DataSample, Task, evenly_spaced, sample_arrays
from watchstep.errors import ConfigError
from watchstep.format.statistics import Floats
from watchstep.xgboost.internals import errors

IMPORTANCES = ("weight", "gain", "cover", "total_gain", "total_cover")
"""Kinds of importance, as XGBoost defines them."""

_HYPERPARAMETERS = (
    "learning_rate",
    "max_depth",
    "max_leaves",
    "min_child_weight",
    "gamma",
    "subsample",
    "colsample_bytree",
    "colsample_bylevel",
    "colsample_bynode",
    "reg_alpha",
    "reg_lambda",
    "max_delta_step",
    "max_bin",
    "num_parallel_tree",
    "scale_pos_weight",
    "rate_drop",
    "skip_drop",
    "num_class",
    "seed",
)
_SETTINGS = ("objective", "booster", "tree_method", "grow_policy", "process_type", "device", "multi_strategy")

_NODE = re.compile(r"(\t*)(\d+):")
_GAIN = re.compile(r",gain=([^,=]+),cover=[^,=]+$")


class XgboostModel:
    """Reads one booster during its training.

    Importance is the sum over all trees, to which each reading adds the trees since the last one.
    """

    def __init__(self, booster: xgboost.Booster) -> None:
        self._booster = booster
        config = _config_of(booster)
        self._name = str(_find(config, "name", "gradient_booster") or "gbtree")
        self._objective = str(_find(config, "name", "objective") or "")
        self._classes = int(_find(config, "num_class", "learner_model_param") or 0)
        self._rounds = 0
        self._sums: dict[str, Floats] = {}

    def is_of(self, booster: xgboost.Booster) -> bool:
        """Whether it reads this booster."""
        return self._booster is booster

    @property
    def has_trees(self) -> bool:
        """Whether the booster consists of trees, and is not linear."""
        return self._name != "gblinear"

    @property
    def task(self) -> Task:
        """What it predicts, by its objective."""
        kind, _, name = self._objective.partition(":")
        if kind == "multi":
            return "multiclass"
        if kind == "binary":
            return "binary"
        return "regression" if kind in {"reg", "count"} and name != "quantileerror" else "other"

    @property
    def classes(self) -> int:
        """Number of classes."""
        return 2 if self.task == "binary" else self._classes

    def feature_names(self) -> Sequence[str]:
        """Return the names of the features; ``f0``, ``f1``, … for those without."""
        names = self._booster.feature_names
        return (
            names if names is not None else [f"f{number}" for number in range(self._booster.num_features())]
        )

    def trees(self) -> Sequence[TreeFigures]:
        """Return the trees of the newest round."""
        newest = self._booster[self._booster.num_boosted_rounds() - 1]
        try:
            dumped = newest.get_dump(with_stats=True)
        except errors():  # trees with several outputs have no statistics in a dump
            dumped = newest.get_dump()
        return [_tree(text) for text in dumped]

    def importance(self, kind: str) -> Floats:
        """Return the importance of each feature over all trees, in the order of the features.

        Args:
            kind: one of `IMPORTANCES`.

        Returns:
            float64 of shape (features,).
        """
        base = {"gain": "total_gain", "cover": "total_cover"}.get(kind, kind)
        self._add_new_trees()
        if base == kind:
            sums: Floats = self._sums[base].copy()
            return sums
        weight = self._sums["weight"]
        means: Floats = np.divide(self._sums[base], weight, out=np.zeros(len(weight)), where=weight > 0)
        return means

    def _add_new_trees(self) -> None:
        rounds = self._booster.num_boosted_rounds()
        if rounds == self._rounds:
            return
        if rounds < self._rounds or not self._sums:
            self._rounds = 0
            self._sums = {
                base: np.zeros(self._booster.num_features())
                for base in ("weight", "total_gain", "total_cover")
            }
        added = self._booster[self._rounds : rounds]
        self._rounds = rounds
        names = self._booster.feature_names
        place = None if names is None else {name: number for number, name in enumerate(names)}
        for base, sums in self._sums.items():
            for name, score in added.get_score(importance_type=base).items():
                sums[int(name[1:]) if place is None else place[name]] += _number(score)

    def hyperparameters(self) -> Mapping[str, float | str]:
        """Return the numbers that determine the training, and textual settings, as the booster uses them."""
        config = _flat(_config_of(self._booster))
        values: dict[str, float | str] = {}
        for name in _HYPERPARAMETERS:
            number = _parsed(config.get(name))
            if number is not None and (number or name != "num_class"):
                values[name] = number
        for name in _SETTINGS:
            if config.get(name):
                values[name] = str(config[name])
        return values

    def sample(self, data: Any, rows: int) -> DataSample:
        """Return a sample of a matrix that can be sliced, or of a tuple of features and labels.

        Raises:
            ConfigError: the data are of another type, or a matrix that cannot be sliced.
        """
        if isinstance(data, tuple) and len(data) == 2:
            features, labels, all_labels = sample_arrays(data[0], data[1], rows)
            categorical = {"enable_categorical": True} if hasattr(features, "iloc") else {}
            return DataSample(xgboost.DMatrix(features, nthread=1, **categorical), labels, all_labels)
        if not isinstance(data, xgboost.DMatrix):
            raise ConfigError(
                f"data of type {type(data).__name__}",
                "pass an xgboost.DMatrix, or a tuple of features and labels",
            )
        total = data.num_row()
        try:
            sampled = data.slice(evenly_spaced(total, rows).tolist(), allow_groups=True)
        except errors() as error:
            raise ConfigError(
                f"a {type(data).__name__} cannot be sliced",
                "pass a small xgboost.DMatrix, or features and labels",
            ) from error
        labels = np.asarray(data.get_label())
        if not labels.size or labels.size % total:
            return DataSample(sampled, None, None)
        labels = labels.reshape(total, -1) if labels.size > total else labels.reshape(total)
        return DataSample(
            sampled, labels[evenly_spaced(total, rows)], labels[evenly_spaced(total, MAX_LABELS)].copy()
        )

    def predict(self, data: Any) -> NDArray[Any]:
        """Return predictions of all trees so far. The sample is a matrix of its own, so that XGBoost's cached predictions of the training data stay as they are."""
        return np.asarray(self._booster.predict(data, validate_features=False))

    def predicted_classes(self, predictions: NDArray[Any]) -> NDArray[np.int64]:
        """Return the classes that predictions mean."""
        if predictions.ndim == 2:
            classes = predictions.argmax(1)
        elif self.task == "multiclass":
            classes = predictions
        else:
            classes = predictions > (0.0 if self._objective == "binary:logitraw" else 0.5)
        return np.asarray(classes).astype(np.int64)

    def contributions(self, data: Any) -> Floats:
        """Return SHAP values of shape (rows, outputs, features), without those of the bias."""
        values = np.asarray(
            self._booster.predict(data, pred_contribs=True, validate_features=False), np.float64
        )
        return values.reshape(len(values), -1, values.shape[-1])[:, :, :-1]


def _tree(dumped: str) -> TreeFigures:
    """Return the figures of a dumped tree, in which each level is indented by one more tab and a feature's name may contain anything."""
    depth = leaves = largest = 0
    gain = 0.0
    has_gain = True
    for line in dumped.splitlines():
        node = _NODE.match(line)
        if node is None:
            continue
        depth, largest = max(depth, len(node[1])), max(largest, int(node[2]))
        if line.startswith("leaf=", node.end()):
            leaves += 1
        elif (found := _GAIN.search(line)) is not None:
            gain += float(found[1])
        else:
            has_gain = False
    return TreeFigures(depth, leaves, largest, gain if has_gain else math.nan)


def _number(score: float | list[float]) -> float:
    return float(sum(score)) if isinstance(score, list) else float(score)


def _config_of(booster: xgboost.Booster) -> Any:
    return json.loads(booster.save_config())["learner"]


def _find(config: Any, name: str, section: str) -> Any:
    part = config.get(section)
    return part.get(name) if isinstance(part, dict) else None


def _flat(config: Any) -> dict[str, Any]:
    """Return the values of all sections by name; the first section with a name counts. The sections of metrics are left out."""
    values: dict[str, Any] = {}
    sections: list[Any] = [config]
    while sections:
        section = sections.pop(0)
        for name, value in section.items():
            if isinstance(value, dict):
                sections.append(value)
            elif not isinstance(value, list):
                values.setdefault(name, value)
    return values


def _parsed(value: Any) -> float | None:
    """Return a number of the configuration, as float32 prints it: 0.300000012 is 0.3."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if abs(number) >= 2**24 or number == round(number):
        return number
    return float(f"{number:.7g}")
