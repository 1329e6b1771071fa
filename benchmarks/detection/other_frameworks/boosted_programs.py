"""Programs of XGBoost and LightGBM: a regression, whose residuals grow if each tree corrects them by more than twice their size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.detection.programs import Clock
from watchstep import Hook

_ROUNDS = 150
_RATE, _TOO_HIGH = 0.1, 2.1


def _data(seed: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Friedman's first function with noise: for training and for validation."""
    random = np.random.default_rng(seed)
    inputs = random.random((1500, 8))
    labels = 10 * np.sin(np.pi * inputs[:, 0] * inputs[:, 1]) + 20 * (inputs[:, 2] - 0.5) ** 2
    labels += 10 * inputs[:, 3] + 5 * inputs[:, 4] + random.standard_normal(1500)
    return [(inputs[:1000], labels[:1000]), (inputs[1000:], labels[1000:])]


def xgboost_rate(hook: Hook, seed: int, clock: Clock, faulty: bool) -> list[float]:
    import xgboost

    from watchstep.xgboost import Recording

    class Ticking(xgboost.callback.TrainingCallback):  # type: ignore[misc, unused-ignore]
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:  # noqa: ARG002 - XGBoost's
            clock.step()
            return False

    train, validation = (xgboost.DMatrix(inputs, labels) for inputs, labels in _data(seed))
    history: dict[str, dict[str, list[float]]] = {}
    xgboost.train(
        {"max_depth": 3, "eta": _TOO_HIGH if faulty else _RATE, "seed": seed, "nthread": 1},
        train,
        _ROUNDS,
        evals=[(train, "train"), (validation, "validation")],
        evals_result=history,
        verbose_eval=False,
        callbacks=[Recording(hook), Ticking()],
    )
    return [float(value) for value in history["train"]["rmse"]]


def lightgbm_rate(hook: Hook, seed: int, clock: Clock, faulty: bool) -> list[float]:
    import lightgbm

    from watchstep.lightgbm import Recording

    (inputs, labels), (further, further_labels) = _data(seed)
    train = lightgbm.Dataset(inputs, labels)
    validation = lightgbm.Dataset(further, further_labels, reference=train)
    history: dict[str, dict[str, list[float]]] = {}
    rate = _TOO_HIGH if faulty else _RATE
    lightgbm.train(
        {
            "objective": "regression",
            "metric": "rmse",
            "num_leaves": 8,
            "learning_rate": rate,
            "seed": seed,
            "num_threads": 1,
            "verbosity": -1,
        },
        train,
        _ROUNDS,
        valid_sets=[train, validation],
        valid_names=["train", "validation"],
        callbacks=[Recording(hook), lightgbm.record_evaluation(history), lambda _: clock.step()],
    )
    return [float(value) for value in history["train"]["rmse"]]
