"""Tensors that a program records itself (labels, inputs, outputs), and class counts of labels and predictions.

Examples have one label each, 0 … C - 1. Negative labels, which losses ignore, and labels of at least C are not counted.
Predictions are scores of shape (examples, C), where the largest score is the prediction, or class indices as integers in host
memory. The counts accumulate over batches, and restart after 1,000 examples or 50 per class, whichever is more, so that they
describe the current model.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from watchstep.capture.record import Group, Probe
from watchstep.capture.session import Session
from watchstep.format import tensors
from watchstep.format.statistics import Floats, StatisticsBatch, merge_rows, scalars
from watchstep.format.tensors import MODES, Mode, TensorInfo
from watchstep.pytorch.kernel import TorchKernel
from watchstep.pytorch.names import dtype_name
from watchstep.pytorch.probes.activations import ChannelSums, ClassCounts
from watchstep.pytorch.probes.staging import OnTheWay
from watchstep.pytorch.probes.weights import Unchanged

MOST_CLASSES = 100
_EXAMPLES = 1000
_EXAMPLES_PER_CLASS = 50
PREDICTIONS = ("outputs", "predictions")


@dataclass(frozen=True)
class _Counts:
    """Probe with one value per class.

    Since the last restart: ``examples`` of the class; ``correct`` predictions of them; ``confused``, those predicted as
    ``confused_with``, the most frequent wrong prediction. Over all batches so far: ``all_examples`` of the class; ``all_correct``
    predictions of them; ``all_predicted``, the number of predictions of the class; ``all_mistaken``, those with the label
    ``all_mistaken_for``, the most frequent wrong label.
    """

    matrix: OnTheWay
    total: OnTheWay

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

    counts: _Counts
    nonfinite: bool | None = False

    def collect(self) -> StatisticsBatch:
        """Return one row per class."""
        figures = self.counts.collect()
        examples, correct = figures["examples"], figures["correct"]
        present = np.flatnonzero(examples)
        return merge_rows(scalars((correct[present] / examples[present]).tolist()), present, len(examples))


@dataclass
class _Matrix:
    """Counts by label and prediction, on a device."""

    counts: Tensor
    examples: int = 0


@dataclass
class _LastTensor:
    """Tensor that a program passed last, and its step. The tensor is not kept alive."""

    step: int
    tensor: weakref.ref[Tensor]


class ConfusionCounter:
    """Counts pairs of labels and outputs or predictions that the program passes within one step and mode."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._enabled = tensors.CONFUSION in session.config.collections
        self._last_tensors: dict[tuple[str, Mode], _LastTensor] = {}
        self._matrices: dict[Mode, _Matrix] = {}
        self._totals: dict[Mode, _Matrix] = {}

    def give(self, name: str, value: Tensor, mode: Mode) -> None:
        """Add a tensor that may be one half of a pair.

        Args:
            name: Name that the program passed.
            value: The program's tensor.
            mode: Mode of the row.
        """
        if not self._enabled or name not in (tensors.LABELS, *PREDICTIONS):
            return
        session, step = self._session, self._session.recorder.step
        role = tensors.LABELS if name == tensors.LABELS else tensors.OUTPUTS
        self._last_tensors[role, mode] = _LastTensor(step, weakref.ref(value))
        labels, outputs = (self._latest(kind, mode) for kind in (tensors.LABELS, tensors.OUTPUTS))
        if labels is None or outputs is None:
            return
        self._last_tensors.pop((tensors.LABELS, mode))
        self._last_tensors.pop((tensors.OUTPUTS, mode))
        charged = session.schedule.due((tensors.CONFUSION,), step, mode)
        if charged is not None:
            since = session.schedule.now()
            self._count(labels, outputs, mode)
            session.schedule.spent(charged, since)

    def _latest(self, role: str, mode: Mode) -> Tensor | None:
        last = self._last_tensors.get((role, mode))
        return last.tensor() if last is not None and last.step == self._session.recorder.step else None

    @torch.no_grad()
    def _count(self, labels: Tensor, outputs: Tensor, mode: Mode) -> None:
        classes = _classes(labels, outputs)
        if classes is None:
            return
        true = labels.detach().reshape(-1).to(outputs.device, non_blocking=True).long()
        predicted = outputs.detach()
        predicted = predicted.argmax(1) if predicted.dim() == 2 else predicted.long()
        matrix = _matrix(self._matrices, mode, classes, outputs.device)
        whole = _matrix(self._totals, mode, max(classes, len(matrix.counts)), outputs.device)
        if len(whole.counts) > len(matrix.counts):  # earlier batches had more classes
            matrix = _matrix(self._matrices, mode, len(whole.counts), outputs.device)
        classes = len(matrix.counts)
        comparable = (true >= 0) & (true < classes) & (predicted >= 0) & (predicted < classes)
        place = torch.where(comparable, true * classes + predicted, classes * classes)
        counted = torch.zeros(classes * classes + 1, dtype=torch.int64, device=outputs.device)
        counted.scatter_add_(0, place, torch.ones_like(place))
        matrix.counts = matrix.counts + counted[:-1].view(classes, classes)
        matrix.examples += len(true)
        whole.counts = whole.counts + counted[:-1].view(classes, classes)
        counts = _Counts(OnTheWay(matrix.counts), OnTheWay(whole.counts))
        infos = tuple(
            TensorInfo(f"confusion/{label}", (tensors.CONFUSION,), "confusion", dtype="float64")
            for label in range(classes)
        )
        self._session.recorder.add(Group.of(infos), _Accuracies(counts), mode, probes=(counts,))
        if matrix.examples >= max(_EXAMPLES, _EXAMPLES_PER_CLASS * classes):
            del self._matrices[mode]


