"""Class counts of labels and predictions that a program records itself.

Examples have one label each, 0 … C - 1. Negative labels, which losses ignore, and labels of at least C are not counted.
Predictions are scores of shape (examples, C), where the largest score is the prediction, or class indices as integers in host
memory. The counts accumulate over batches, and restart after 1,000 examples or 50 per class, whichever is more, so that they
describe the current model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from watchstep.capture.steps.record import Group
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.format.statistics import Floats, StatisticsBatch, merge_rows, scalars
from watchstep.format.tensors import Mode, TensorInfo

MAX_CLASSES = 100
PREDICTIONS = ("outputs", "predictions")

_EXAMPLES = 1000
_EXAMPLES_PER_CLASS = 50


class Numbers(Protocol):
    """Numbers that may still be on their way from a device."""

    def numbers(self) -> Floats:
        """Wait for the numbers, and return them as float64."""
        ...


@dataclass(frozen=True)
class ConfusionCounts:
    """Probe with one value per class.

    Since the last restart: ``examples`` of the class; ``correct`` predictions of them; ``confused``, those predicted as
    ``confused_with``, the most frequent wrong prediction. Over all batches so far: ``all_examples`` of the class; ``all_correct``
    predictions of them; ``all_predicted``, the number of predictions of the class; ``all_mistaken``, those with the label
    ``all_mistaken_for``, the most frequent wrong label.
    """

    matrix: Numbers
    total: Numbers

    def collect(self) -> dict[str, Floats]:
        """Return the columns. The matrices have one row per label and one column per prediction."""
        return {**self._recent_columns(), **self._total_columns()}

    def _total_columns(self) -> dict[str, Floats]:
        numbers = self.total.numbers()
        correct = np.diagonal(numbers)
        others = numbers - np.diag(correct)
        mistaken = others.max(0)
        return {
            "all_examples": numbers.sum(1),
            "all_correct": correct.copy(),
            "all_predicted": numbers.sum(0),
            "all_mistaken": mistaken,
            "all_mistaken_for": np.where(mistaken > 0, others.argmax(0), np.nan),
        }

    def _recent_columns(self) -> dict[str, Floats]:
        numbers = self.matrix.numbers()
        examples, correct = numbers.sum(1), np.diagonal(numbers)
        others = numbers - np.diag(correct)
        confused = others.max(1)
        return {
            "examples": examples,
            "correct": correct.copy(),
            "confused": confused,
            "confused_with": np.where(confused > 0, others.argmax(1), np.nan),
        }


@dataclass(frozen=True)
class _Accuracies:
    """Measurement of the share of correct predictions of each class. A class without examples has no value."""

    counts: ConfusionCounts
    nonfinite: bool | None = False

    def collect(self) -> StatisticsBatch:
        """Return one row per class."""
        figures = self.counts.collect()
        examples, correct = figures["examples"], figures["correct"]
        present = np.flatnonzero(examples)
        return merge_rows(scalars((correct[present] / examples[present]).tolist()), present, len(examples))


def record_confusion(session: Session, counts: ConfusionCounts, classes: int, mode: Mode) -> None:
    """Record one row per class."""
    infos = tuple(
        TensorInfo(f"confusion/{label}", (tensors.CONFUSION,), "confusion", dtype="float64")
        for label in range(classes)
    )
    session.recorder.add(Group.of(infos), _Accuracies(counts), mode, probes=(counts,))


def restarts(examples: int, classes: int) -> bool:
    """Whether the counts restart after so many examples."""
    return examples >= max(_EXAMPLES, _EXAMPLES_PER_CLASS * classes)


@dataclass(frozen=True)
class _HostNumbers:
    counts: NDArray[np.int64]

    def numbers(self) -> Floats:
        return self.counts.astype(np.float64)


class _Labels(NamedTuple):
    step: int
    labels: NDArray[np.int64]


class _Predictions(NamedTuple):
    """Predicted classes. ``classes`` is the number of scores, or 0 if it is not known."""

    step: int
    predicted: NDArray[np.int64]
    classes: int


@dataclass
class _Matrix:
    """Counts by label and prediction."""

    counts: NDArray[np.int64]
    examples: int = 0

    def grow(self, classes: int) -> None:
        more = max(0, classes - len(self.counts))
        self.counts = np.pad(self.counts, (0, more))


class ArrayConfusion:
    """Counts pairs of labels and outputs or predictions in host memory that the program passes within one step and mode."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._enabled = tensors.CONFUSION in session.config.collections
        self._labels: dict[Mode, _Labels] = {}
        self._predictions: dict[Mode, _Predictions] = {}
        self._matrices: dict[Mode, _Matrix] = {}
        self._totals: dict[Mode, _Matrix] = {}

    def takes_part(self, name: str, mode: Mode) -> bool:
        """Whether a value of this name may be one half of a pair at this step."""
        if not self._enabled or name not in (tensors.LABELS, *PREDICTIONS):
            return False
        session = self._session
        return session.schedule.due((tensors.CONFUSION,), session.recorder.step, mode) is not None

    def give(self, name: str, array: NDArray[Any], mode: Mode) -> None:
        """Add an array that may be one half of a pair. Copies of classes are kept, because the program may reuse its memory."""
        session, step = self._session, self._session.recorder.step
        since = session.schedule.now()
        if name == tensors.LABELS:
            self._labels.pop(mode, None)
            if (labels := _labels(array)) is not None:
                self._labels[mode] = _Labels(step, labels)
        else:
            self._predictions.pop(mode, None)
            if (predictions := _predictions(array, step)) is not None:
                self._predictions[mode] = predictions
        pair = self._labels.get(mode), self._predictions.get(mode)
        if pair[0] is not None and pair[1] is not None and pair[0].step == pair[1].step == step:
            del self._labels[mode], self._predictions[mode]
            self._count(pair[0].labels, pair[1], mode)
        session.schedule.spent(tensors.CONFUSION, since)

    def _count(self, labels: NDArray[np.int64], predictions: _Predictions, mode: Mode) -> None:
        predicted, classes = predictions.predicted, predictions.classes
        if len(labels) != len(predicted):
            return
        classes = classes or max(2, int(max(labels.max(), predicted.max())) + 1)
        if classes > MAX_CLASSES:
            return
        matrix, total = (
            matrices.setdefault(mode, _Matrix(np.zeros((2, 2), np.int64)))
            for matrices in (self._matrices, self._totals)
        )
        for counted in (matrix, total):
            counted.grow(max(classes, len(total.counts)))
        classes = len(matrix.counts)
        comparable = (labels >= 0) & (labels < classes) & (predicted >= 0) & (predicted < classes)
        place = labels[comparable] * classes + predicted[comparable]
        counts = np.bincount(place, minlength=classes * classes).reshape(classes, classes)
        matrix.counts, total.counts = matrix.counts + counts, total.counts + counts
        matrix.examples += len(labels)
        record_confusion(
            self._session,
            ConfusionCounts(_HostNumbers(matrix.counts), _HostNumbers(total.counts)),
            classes,
            mode,
        )
        if restarts(matrix.examples, classes):
            del self._matrices[mode]


def _labels(array: NDArray[Any]) -> NDArray[np.int64] | None:
    """Return labels of integers, one for each example; None if these are not labels."""
    if array.dtype.kind not in "biu" or array.ndim == 0 or not array.size or array.size != array.shape[0]:
        return None
    return array.reshape(-1).astype(np.int64)


def _predictions(array: NDArray[Any], step: int) -> _Predictions | None:
    """Return predicted classes; None if these are neither scores nor classes."""
    if array.ndim == 2 and array.dtype.kind not in "biuc" and 2 <= array.shape[1] <= MAX_CLASSES:
        scores = array if array.dtype.kind == "f" else array.astype(np.float32)
        return _Predictions(step, scores.argmax(1).astype(np.int64), scores.shape[1]) if len(scores) else None
    if array.ndim == 1 and array.dtype.kind in "biu" and len(array):
        return _Predictions(step, array.astype(np.int64), 0)
    return None
