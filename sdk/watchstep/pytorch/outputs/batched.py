"""Outputs of layers that are measured together, because a measurement of its own costs more than the elements of a small tensor.

Outputs wait until the forward pass of the model ends or they take `_MOST_BYTES`. A program may change an output in place meanwhile, as
rectifiers and residual connections do. So the first outputs of a layer are measured at once, and their checksums are compared when the others
are measured: a layer whose output changed is always measured at once. Later changes are known by PyTorch's counter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from watchstep.capture.steps.record import Group, Probe
from watchstep.capture.steps.session import Session
from watchstep.format.statistics import Floats
from watchstep.kernels.measurement import Kernel
from watchstep.pytorch.gate import version_of
from watchstep.pytorch.kernel import checksums
from watchstep.pytorch.probes.activations import ChannelProbe, count_channels

_MOST_BYTES = 1 << 20
_MOST_BYTES_OF_ONE = 1 << 18
"""Reading larger tensors takes longer than the call of the kernel, and is faster while they are in the caches."""

_PROOFS = 2
_MOST_GROUPS = 64


@dataclass(slots=True)
class Stability:
    """What is known about changes of a layer's outputs in place.

    Attributes:
        unchanged: Number of passes after which the outputs were unchanged, up to `_PROOFS`.
        is_changed: Whether an output was changed by a later operation.
    """

    unchanged: int = 0
    is_changed: bool = False


@dataclass(frozen=True, slots=True)
class LayerOutputs:
    """The outputs of one call of a layer.

    Attributes:
        stability: What is known about the layer.
        group: Descriptions of the outputs.
        outputs: The outputs.
        probes: Probes of the outputs that were measured already.
        channels: Probe of the only output's channels; None without one.
    """

    stability: Stability
    group: Group
    outputs: list[Tensor]
    probes: tuple[Probe, ...]
    channels: ChannelProbe | None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Outputs that wait.

    Attributes:
        versions: Numbers of changes of each.
        time_ns: When the layer returned them, in nanoseconds since the epoch: the order of the layers of a pass.
        checksums: Their checksums if they have been measured already; else None.
    """

    of: LayerOutputs
    versions: list[int]
    time_ns: int
    checksums: Tensor | None


class BatchedOutputs:
    """Collects outputs of one training pass, and measures them together."""

    def __init__(self, session: Session, kernel: Kernel) -> None:
        self._recorder = session.recorder
        self._schedule = session.schedule
        self._health = session.health
        self._kernel = kernel
        self._waiting: dict[int, _Waiting] = {}
        self._bytes = 0
        self._step = -1
        self._charged: dict[str, tuple[int, float]] = {}
        self._groups: dict[tuple[int, ...], tuple[Group, list[Group]]] = {}

    def add(self, of: LayerOutputs, charged: str, since: float) -> bool:
        """Measure outputs later. Returns whether they need not be measured now.

        Args:
            of: The outputs of a layer.
            charged: Collection that pays for the measurement.
            since: When the measurement began, by the clock of the schedule.
        """
        if of.stability.is_changed:
            return False
        size = 0
        for output in of.outputs:
            if type(output) is not Tensor or not output.is_cpu or not output.is_floating_point():
                return False
            if output.layout is not torch.strided or output.is_inference():  # whose changes are not counted
                return False
            size += output.numel() * output.element_size()
        if size > _MOST_BYTES_OF_ONE:
            return False
        key = id(of.group)
        if key in self._waiting or self._bytes + size > _MOST_BYTES or self._step != self._recorder.step:
            self.measure()
        self._step = self._recorder.step
        self._bytes += size
        is_proven = of.stability.unchanged >= _PROOFS
        versions = [version_of(output) for output in of.outputs]
        known = None if is_proven else checksums(of.outputs)
        self._waiting[key] = _Waiting(of, versions, time.time_ns(), known)
        if is_proven:
            number, seconds = self._charged.get(charged, (0, 0.0))
            self._charged[charged] = number + 1, seconds + self._schedule.now() - since
        return is_proven

    def measure(self) -> None:
        """Measure what waits. Called when a forward pass ends, and before anything that may end the step."""
        if not self._waiting:
            return
        since = self._schedule.now()
        waiting, self._waiting, self._bytes = list(self._waiting.values()), {}, 0
        charged, self._charged = self._charged, {}
        if self._step != self._recorder.step:  # the pass did not end, and its step did
            lost = [each.of.outputs for each in waiting if each.checksums is None]
            self._health.count("dropped_rows", sum(map(len, lost)))
            return
        unchanged = [each for each in waiting if self._is_unchanged(each)]
        proven = [each for each in unchanged if each.checksums is None]
        if proven:
            measured = [each.of for each in proven]
            outputs = [output for each in measured for output in each.outputs]
            group = self._group([each.group for each in measured])
            times = tuple(each.time_ns for each in proven for _ in each.of.outputs)
            statistics, probes = self._kernel.measure(outputs), self._probes(measured)
            self._recorder.add(group, statistics, probes=probes, time_ns=times)
        share = (self._schedule.now() - since) / max(1, sum(number for number, _ in charged.values()))
        for collection, (number, seconds) in charged.items():
            self._schedule.spent(collection, self._schedule.now() - seconds - share * number)

    def _is_unchanged(self, waiting: _Waiting) -> bool:
        stability, outputs = waiting.of.stability, waiting.of.outputs
        stability.is_changed = [version_of(output) for output in outputs] != waiting.versions
        if waiting.checksums is not None:
            stability.is_changed |= not torch.equal(checksums(outputs), waiting.checksums)
            stability.unchanged += 1
        elif stability.is_changed:
            self._health.count("changed_outputs", len(outputs))
        return not stability.is_changed

    def _probes(self, measured: list[LayerOutputs]) -> tuple[Probe, ...]:
        """Return the probes of all outputs, whose columns have a row for each."""
        row, with_channels = 0, []
        probes: list[tuple[list[int], Probe]] = []
        for each in measured:
            rows = list(range(row, row + len(each.outputs)))
            probes += [(rows, probe) for probe in each.probes]
            if each.channels is not None:
                with_channels.append((row, (each.channels, each.outputs[0])))
            row += len(each.outputs)
        for places, counts in count_channels([probed for _, probed in with_channels], self._step, "train"):
            probes.append(([with_channels[place][0] for place in places], counts))
        return (_Joined(row, probes),) if probes else ()

    def _group(self, groups: list[Group]) -> Group:
        """Return the group of several ones. Most passes of a program have the same."""
        key = tuple(map(id, groups))
        known = self._groups.get(key)
        if known is None:
            if len(self._groups) >= _MOST_GROUPS:
                self._groups.clear()
            infos = tuple(info for group in groups for info in group.tensors)
            places = tuple(place for group in groups for place in group.places)
            known = self._groups[key] = Group(infos, places), groups  # which keeps their ids valid
        return known[0]


@dataclass(frozen=True)
class _Joined:
    """Probes of parts of a record.

    Attributes:
        rows: Number of the record's rows.
        probes: The rows of each probe, and the probe.
    """

    rows: int
    probes: list[tuple[list[int], Probe]]

    def collect(self) -> dict[str, Floats]:
        """Return the columns, with NaN in the rows of other parts."""
        columns: dict[str, Floats] = {}
        for rows, probe in self.probes:
            for name, column in probe.collect().items():
                whole = columns.get(name)
                if whole is None:
                    whole = columns[name] = np.full(self.rows, np.nan)
                whole[rows] = column
        return columns
