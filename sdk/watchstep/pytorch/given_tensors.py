"""Tensors that a program records itself (labels, inputs, outputs), and class counts of labels and predictions.

The counts are of examples with one label each, 0 … C - 1; labels below zero, which losses ignore, and labels from C on do
not count. Predictions are scores of shape (examples, C), of which the largest counts, or, in host memory, classes as
integers. The counts cover all batches seen, and restart after 1,000 examples or 50 a class, so that they describe the
model as it is now.
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
_EXAMPLES_OF_EACH = 50
PREDICTIONS = ("outputs", "predictions")


@dataclass(frozen=True)
class _Counts:
    """The probe: one value for each class.

    ``examples`` of the class, ``correct`` of them, ``confused`` of them taken for the class ``confused_with``, the one that
    they are most often taken for. Over all batches so far ``all_examples`` of the class, ``all_correct`` of them, ``all_predicted``,
    how many were taken for the class, ``all_mistaken`` of these being of the class ``all_mistaken_for``, the most frequent other one.
    """

    matrix: OnTheWay
    since_the_start: OnTheWay

    def collect(self) -> dict[str, Floats]:
        """The columns. The matrices have a row for each label and a column for each prediction."""
        return {**self._of_late(), **self._of_all()}

    def _of_all(self) -> dict[str, Floats]:
        numbers = self.since_the_start.numbers()
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

    def _of_late(self) -> dict[str, Floats]:
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
class _Shares:
    """The measurement: of each class the share that was predicted right; of one without examples nothing."""

    counts: _Counts
    nonfinite: bool | None = False

    def collect(self) -> StatisticsBatch:
        """One row each."""
        figures = self.counts.collect()
        examples, correct = figures["examples"], figures["correct"]
        seen = np.flatnonzero(examples)
        return merge_rows(scalars((correct[seen] / examples[seen]).tolist()), seen, len(examples))


@dataclass
class _Matrix:
    """What has been counted: labels by predictions, on a device."""

    counts: Tensor
    examples: int = 0


@dataclass
class _Given:
    """What a program gave last: at which step, and which tensor; not kept alive for this."""

    step: int
    tensor: weakref.ref[Tensor]


class ConfusionCounter:
    """Counts what the program gives as labels, and as outputs or predictions, within one step and mode."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._wanted = tensors.CONFUSION in session.config.collections
        self._given: dict[tuple[str, Mode], _Given] = {}
        self._matrices: dict[Mode, _Matrix] = {}
        self._of_all: dict[Mode, _Matrix] = {}

    def give(self, name: str, value: Tensor, mode: Mode) -> None:
        """A tensor that may be one half of a pair.

        Args:
            name: as the program named it.
            value: the tensor as the program holds it.
            mode: of the row.
        """
        if not self._wanted or name not in (tensors.LABELS, *PREDICTIONS):
            return
        session, step = self._session, self._session.recorder.step
        role = tensors.LABELS if name == tensors.LABELS else tensors.OUTPUTS
        self._given[role, mode] = _Given(step, weakref.ref(value))
        labels, outputs = (self._taken(kind, mode) for kind in (tensors.LABELS, tensors.OUTPUTS))
        if labels is None or outputs is None:
            return
        self._given.pop((tensors.LABELS, mode))
        self._given.pop((tensors.OUTPUTS, mode))
        charged = session.schedule.due((tensors.CONFUSION,), step, mode)
        if charged is not None:
            since = session.schedule.now()
            self._count(labels, outputs, mode)
            session.schedule.spent(charged, since)

    def _taken(self, role: str, mode: Mode) -> Tensor | None:
        given = self._given.get((role, mode))
        return given.tensor() if given is not None and given.step == self._session.recorder.step else None

    @torch.no_grad()
    def _count(self, labels: Tensor, outputs: Tensor, mode: Mode) -> None:
        classes = _classes(labels, outputs)
        if classes is None:
            return
        given = labels.detach().reshape(-1).to(outputs.device, non_blocking=True).long()
        predicted = outputs.detach()
        predicted = predicted.argmax(1) if predicted.dim() == 2 else predicted.long()
        matrix = _matrix(self._matrices, mode, classes, outputs.device)
        whole = _matrix(self._of_all, mode, max(classes, len(matrix.counts)), outputs.device)
        if len(whole.counts) > len(matrix.counts):  # it has seen more classes before
            matrix = _matrix(self._matrices, mode, len(whole.counts), outputs.device)
        classes = len(matrix.counts)
        comparable = (given >= 0) & (given < classes) & (predicted >= 0) & (predicted < classes)
        place = torch.where(comparable, given * classes + predicted, classes * classes)
        counted = torch.zeros(classes * classes + 1, dtype=torch.int64, device=outputs.device)
        counted.scatter_add_(0, place, torch.ones_like(place))
        matrix.counts = matrix.counts + counted[:-1].view(classes, classes)
        matrix.examples += len(given)
        whole.counts = whole.counts + counted[:-1].view(classes, classes)
        counts = _Counts(OnTheWay(matrix.counts), OnTheWay(whole.counts))
        infos = tuple(
            TensorInfo(f"confusion/{label}", (tensors.CONFUSION,), "confusion", dtype="float64")
            for label in range(classes)
        )
        self._session.recorder.add(Group.of(infos), _Shares(counts), mode, probes=(counts,))
        if matrix.examples >= max(_EXAMPLES, _EXAMPLES_OF_EACH * classes):
            del self._matrices[mode]


