"""A booster without a library: known trees, importance and predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.boosting.figures import TreeFigures
from watchstep.boosting.model import DataSample, Task, sample_arrays
from watchstep.format.statistics import Floats


@dataclass
class KnownModel:
    """Predicts the first column, as a probability of the class 1 or as a number."""

    task: Task = "binary"
    has_trees: bool = True
    names: Sequence[str] = ("first", "second", "third")
    values: Sequence[float] = (4.0, 0.0, 1.0)
    numbers: Mapping[str, float | str] = field(
        default_factory=lambda: {"learning_rate": 0.5, "objective": "o"}
    )
    fails: bool = False

    @property
    def classes(self) -> int:
        return 2 if self.task == "binary" else 0

    def feature_names(self) -> Sequence[str]:
        return self.names

    def trees(self) -> Sequence[TreeFigures]:
        return [TreeFigures(2, 3, 4, 1.5), TreeFigures(0, 1, 0, 0.0)]

    def importance(self, kind: str) -> Floats:
        if self.fails:
            raise ValueError(f"no {kind}")
        return np.array(self.values)

    def hyperparameters(self) -> Mapping[str, float | str]:
        return self.numbers

    def sample(self, data: Any, rows: int) -> DataSample:
        return DataSample(*sample_arrays(data[0], data[1], rows))

    def predict(self, data: Any) -> NDArray[Any]:
        return np.asarray(data)[:, 0]

    def predicted_classes(self, predictions: NDArray[Any]) -> NDArray[np.int64]:
        return (predictions > 0.5).astype(np.int64)

    def contributions(self, data: Any) -> Floats:
        return np.asarray(data, np.float64)[:, None, :]
