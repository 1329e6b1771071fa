"""A callback for XGBoost: evaluations as losses, and figures of the trees."""

from __future__ import annotations

from typing import Any

import xgboost

from watchstep.capture.record import Group, Probe
from watchstep.format import tensors
from watchstep.format.tensors import Mode
from watchstep.hook import Hook
from watchstep.kernels.measurement import Completed
from watchstep.stopping import StopTraining
from watchstep.xgboost.trees import TopShares, depths, described, has_trees, importance, largest_node, row_of

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

    Of each evaluated data set the last metric that is a loss, the one that early stopping goes by, is recorded as
    ``loss``, in mode train for the set named in ``training`` and in mode eval for others; other metrics by their own
    names. ``tree_depth`` holds the depths of the round's trees, ``feature_importance/weight`` and
    ``feature_importance/gain`` how much each feature counts, as often as the overhead budget allows.

    Example::

        hook = watchstep.Hook("s3://bucket/runs")
        xgboost.train(params, data, evals=[(data, "train")], callbacks=[Recording(hook)])
        hook.close()
    """

    def __init__(
        self, hook: Hook, *, training: str = "train", importances: tuple[str, ...] = ("weight", "gain")
    ) -> None:
        """Record by a hook.

        Args:
            hook: open; it stays open when training ends.
            training: what the evaluated training data are called; scikit-learn's interface calls the first of
                ``eval_set`` ``validation_0``.
            importances: kinds of feature importance, as `xgboost.Booster.get_score` knows them.
        """
        super().__init__()
        self._hook = hook
        self._session = hook._session  # noqa: SLF001 - the hook records what its own framework's parts measure
        self._training = training
        self._importances = importances
        self._trees: bool | None = None

    def after_iteration(self, model: Any, epoch: int, evals_log: dict[str, Any]) -> bool:  # noqa: ARG002 - XGBoost's
        """A round is over; never stops training, but by `StopTraining` where the hook opted in."""
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
                known = "loss" if losses and metric == losses[-1] else metric
                last = history[-1]
                value = (
                    last[0] if isinstance(last, tuple) else last
                )  # of a cross-validation, mean and deviation
                self._hook.log({f"{prefix}{known}": float(value)}, mode=mode)

    def _record_trees(self, model: Any) -> None:
        if not isinstance(model, xgboost.Booster):
            return  # the folds of a cross-validation
        if self._trees is None:
            self._trees = has_trees(model)
            if not self._trees:
                self._session.health.note(
                    "trees", "a linear booster has none: nothing is recorded of it but evaluations"
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
    """Whether less of it is better, as far as XGBoost's own metrics go; ``error@0.7`` is one as well."""
    name = metric.partition("@")[0]
    return name in _LOSSES or name.endswith(_LOSS_ENDINGS)
