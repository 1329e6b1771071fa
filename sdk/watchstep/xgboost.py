"""Recording of XGBoost training: evaluations as losses, depths of the newest trees, and feature importance.

``from watchstep.xgboost import Recording``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xgboost

from watchstep.capture.steps.record import Group, Probe
from watchstep.format import tensors
from watchstep.format.statistics import Floats, StatisticsBatch, merge_rows, scalars
from watchstep.format.tensors import Mode, TensorInfo
from watchstep.hook import Hook
from watchstep.kernels.measurement import Completed
from watchstep.stopping import StopTraining

TOP = tuple(range(1, 11))
"""Numbers of most important features whose share is recorded."""


@dataclass(frozen=True)
class TopShares:
    """The columns ``top_share_1``, ``top_share_2``, …: the share of the most important features in all importance."""

    values: Floats

    def collect(self) -> dict[str, Floats]:
        """Return one value per column; NaN if no feature has any importance yet."""
        ordered = np.sort(np.abs(self.values))[::-1]
        total = ordered.sum()
        return {
            f"top_share_{count}": np.array([ordered[:count].sum() / total if total > 0 else np.nan])
            for count in TOP
        }


@dataclass(frozen=True)
class LargestNode:
    """The column ``largest_node``: the largest node number in the newest round's trees, in the numbering of XGBoost's dump."""

    number: int

    def collect(self) -> dict[str, Floats]:
        """Return the column."""
        return {"largest_node": np.array([float(self.number)])}


def has_trees(booster: Any) -> bool:
    """Whether a booster consists of trees, and is not linear."""
    name = json.loads(booster.save_config())["learner"]["gradient_booster"]["name"]
    return bool(name != "gblinear")


def depths(booster: Any) -> list[int]:
    """Return the depth of each tree of the newest round: 0 for a single leaf."""
    newest = booster[booster.num_boosted_rounds() - 1]
    return [_depth(dumped) for dumped in newest.get_dump()]


def largest_node(booster: Any) -> LargestNode:
    """Return the largest node number in the newest round's trees."""
    newest = booster[booster.num_boosted_rounds() - 1]
    numbers = [
        int(line.strip().partition(":")[0]) for dumped in newest.get_dump() for line in dumped.splitlines()
    ]
    return LargestNode(max(numbers, default=0))


def importance(booster: Any, kind: str) -> Floats:
    """Return the importance of each feature over all trees.

    Args:
        booster: a booster of trees.
        kind: ``weight``, ``gain``, ``cover``, ``total_gain`` or ``total_cover``, as XGBoost defines them.

    Returns:
        float64 of shape (features,): first the features that some tree uses, then zeros.
    """
    scores = [float(score) for score in booster.get_score(importance_type=kind).values()]
    return np.array(scores + [0.0] * (int(booster.num_features()) - len(scores)))


def row_of(values: Sequence[float]) -> StatisticsBatch:
    """Return statistics of one tensor with these elements."""
    return merge_rows(scalars(list(values)), np.zeros(len(values), np.intp), 1)


def described(name: str, role: str, elements: int) -> TensorInfo:
    """Describe a tensor with figures of trees."""
    return TensorInfo(name, (tensors.CUSTOM,), role, shape=(elements,), dtype="float64")


def _depth(dumped: str) -> int:
    """Return a dumped tree's depth, in which each level is indented by one more tab."""
    return max((len(line) - len(line.lstrip("\t")) for line in dumped.splitlines()), default=0)


_LOSSES = (
    "rmse",
    "rmsle",
    "mae",
    "mape",
    "mphe",
    "logloss",
    "mlogloss",
    "error",
    "merror",
    "quantile",
    "expectile",
    "hinge",
)
_LOSS_ENDINGS = ("-nloglik", "-deviance")


class Recording(xgboost.callback.TrainingCallback):
    """Records each boosting round as a step.

    For each evaluated data set, the last metric that is a loss, which early stopping uses, is recorded as
    ``loss``, in mode train for the set named in ``training`` and in mode eval for others. Other metrics keep their own
    names. ``tree_depth`` is the depths of the round's trees; ``feature_importance/weight`` and
    ``feature_importance/gain`` are the importance of each feature, as often as the overhead budget allows.

    Example::

        hook = watchstep.Hook("s3://bucket/runs")
        xgboost.train(params, data, evals=[(data, "train")], callbacks=[Recording(hook)])
        hook.close()
    """

    def __init__(
        self, hook: Hook, *, training: str = "train", importances: tuple[str, ...] = ("weight", "gain")
    ) -> None:
        """Record with a hook.

        Args:
            hook: an open hook; it stays open when training ends.
            training: name of the training data among the evaluated sets; scikit-learn's interface names the first of
                ``eval_set`` ``validation_0``.
            importances: kinds of feature importance, as in `xgboost.Booster.get_score`.
        """
        super().__init__()
        self._hook = hook
        self._session = hook._session  # noqa: SLF001 - part of the hook's own package
        self._training = training
        self._importances = importances
        self._trees: bool | None = None

    def after_iteration(self, model: Any, epoch: int, evals_log: dict[str, Any]) -> bool:  # noqa: ARG002 - XGBoost's
        """End a step after a round. Never stops training, except by `StopTraining` if the hook opted in."""
        try:
            self._log(evals_log)
            self._record_trees(model)
        except StopTraining:
            raise
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._session.health.fault("xgboost", error)
        self._hook.step()
        return False

    def _log(self, evals_log: dict[str, Any]) -> None:
        validation = [name for name in evals_log if name != self._training]
        for name, metrics in evals_log.items():
            mode: Mode = "train" if name == self._training else "eval"
            prefix = "" if mode == "train" or name == validation[0] else f"{name}:"
            losses = [metric for metric in metrics if _is_loss(metric)]
            for metric, history in metrics.items():
                scalar_name = "loss" if losses and metric == losses[-1] else metric
                last = history[-1]
                value = (
                    last[0] if isinstance(last, tuple) else last
                )  # mean and deviation in a cross-validation
                self._hook.log({f"{prefix}{scalar_name}": float(value)}, mode=mode)

    def _record_trees(self, model: Any) -> None:
        if not isinstance(model, xgboost.Booster):
            return  # the folds of a cross-validation
        if self._trees is None:
            self._trees = has_trees(model)
            if not self._trees:
                self._session.health.note(
                    "trees", "a linear booster has no trees: only evaluations are recorded"
                )
        schedule = self._session.schedule
        charged = schedule.due((tensors.CUSTOM,), self._session.recorder.step) if self._trees else None
        if charged is None:
            return
        since = schedule.now()
        self._add("tree_depth", "tree_depth", [float(depth) for depth in depths(model)], largest_node(model))
        for kind in self._importances:
            values = importance(model, kind)
            self._add(f"feature_importance/{kind}", "feature_importance", values.tolist(), TopShares(values))
        schedule.spent(charged, since)

    def _add(self, name: str, role: str, values: list[float], *probes: Probe) -> None:
        group = Group.of((described(name, role, len(values)),))
        self._session.recorder.add(group, Completed(row_of(values)), probes=probes)


def _is_loss(metric: str) -> bool:
    """Whether smaller values of a metric are better, for XGBoost's own metrics, including forms such as ``error@0.7``."""
    name = metric.partition("@")[0]
    return name in _LOSSES or name.endswith(_LOSS_ENDINGS)
