"""Recording of boosting rounds: evaluations, hyperparameters, trees, importance, predictions and SHAP values, as steps of a hook."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from watchstep.boosting.evaluations import MetricValue, numbers_of
from watchstep.boosting.figures import ImportanceRows, TreeRows
from watchstep.boosting.model import BoostedModel
from watchstep.boosting.predictions import SampledPredictions, ShapValues
from watchstep.capture.steps.session import Session
from watchstep.errors import ConfigError
from watchstep.format import tensors
from watchstep.format.tensors import Mode
from watchstep.hook import Hook
from watchstep.stopping import StopTraining

LEARNING_RATE = "optimizer:learning_rate/0"
"""Name of the learning rate, by which rules find it."""

_REPEAT_INTERVAL = 1000
"""Number of rounds after which unchanged hyperparameters are recorded again, for readers of a window of steps."""

_MAX_ROWS = 100_000


@dataclass(frozen=True, kw_only=True)
class BoostingOptions:
    """What is recorded of a training; the attributes are described at `watchstep.xgboost.Recording`."""

    training: str
    loss: str | None = None
    importances: tuple[str, ...] = ("weight", "gain")
    features: int = 50
    train_data: Any = None
    validation_data: Any = None
    sample_rows: int = 1000
    shap_rows: int = 0

    def check(self, kinds: Sequence[str]) -> None:
        """Check the options.

        Args:
            kinds: kinds of importance of the library.

        Raises:
            ConfigError: an option is invalid.
        """
        if isinstance(self.importances, str) or (unknown := set(self.importances) - set(kinds)):
            shown = self.importances if isinstance(self.importances, str) else sorted(unknown)
            raise ConfigError(f"invalid importances={shown!r}", f"use a tuple of {', '.join(kinds)}")
        for name, least in (("features", 0), ("sample_rows", 1), ("shap_rows", 0)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= _MAX_ROWS:
                raise ConfigError(
                    f"invalid {name}={value!r}", f"use a whole number from {least} to {_MAX_ROWS}"
                )
        if self.shap_rows and self.train_data is None and self.validation_data is None:
            raise ConfigError(
                f"shap_rows={self.shap_rows} without data", "also pass train_data= or validation_data="
            )


class RoundRecorder:
    """Records the rounds of one training into a session."""

    def __init__(self, session: Session, library: str, options: BoostingOptions) -> None:
        """Start a training.

        Args:
            session: the recording.
            library: name of the library, for faults.
            options: what is recorded.
        """
        self._session = session
        self._library = library
        self._options = options
        self._trees = TreeRows(session)
        self._importance = ImportanceRows(session, options.features)
        self._has_noted = False
        self._hyperparameters: dict[str, float] = {}
        self._recorded = -_REPEAT_INTERVAL
        self._last_step = -1
        self._samples: list[tuple[str, SampledPredictions | ShapValues]] = []
        data: tuple[tuple[str, Any, Mode], ...] = (
            ("train_data", options.train_data, "train"),
            ("validation_data", options.validation_data, "eval"),
        )
        given = [entry for entry in data if entry[1] is not None]
        for name, data_set, mode in given:
            self._samples.append((name, SampledPredictions(session, data_set, mode, options.sample_rows)))
        if options.shap_rows and given:
            name, data_set, mode = given[0]
            shap = ShapValues(session, data_set, mode, options.shap_rows, self._importance)
            self._samples.append((f"SHAP values of {name}", shap))

    def record(self, model: BoostedModel, *, is_final: bool = False) -> None:
        """Record what is due of a booster after a round. A fault of one part does not affect the others.

        Args:
            model: the booster.
            is_final: no further round follows: everything is recorded that was not at this step, because the last state is that of the
                model. The cost is reported, and not subtracted from the allowance.
        """
        session = self._session
        schedule, step = session.schedule, session.recorder.step
        charged = schedule.due((tensors.CUSTOM,), step)
        forced = is_final and schedule.records(tensors.CUSTOM, "train")
        if (charged is not None or forced) and step != self._last_step:
            self._last_step = step
            since = schedule.now()
            with self._contained("hyperparameters"):
                self._record_hyperparameters(model, step)
            with self._contained("trees"):
                self._record_trees(model)
            if charged is not None:
                schedule.spent(charged, since)
            else:
                schedule.report_extra(since)
        if self._options.validation_data is not None and not is_final:
            schedule.forward("eval", step)
        for entry in list(self._samples):
            try:
                entry[1].record(model, is_final=is_final)
            except ConfigError as error:
                self._samples.remove(entry)
                session.health.note(entry[0], f"not recorded: {error}")
            except Exception as error:  # noqa: BLE001 - as above
                session.health.fault(f"{self._library} {entry[0]}", error)

    def _record_trees(self, model: BoostedModel) -> None:
        if not model.has_trees:
            self._session.health.note("trees", "a linear booster has no trees: only evaluations are recorded")
            return
        self._trees.record(model.trees())
        names = model.feature_names()
        for kind in self._options.importances:
            self._importance.record(kind, names, model.importance(kind))

    def _record_hyperparameters(self, model: BoostedModel, step: int) -> None:
        """Record numbers that have changed as metrics, and note text once in health."""
        if tensors.METRICS not in self._session.config.chosen:
            return
        values = model.hyperparameters()
        is_repeat = step >= self._recorded + _REPEAT_INTERVAL
        if is_repeat:
            self._recorded = step
        for name, value in values.items():
            if isinstance(value, str) or not math.isfinite(value):
                continue
            if is_repeat or self._hyperparameters.get(name) != value:
                self._hyperparameters[name] = value
                row = LEARNING_RATE if name == "learning_rate" else f"booster:{name}"
                self._session.recorder.scalar(row, value)
        if not self._has_noted:
            self._has_noted = True
            texts = [f"{name}={value}" for name, value in values.items() if isinstance(value, str) and value]
            self._session.health.note("hyperparameters", ", ".join(texts)[:1000])

    @contextmanager
    def _contained(self, part: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._session.health.fault(f"{self._library} {part}", error)


class HookRecording:
    """The part of a callback that is independent of the library.

    A copy is the same recording, so that estimators with callbacks can be cloned. In another process, or read from a file, it records nothing.
    """

    def __init__(self, hook: Hook, library: str, options: BoostingOptions) -> None:
        """Record with a hook; the arguments are those of `RoundRecorder`."""
        self._hook = hook
        self._library = library
        self._options = options
        self._rounds: RoundRecorder | None = None

    @property
    def options(self) -> BoostingOptions:
        """What is recorded."""
        return self._options

    def begin(self) -> None:
        """Begin a training."""
        self._rounds = None

    def begin_round(self) -> None:
        """Begin the next step, if the last one is finished.

        Raises:
            StopTraining: a guard requests it, after evaluating the last step.
        """
        if (session := self._session) is not None:
            self._call(session, session.recorder.begin)

    def finish_round(
        self,
        evaluate: Callable[[], Sequence[MetricValue]],
        model: Callable[[], BoostedModel | None],
        *,
        is_last: bool,
    ) -> None:
        """Record a round, and finish its step.

        Args:
            evaluate: returns the evaluations of the round.
            model: returns the booster; None for the folds of a cross-validation.
            is_last: as for `numbers_of`.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        session = self._session
        if session is None:
            return
        self._call(session, session.recorder.begin)
        try:
            numbers = numbers_of(evaluate(), self._options.training, self._options.loss, is_last=is_last)
            for mode, values in numbers.items():
                self._hook.log(values, mode=mode)
            if (booster := model()) is not None:
                if self._rounds is None:
                    self._rounds = RoundRecorder(session, self._library, self._options)
                self._rounds.record(booster)
        except StopTraining:
            raise
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            session.health.fault(self._library, error)
        self._call(session, session.recorder.finish)

    def finish_training(self, model: Callable[[], BoostedModel | None]) -> None:
        """Record the last state of the booster at its last step, which ends when the program goes on or closes the hook."""
        session = self._session
        if session is None or self._rounds is None:
            return
        try:
            if session.recorder.finished and (booster := model()) is not None:
                self._rounds.record(booster, is_final=True)
        except Exception as error:  # noqa: BLE001 - as above
            session.health.fault(self._library, error)
        self._rounds = None

    def _call(self, session: Session, function: Callable[[], None]) -> None:
        """Call a function that may stop the training, and contain its other faults."""
        try:
            function()
        except (StopTraining, ConfigError):
            raise
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            session.health.fault(self._library, error)

    @property
    def _session(self) -> Session | None:
        """The recording; None if the hook is closed, or that of another process."""
        session: Session | None = getattr(self._hook, "_session", None)
        return None if session is None or self._hook._ending.ended else session  # noqa: SLF001 - part of the hook's own package

    def __deepcopy__(self, memo: dict[int, Any]) -> HookRecording:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        options = replace(self._options, train_data=None, validation_data=None, shap_rows=0)
        return HookRecording, (self._hook, self._library, options)