def _matrix(matrices: dict[Mode, _Matrix], mode: Mode, classes: int, device: torch.device) -> _Matrix:
    """The one of a mode, for so many classes at least."""
    matrix = matrices.get(mode)
    if matrix is None or matrix.counts.device != device:
        matrix = matrices[mode] = _Matrix(torch.zeros(classes, classes, dtype=torch.int64, device=device))
    more = classes - len(matrix.counts)
    if more > 0:
        matrix.counts = torch.nn.functional.pad(matrix.counts, (0, more, 0, more))
    return matrix


def _classes(labels: Tensor, outputs: Tensor) -> int | None:
    """How many classes there are; None where these are no labels, or no predictions of them."""
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
        return None  # on a device the number of classes is not known without waiting
    if labels.device.type != "cpu":
        return None
    most = max(int(outputs.max()), int(labels.max())) + 1
    return max(2, most) if most <= MOST_CLASSES else None


_ROLES = {tensors.INPUTS: "input", tensors.OUTPUTS: "output", tensors.LABELS: "label"}


class GivenTensors:
    """Records what the program gives, into one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last_given: dict[str, int] = {}
        self._confusion = ConfusionCounter(session)
        self._classes: dict[tuple[str, Mode], ClassCounts] = {}
        self._unchanged = Unchanged(session.config.probes)
        self._sums = ChannelSums(session.config.probes)

    def record(self, name: str, value: Any, collection: str | None, mode: Mode) -> None:
        """Record one tensor, if its collection is due.

        Args:
            name: of the tensor.
            value: a tensor, or what numpy makes an array of.
            collection: where it is not told by the name.
            mode: of the row.

        Raises:
            ValueError: the mode or collection is not one.
            TypeError: the name or the value is not one.
        """
        session = self._session
        if mode not in MODES:
            raise ValueError(f"mode {mode!r}: use one of {', '.join(MODES)}")
        if not isinstance(name, str) or not name:
            raise TypeError("a name must be a string")
        name_of_collection = collection or (name if name in _ROLES else tensors.CUSTOM)
        if collection is not None and collection not in session.config.collections:
            raise ValueError(f"collection {collection!r}: name it in CaptureConfig.collections")
        if mode == "train":
            self._begin_if_given_before(name)
        if isinstance(value, Tensor):
            self._confusion.give(name, value, mode)
        charged = session.schedule.due((name_of_collection,), session.recorder.step, mode)
        if charged is None:
            return
        since = session.schedule.now()
        tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        if tensor.is_nested:
            tensor = tensor.values()  # the shape of a nested tensor has no numbers for its ragged dimensions
        info = TensorInfo(
            name=name,
            collections=(name_of_collection,),
            role=_ROLES.get(name) or _ROLES.get(name_of_collection, "custom"),
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
        )
        probes = self._probes(info, tensor, mode)
        session.recorder.add(Group.of((info,)), TorchKernel().measure([tensor]), mode, probes)
        session.schedule.spent(charged, since)

    def _probes(self, info: TensorInfo, tensor: Tensor, mode: Mode) -> tuple[Probe, ...]:
        chosen_probes: list[Probe | None] = []
        if info.role == "label":
            chosen_probes.extend(self._count(tensor, info.name, mode))
        if info.role == "input" and self._sums.applies:
            chosen_probes.append(self._sums.look(tensor))
        if self._unchanged.applies and tensor.dtype is not torch.bool and not tensor.is_complex():
            chosen_probes.append(self._unchanged.look([(info.name, mode)], [tensor], 1))
        return tuple(probe for probe in chosen_probes if probe is not None)

    def _begin_if_given_before(self, name: str) -> None:
        """What comes again after the update that ended its step is of the next, whose forward pass has not begun."""
        recorder = self._session.recorder
        if recorder.finished and self._last_given.get(name) == recorder.step:
            recorder.begin()
        self._last_given[name] = recorder.step

    def _count(self, labels: Tensor, name: str, mode: Mode) -> tuple[Probe, ...]:
        if "class_counts" not in self._session.config.probes:
            return ()
        counted = self._classes.setdefault((name, mode), ClassCounts()).look(labels)
        return () if counted is None else (counted,)
