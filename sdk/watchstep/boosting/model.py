"""What an adapter of a boosting library provides: the newest state of a booster, and samples of its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from watchstep.boosting.figures import TreeFigures
from watchstep.format.statistics import Floats

Task = Literal["binary", "multiclass", "regression", "other"]
"""What a booster predicts: two classes, several classes, numbers, or anything else, such as ranks."""

MAX_LABELS = 1_000_000


@dataclass(frozen=True)
class DataSample:
    """A sample of a data set.

    Attributes:
        data: its rows, in the form that the adapter predicts on.
        labels: their labels, of shape (rows,) or (rows, targets); None for data without labels.
        all_labels: labels of the whole data set, at most `MAX_LABELS` evenly spaced ones; None without labels.
    """

    data: Any
    labels: NDArray[Any] | None
    all_labels: NDArray[Any] | None


class BoostedModel(Protocol):
    """A booster after a round."""

    @property
    def has_trees(self) -> bool:
        """Whether the booster consists of trees, and is not linear."""
        ...

    @property
    def task(self) -> Task:
        """What it predicts."""
        ...

    @property
    def classes(self) -> int:
        """Number of classes of a classifier; 0 for other boosters."""
        ...

    def feature_names(self) -> Sequence[str]:
        """Return the names of the features."""
        ...

    def trees(self) -> Sequence[TreeFigures]:
        """Return the trees of the newest round."""
        ...

    def importance(self, kind: str) -> Floats:
        """Return the importance of each feature over all trees, float64 of shape (features,)."""
        ...

    def hyperparameters(self) -> Mapping[str, float | str]:
        """Return hyperparameters by name; ``learning_rate`` is one of them."""
        ...

    def sample(self, data: Any, rows: int) -> DataSample:
        """Return a sample of a data set that the program passed, of at most so many rows.

        Raises:
            ConfigError: the data set cannot be sampled.
        """
        ...

    def predict(self, data: Any) -> NDArray[Any]:
        """Return predictions for a sample: probabilities of shape (rows,) or (rows, classes), classes, or numbers."""
        ...

    def predicted_classes(self, predictions: NDArray[Any]) -> NDArray[np.int64]:
        """Return the classes that predictions of a classifier mean, of shape (rows,)."""
        ...

    def contributions(self, data: Any) -> Floats:
        """Return SHAP values for a sample, float64 of shape (rows, outputs, features)."""
        ...


def evenly_spaced(length: int, most: int) -> NDArray[np.int64]:
    """Return at most ``most`` evenly spaced indices below ``length``, the first of them 0."""
    count = min(length, most)
    return np.arange(count, dtype=np.int64) * length // max(count, 1)


def sample_arrays(
    features: Any, labels: Any, rows: int
) -> tuple[Any, NDArray[Any] | None, NDArray[Any] | None]:
    """Sample features and labels in host memory.

    Args:
        features: array, data frame or sparse matrix of shape (rows, features).
        labels: array, series or list of shape (rows,) or (rows, targets); None without labels.
        rows: maximum number of rows.

    Returns:
        The features of the sample, its labels, and the labels of the whole data set, at most `MAX_LABELS`.
    """
    if not hasattr(features, "shape"):
        features = np.asarray(features)
    chosen = evenly_spaced(int(features.shape[0]), rows)
    sampled = features.iloc[chosen] if hasattr(features, "iloc") else features[chosen]
    if labels is None:
        return sampled, None, None
    whole = np.asarray(labels)
    return sampled, whole[chosen], whole[evenly_spaced(len(whole), MAX_LABELS)]