def _matrix(matrices: dict[Mode, _Matrix], mode: Mode, classes: int, device: torch.device) -> _Matrix:
    """Return the matrix of a mode, for at least ``classes`` classes."""
    matrix = matrices.get(mode)
    if matrix is None or matrix.counts.device != device:
        matrix = matrices[mode] = _Matrix(torch.zeros(classes, classes, dtype=torch.int64, device=device))
    more = classes - len(matrix.counts)
    if more > 0:
        matrix.counts = torch.nn.functional.pad(matrix.counts, (0, more, 0, more))
    return matrix


def _classes(labels: Tensor, outputs: Tensor) -> int | None:
    """Return the number of classes; None if these are not labels and predictions of them."""
    if labels.is_floating_point() or labels.is_complex() or outputs.is_complex() or labels.dim() == 0:
        return None
    if (
        labels.numel() != labels.shape[0]
        or outputs.dim() == 0
        or len(outputs) != len(labels)
        or not len(labels)
    ):
        return None
    if outputs.dim() == 2 and outputs.is_floating_point():
        return outputs.shape[1] if 2 <= outputs.shape[1] <= MOST_CLASSES else None
    if outputs.dim() != 1 or outputs.is_floating_point() or outputs.device.type != "cpu":
        return None  # reading the number of classes from a device would require waiting
    if labels.device.type != "cpu":
        return None
    most = max(int(outputs.max()), int(labels.max())) + 1
    return max(2, most) if most <= MOST_CLASSES else None


_ROLES = {tensors.INPUTS: "input", tensors.OUTPUTS: "output", tensors.LABELS: "label"}


class GivenTensors:
    """Records the tensors that the program passes, into one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last_steps: dict[str, int] = {}
        self._confusion = ConfusionCounter(session)
        self._classes: dict[tuple[str, Mode], ClassCounts] = {}
        self._unchanged = Unchanged(session.config.probes)
        self._sums = ChannelSums(session.config.probes)

    def record(self, name: str, value: Any, collection: str | None, mode: Mode) -> None:
        """Record one tensor if its collection is due.

        Args:
            name: Name of the tensor.
            value: A tensor, or a value that numpy converts to an array.
            collection: Name of its collection; None derives it from the name.
            mode: Mode of the row.

        Raises:
            ValueError: The mode or the collection is unknown.
            TypeError: The name is not a string, or the value is not numeric.
        """
        session = self._session
        if mode not in MODES:
            raise ValueError(f"mode {mode!r}: use one of {', '.join(MODES)}")
        if not isinstance(name, str) or not name:
            raise TypeError("a name must be a string")
        collection_name = collection or (name if name in _ROLES else tensors.CUSTOM)
        if collection is not None and collection not in session.config.collections:
            raise ValueError(f"collection {collection!r}: name it in CaptureConfig.collections")
        if mode == "train":
            self._begin_if_repeated(name)
        if isinstance(value, Tensor):
            self._confusion.give(name, value, mode)
        charged = session.schedule.due((collection_name,), session.recorder.step, mode)
        if charged is None:
            return
        since = session.schedule.now()
        tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        if tensor.is_nested:
            tensor = tensor.values()  # ragged dimensions of a nested tensor have no size
        info = TensorInfo(
            name=name,
            collections=(collection_name,),
            role=_ROLES.get(name) or _ROLES.get(collection_name, "custom"),
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
        )
        probes = self._probes(info, tensor, mode)
        session.recorder.add(Group.of((info,)), TorchKernel().measure([tensor]), mode, probes)
        session.schedule.spent(charged, since)

    def _probes(self, info: TensorInfo, tensor: Tensor, mode: Mode) -> tuple[Probe, ...]:
        probes: list[Probe | None] = []
        if info.role == "label":
            probes.extend(self._count(tensor, info.name, mode))
        if info.role == "input" and self._sums.applies:
            probes.append(self._sums.look(tensor))
        if self._unchanged.applies and tensor.dtype is not torch.bool and not tensor.is_complex():
            probes.append(self._unchanged.look([(info.name, mode)], [tensor], 1))
        return tuple(probe for probe in probes if probe is not None)

    def _begin_if_repeated(self, name: str) -> None:
        """Begin the next step if a name is repeated after the update that ended its step: the next forward pass has not begun yet."""
        recorder = self._session.recorder
        if recorder.finished and self._last_steps.get(name) == recorder.step:
            recorder.begin()
        self._last_steps[name] = recorder.step

    def _count(self, labels: Tensor, name: str, mode: Mode) -> tuple[Probe, ...]:
        if "class_counts" not in self._session.config.probes:
            return ()
        counts = self._classes.setdefault((name, mode), ClassCounts()).look(labels)
        return () if counts is None else (counts,)
