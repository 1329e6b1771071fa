"""PyTorch tensors that a program records itself, on their device, and class counts of labels and predictions.

`watchstep.capture.given.confusion` defines which labels and predictions are counted.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from watchstep.capture.given.confusion import (
    MAX_CLASSES,
    PREDICTIONS,
    ConfusionCounts,
    record_confusion,
    restarts,
)
from watchstep.capture.given.gate import GivenGate
from watchstep.capture.given.names import Given, GivenNames
from watchstep.capture.steps.own_work import own_work
from watchstep.capture.steps.record import Probe
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.format.tensors import Mode, TensorInfo
from watchstep.kernels.native_kernel import MemoryRange
from watchstep.pytorch.kernel import TorchKernel, native_memory
from watchstep.pytorch.names import dtype_name
from watchstep.pytorch.probes.activations import ChannelSums, ClassCounts
from watchstep.pytorch.probes.staging import HostCopy
from watchstep.pytorch.probes.weights import Unchanged
from watchstep.pytorch.tensors import full_tensors


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
        counts = ConfusionCounts(HostCopy(matrix.counts), HostCopy(whole.counts))
        record_confusion(self._session, counts, classes, mode)
        if restarts(matrix.examples, classes):
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
        return outputs.shape[1] if 2 <= outputs.shape[1] <= MAX_CLASSES else None
    if outputs.dim() != 1 or outputs.is_floating_point() or outputs.device.type != "cpu":
        return None  # reading the number of classes from a device would require waiting
    if labels.device.type != "cpu":
        return None
    most = max(int(outputs.max()), int(labels.max())) + 1
    return max(2, most) if most <= MAX_CLASSES else None


class GivenTensors:
    """Records the tensors that the program passes, into one session."""

    def __init__(self, session: Session, names: GivenNames) -> None:
        self._session = session
        self._names = names
        self._confusion = ConfusionCounter(session)
        self._classes: dict[tuple[str, Mode], ClassCounts] = {}
        self._unchanged = Unchanged(session.config.probes)
        self._sums = ChannelSums(session.config.probes)
        self._gate = GivenGate(session)

    def record(self, given: Given, value: Tensor) -> None:
        """Record one tensor if its collection is due.

        Args:
            given: Its checked arguments.
            value: The program's tensor.
        """
        own_work.depth += 1
        try:
            self._record(given, value)
        finally:
            own_work.depth -= 1

    def _record(self, given: Given, value: Tensor) -> None:
        session, mode = self._session, given.mode
        self._confusion.give(given.name, value, mode)
        due = self._names.due(given)
        if due.measured is None:
            due = due._replace(measured=self._gate.onset(given, lambda: _host_memory(value)))
        if due.measured is None and due.saved is None:
            return
        since = session.schedule.now()
        tensor = value.detach()
        if tensor.is_nested:
            tensor = tensor.values()  # ragged dimensions of a nested tensor have no size
        group = self._names.group(given, tuple(tensor.shape), dtype_name(tensor.dtype))
        (info,) = group.tensors
        if due.saved is not None:
            full_tensors.save_one(session.full_tensors, due.saved, session.recorder.step, mode, info, tensor)
            session.schedule.report_extra(since)
            since = session.schedule.now()
        if due.measured is not None:
            probes = self._probes(info, tensor, mode)
            session.recorder.add(group, TorchKernel().measure([tensor]), mode, probes)
            session.schedule.spent(due.measured, since)

    def _probes(self, info: TensorInfo, tensor: Tensor, mode: Mode) -> tuple[Probe, ...]:
        probes: list[Probe | None] = []
        if info.role == "label":
            probes.extend(self._count(tensor, info.name, mode))
        if info.role == "input" and self._sums.applies:
            probes.append(self._sums.measure(tensor))
        if self._unchanged.applies and tensor.dtype is not torch.bool and not tensor.is_complex():
            probes.append(self._unchanged.measure([(info.name, mode)], [tensor], 1))
        return tuple(probe for probe in probes if probe is not None)

    def _count(self, labels: Tensor, name: str, mode: Mode) -> tuple[Probe, ...]:
        if "class_counts" not in self._session.config.probes:
            return ()
        counts = self._classes.setdefault((name, mode), ClassCounts()).measure(labels)
        return () if counts is None else (counts,)


def _host_memory(value: Tensor) -> list[MemoryRange] | None:
    """Return the memory of a dense floating-point tensor on the host; None for any other tensor."""
    return native_memory([value]) if value.is_cpu and value.is_floating_point() and value.numel() else None
