"""Predictions, labels and SHAP values of data sets that the program passes: on a bounded sample, and only when they are due.

The sample of a data set is the same at all rounds. Labels do not change, so four rounds record a quarter of all labels each: then class
counts are those of the data set, and a repeated sample does not make chance look significant.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.boosting.figures import SHAP, ImportanceRows, described
from watchstep.boosting.model import BoostedModel, DataSample
from watchstep.capture.given.array_probes import ArrayProbes
from watchstep.capture.given.arrays import measure, save_array
from watchstep.capture.given.confusion import ArrayConfusion
from watchstep.capture.steps.record import Group, Probe
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.format.tensors import Mode, TensorInfo

_LABEL_PARTS = 4


class ArrayRows:
    """Records arrays in host memory as rows, and saves them in full where the configuration requests it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def is_due(self, collection: str, mode: Mode, *, is_final: bool = False) -> bool:
        """Whether statistics or full tensors of a collection are due. After the last round all are that are recorded at all."""
        step, schedule = self._session.recorder.step, self._session.schedule
        is_measured = (is_final and schedule.records(collection, mode)) or (
            schedule.due((collection,), step, mode) is not None
        )
        return is_measured or self._session.full_tensors.due((collection,), step, mode) is not None

    def record(
        self, info: TensorInfo, array: NDArray[Any], mode: Mode, probes: tuple[Probe, ...] = ()
    ) -> None:
        """Record an array in the collection of its description."""
        session, step = self._session, self._session.recorder.step
        saved = session.full_tensors.due(info.collections, step, mode)
        if saved is not None:
            save_array(session.full_tensors, saved, step, mode, info, array)
        session.recorder.add(Group.of((info,)), measure(array), mode, probes)


