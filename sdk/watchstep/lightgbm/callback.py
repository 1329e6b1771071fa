"""The callback of LightGBM that records each boosting round as a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightgbm

from watchstep.boosting.evaluations import MetricValue
from watchstep.boosting.recorder import BoostingOptions, HookRecording
from watchstep.capture.framework_names import health_of
from watchstep.hook import Hook
from watchstep.lightgbm.booster import IMPORTANCES, LightgbmModel
from watchstep.lightgbm.internals import has_round, lightgbm_names, readable_model

_ORDER = 25
"""Position among the callbacks: after those that log and collect evaluations, before early stopping (30), which raises an exception."""

_FOLDS = "cv_agg"
"""Name of the data set of a cross-validation in LightGBM 4.5 and earlier, where the metric's name begins with the set's."""


class LightgbmRecording:
    """Records each boosting round as a step, for ``callbacks=`` of `lightgbm.train`, `lightgbm.cv` and ``fit`` of its estimators.

    For each evaluated data set, the first metric of which smaller values are better is recorded as ``loss``, in mode train for the set named
    in ``training`` and in mode eval for others. Everything else has the names that `watchstep.xgboost.Recording` uses, so that the same
    rules judge it.

    Example::

        hook = watchstep.Hook("s3://bucket/runs")
        lightgbm.train(params, data, valid_sets=[data, validation], callbacks=[Recording(hook)])
        hook.close()
    """

    order = _ORDER
    before_iteration = False

    def __init__(  # noqa: PLR0913 - all but the hook by name
        self,
        hook: Hook,
        *,
        training: str = "training",
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
            training: name of the training data among the evaluated sets. In a cross-validation it is ``train``.
            loss: name of the metric that is recorded as ``loss``. Default: the first of which smaller values are better.
            importances: kinds of feature importance: ``weight``, the number of splits, which LightGBM calls ``split``; ``total_gain``, the
                gain of all splits, which it calls ``gain``; ``gain``, the mean gain of a split. These are XGBoost's names.
            features: maximum number of features that have a row with their name at each round; all others are part of the row of all.
            train_data: data on which the newest model predicts, in mode train: a tuple of features and labels, or a `lightgbm.Dataset` with
                its raw data (``free_raw_data=False``). Default: none.
            validation_data: the same in mode eval.
            sample_rows: maximum number of rows of each data set on which it predicts.
            shap_rows: maximum number of rows whose SHAP values are computed; 0 for none.

        Raises:
            ConfigError: an argument is invalid.
        """
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
        self._recording = HookRecording(hook, "lightgbm", options)
        lightgbm_names.report_to(health_of(hook))
        self._model: LightgbmModel | None = None

    def __call__(self, env: Any) -> None:
        """End a step after a round.

        Args:
            env: LightGBM's ``CallbackEnv``.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        if not has_round(env):
            return
        if env.iteration == env.begin_iteration:
            self._model = None
            self._recording.begin()
        self._recording.finish_round(
            lambda: _evaluations(env.evaluation_result_list or ()), lambda: self._read(env), is_last=False
        )
        if env.iteration + 1 == env.end_iteration:
            self._recording.finish_training(lambda: self._read(env))
            self._model = None

    def _read(self, env: Any) -> LightgbmModel | None:
        model = readable_model(env)
        if not isinstance(model, lightgbm.Booster):
            return None  # such as the folds of a cross-validation
        if self._model is None or not self._model.is_of(model):
            self._model = LightgbmModel(model)
        self._model.begin_round(env.params)
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the booster, for a copy of an estimator with this callback."""
        return {**self.__dict__, "_model": None}


def _evaluations(results: Sequence[Any]) -> Sequence[MetricValue]:
    """Return LightGBM's results: data set, metric, value, and whether larger values are better."""
    found = []
    for dataset, metric, value, is_larger_better, *_ in results:
        if dataset == _FOLDS:
            dataset, _, metric = metric.partition(" ")  # noqa: PLW2901 - the two are one text
        found.append(MetricValue(dataset, metric, float(value), not is_larger_better))
    return found
