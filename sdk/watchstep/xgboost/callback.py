"""The callback of XGBoost that records each boosting round as a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xgboost

from watchstep.boosting.evaluations import MetricValue
from watchstep.boosting.recorder import BoostingOptions, HookRecording
from watchstep.capture.framework_names import health_of
from watchstep.hook import Hook
from watchstep.xgboost.booster import IMPORTANCES, XgboostModel
from watchstep.xgboost.internals import is_readable, xgboost_names

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


class XgboostRecording(xgboost.callback.TrainingCallback):
    """Records each boosting round as a step.

    For each evaluated data set, the last metric that is a loss, which early stopping uses, is recorded as
    ``loss``, in mode train for the set named in ``training`` and in mode eval for others. Other metrics keep their own
    names. Hyperparameters, trees and importance are recorded as often as the overhead budget allows: ``optimizer:learning_rate/0``,
    ``booster:max_depth``, …; ``tree_depth`` and ``tree/0``, …; ``feature_importance/gain`` with all features, and
    ``feature_importance/gain:NAME`` for the most important ones. With data, predictions, labels, residuals, a confusion matrix and SHAP
    values of a sample are recorded, too.

    Example::

        hook = watchstep.Hook("s3://bucket/runs")
        xgboost.train(params, data, evals=[(data, "train")], callbacks=[Recording(hook)])
        hook.close()
    """

    def __init__(  # noqa: PLR0913 - all but the hook by name
        self,
        hook: Hook,
        *,
        training: str = "train",
        loss: str | None = None,
        importances: tuple[str, ...] = ("weight", "gain"),
        features: int = 50,
        train_data: Any = None,
        validation_data: Any = None,
        sample_rows: int = 1000,
        shap_rows: int = 0,
    ) -> None:
        """Record with a hook.

        Args:
            hook: an open hook; it stays open when training ends.
            training: name of the training data among the evaluated sets; scikit-learn's interface names the first of
                ``eval_set`` ``validation_0``.
            loss: name of the metric that is recorded as ``loss``. Default: the last of XGBoost's own metrics of which smaller values are
                better.
            importances: kinds of feature importance, as in `xgboost.Booster.get_score`.
            features: maximum number of features that have a row with their name at each round; all others are part of the row of all.
            train_data: data on which the newest model predicts, in mode train: a `xgboost.DMatrix` that can be sliced, or a tuple of
                features and labels. Default: none.
            validation_data: the same in mode eval.
            sample_rows: maximum number of rows of each data set on which it predicts.
            shap_rows: maximum number of rows whose SHAP values are computed; 0 for none.

        Raises:
            ConfigError: an argument is invalid.
        """
        super().__init__()
        options = BoostingOptions(
            training=training,
            loss=loss,
            importances=importances,
            features=features,
            train_data=train_data,
            validation_data=validation_data,
            sample_rows=sample_rows,
            shap_rows=shap_rows,
        )
        options.check(IMPORTANCES)
        self._recording = HookRecording(hook, "xgboost", options)
        xgboost_names.report_to(health_of(hook))
        self._model: XgboostModel | None = None

    def before_training(self, model: Any) -> Any:
        """Begin a training; returns the model unchanged."""
        self._model = None
        self._recording.begin()
        return model

    def before_iteration(self, model: Any, epoch: int, evals_log: Mapping[str, Any]) -> bool:  # noqa: ARG002 - XGBoost's
        """Begin a step. Never stops training, except by `StopTraining` if a guard requests it."""
        self._recording.begin_round()
        return False

    def after_iteration(self, model: Any, epoch: int, evals_log: Mapping[str, Any]) -> bool:  # noqa: ARG002 - XGBoost's
        """End a step after a round. Never stops training, except by `StopTraining` if the hook opted in."""
        self._recording.finish_round(lambda: _evaluations(evals_log), lambda: self._read(model), is_last=True)
        return False

    def after_training(self, model: Any) -> Any:
        """Record the last state of the booster, and release it; returns the model unchanged."""
        self._recording.finish_training(lambda: self._read(model))
        self._model = None
        return model

    def _read(self, model: Any) -> XgboostModel | None:
        if not isinstance(model, xgboost.Booster):
            return None  # the folds of a cross-validation
        if not is_readable(model):
            return None
        if self._model is None or not self._model.is_of(model):
            self._model = XgboostModel(model)
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the booster, for a copy of an estimator with this callback."""
        return {**self.__dict__, "_model": None}


def _evaluations(evals_log: Mapping[str, Any]) -> Sequence[MetricValue]:
    """Return the newest values of XGBoost's log: data set → metric → values, which are pairs of mean and deviation in a cross-validation."""
    found = []
    for dataset, metrics in evals_log.items():
        for metric, history in metrics.items():
            last = history[-1]
            value = last[0] if isinstance(last, tuple) else last
            found.append(MetricValue(dataset, metric, float(value), _is_loss(metric)))
    return found


def _is_loss(metric: str) -> bool:
    """Whether smaller values of a metric are better, for XGBoost's own metrics, including forms such as ``error@0.7``."""
    name = metric.partition("@")[0]
    return name in _LOSSES or name.endswith(_LOSS_ENDINGS)