class SampledPredictions:
    """Records predictions and labels of one data set."""

    def __init__(self, session: Session, data: Any, mode: Mode, rows: int) -> None:
        """Start without a sample; it is taken when something is due for the first time.

        Args:
            session: the recording.
            data: the data set.
            mode: mode of the rows.
            rows: maximum number of rows of the sample.
        """
        self._session = session
        self._data: Any = data
        self._mode: Mode = mode
        self._rows = rows
        self._arrays = ArrayRows(session)
        self._probes = ArrayProbes(session.config.probes)
        self._confusion = ArrayConfusion(session)
        self._sample: DataSample | None = None
        self._classes: NDArray[Any] | None = None
        self._label_parts = 0
        self._output_step = self._confusion_step = -1

    def record(self, model: BoostedModel, *, is_final: bool = False) -> None:
        """Record what is due at the current round, or after the last one.

        Raises:
            ConfigError: the data set cannot be sampled. Prediction may raise any other exception.
        """
        session, mode = self._session, self._mode
        step = session.recorder.step
        has_outputs = step != self._output_step and self._arrays.is_due(
            tensors.OUTPUTS, mode, is_final=is_final
        )
        has_labels = (
            not is_final and self._label_parts < _LABEL_PARTS and self._arrays.is_due(tensors.LABELS, mode)
        )
        has_confusion = step != self._confusion_step and (
            session.schedule.records(tensors.CONFUSION, mode)
            if is_final
            else self._confusion.takes_part(tensors.LABELS, mode)
        )
        if not (has_outputs or has_labels or has_confusion):
            return
        schedule = session.schedule
        since = schedule.now()
        if self._sample is None:
            self._sample, self._data = model.sample(self._data, self._rows), None
            schedule.report_extra(since)
            since = schedule.now()
        if has_labels:
            self._record_labels(model, self._sample)
            schedule.spent(tensors.LABELS, since)
            since = schedule.now()
        if not (has_outputs or has_confusion):
            return
        self._output_step = step if has_outputs else self._output_step
        self._confusion_step = step if has_confusion else self._confusion_step
        predictions = model.predict(self._sample.data)
        if has_outputs:
            self._record_outputs(model, self._sample, predictions)
        if is_final:
            schedule.report_extra(since)
        else:
            schedule.spent(tensors.OUTPUTS if has_outputs else tensors.CONFUSION, since)
        labels = self._class_labels(model, self._sample.labels)
        if has_confusion and labels is not None and (predictions.ndim == 1 or model.task == "multiclass"):
            self._confusion.give(tensors.LABELS, labels, mode)
            self._confusion.give("predictions", model.predicted_classes(predictions), mode)

    def _record_labels(self, model: BoostedModel, sample: DataSample) -> None:
        if sample.all_labels is None:
            self._label_parts = _LABEL_PARTS
            return
        classes = self._class_labels(model, sample.all_labels)
        labels = sample.all_labels if classes is None else classes
        part = labels[self._label_parts :: _LABEL_PARTS]
        self._label_parts += 1
        if not len(part) or part.dtype.kind not in "biuf":
            return
        info = TensorInfo(tensors.LABELS, (tensors.LABELS,), "label", shape=part.shape, dtype=part.dtype.name)
        self._arrays.record(info, part, self._mode, self._probes.measure(info, part, self._mode))

    def _record_outputs(self, model: BoostedModel, sample: DataSample, predictions: NDArray[Any]) -> None:
        info = TensorInfo(
            tensors.OUTPUTS,
            (tensors.OUTPUTS,),
            "output",
            shape=predictions.shape,
            dtype=predictions.dtype.name,
        )
        self._arrays.record(info, predictions, self._mode)
        labels = sample.labels
        if model.task == "regression" and labels is not None and labels.size == predictions.size:
            residuals = labels.astype(np.float64).reshape(predictions.shape) - predictions
            self._arrays.record(described("residuals", "custom", residuals.shape), residuals, self._mode)

    def _class_labels(self, model: BoostedModel, labels: NDArray[Any] | None) -> NDArray[np.int64] | None:
        """Return labels as classes 0, 1, …; None if they are not classes.

        Labels other than these numbers, such as text, are numbered in their order, as the interface of scikit-learn does.
        """
        if labels is None or model.task not in {"binary", "multiclass"} or labels.size != len(labels):
            return None
        flat = labels.reshape(-1)
        if self._classes is None:
            assert self._sample is not None
            whole = self._sample.all_labels
            self._classes = np.unique(flat if whole is None else whole)
        classes = self._classes
        if classes.dtype.kind in "biuf":
            if (classes != np.floor(classes)).any():
                return None
            most = 2 if model.task == "binary" else model.classes
            if classes[0] >= 0 and classes[-1] < most:
                return flat.astype(np.int64)
        numbers: NDArray[np.int64] = np.searchsorted(classes, flat).astype(np.int64)
        return numbers


class ShapValues:
    """Records SHAP values of a sample: all of them as one row, and their mean magnitude for each feature."""

    def __init__(
        self, session: Session, data: Any, mode: Mode, rows: int, importance: ImportanceRows
    ) -> None:
        """Start without a sample; the arguments are those of `SampledPredictions`, and what records the means."""
        self._session = session
        self._data: Any = data
        self._mode: Mode = mode
        self._rows = rows
        self._arrays = ArrayRows(session)
        self._importance = importance
        self._sample: DataSample | None = None
        self._last_step = -1

    def record(self, model: BoostedModel, *, is_final: bool = False) -> None:
        """Record them if predictions are due at the current round, or after the last one.

        Raises:
            ConfigError: the data set cannot be sampled. Computing them may raise any other exception.
        """
        mode, schedule, step = self._mode, self._session.schedule, self._session.recorder.step
        if step == self._last_step or not self._arrays.is_due(tensors.OUTPUTS, mode, is_final=is_final):
            return
        self._last_step = step
        since = schedule.now()
        if self._sample is None:
            self._sample, self._data = model.sample(self._data, self._rows), None
        values = model.contributions(self._sample.data)
        self._arrays.record(described("shap_values", "custom", values.shape), values, mode)
        self._importance.record(SHAP, model.feature_names(), np.abs(values).mean(axis=(0, 1)), mode)
        if is_final:
            schedule.report_extra(since)
        else:
            schedule.spent(tensors.OUTPUTS, since)
