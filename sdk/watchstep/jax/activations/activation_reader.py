"""Reading of activations: rows that modules have written in device memory become rows of the step of their update."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from watchstep.capture.config import placed
from watchstep.capture.steps.record import Group
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.format.statistics import Floats, StatisticsBatch
from watchstep.format.tensors import TensorInfo
from watchstep.jax.activations.activation_ring import (
    ActivationSnapshot,
    OutputRows,
    WrittenRow,
    activation_ring,
)
from watchstep.jax.ring.row_cadence import RowCadence
from watchstep.kernels.measurement import Completed

_MAX_PENDING = 8


@dataclass(frozen=True)
class _ChannelCounts:
    """Probes of a group: the numbers of channels, dead ones and saturated ones."""

    columns: dict[str, Floats]

    def collect(self) -> dict[str, Floats]:
        return self.columns


class ActivationReader:
    """Records the activations of one recording. Used on the training thread.

    The rows of a call without updates inside of scans are those of its last update. Within scans, updates are numbered in device memory.
    """

    def __init__(self, session: Session) -> None:
        """Start without rows.

        Args:
            session: the recording.
        """
        self._session = session
        self._cadence = RowCadence.of(session, tensors.ACTIVATIONS)
        activation_ring.slots = self._cadence.slots
        self._steps = 0
        self._infos: dict[str, TensorInfo] = {}
        self._call: ActivationSnapshot | None = None
        self._snapshots: deque[ActivationSnapshot] = deque(maxlen=_MAX_PENDING)
        activation_ring.clear()
        self._generation = activation_ring.generation
        self._offset = 0
        self._read = 0
        self._next = 0
        self._expected_step = 0
        self._rows: dict[int, list[WrittenRow]] = {}

    def about_to_dispatch(self, step: int, *, has_inner_updates: bool) -> None:
        """Choose whether a call writes rows.

        Args:
            step: the step of its update.
            has_inner_updates: whether it makes updates inside of scans.
        """
        if not activation_ring.is_traced:
            return
        every = self._cadence.after(self._steps)
        if not self._session.schedule.records(tensors.ACTIVATIONS, "train"):
            every = 0
        if has_inner_updates:
            activation_ring.set_cadence(every)
        elif not self._cadence.is_fixed:
            activation_ring.set_cadence(int(every > 0 and self._steps % every == 0))
        else:
            is_due = self._session.schedule.due((tensors.ACTIVATIONS,), step) is not None
            activation_ring.set_cadence(int(is_due))

    def dispatched(self, *, has_inner_updates: bool) -> ActivationSnapshot | None:
        """Start to copy what a call has written. Returns the copy if it makes one update, or several one after the other."""
        snapshot = activation_ring.snapshot() if activation_ring.is_writing else None
        if snapshot is not None and has_inner_updates:
            self._snapshots.append(snapshot)
            return None
        return snapshot

    def of_call(self, snapshot: ActivationSnapshot | None) -> None:
        """Choose the rows of the next update that is recorded: those that its call has written."""
        self._call = snapshot

    def record_call(self, step: int) -> None:  # noqa: ARG002 - the recorder's step
        """Record the rows of the call of an update that is being recorded."""
        self._steps += 1
        snapshot, self._call = self._call, None
        if snapshot is None:
            return
        calls, _, written = snapshot.read()
        self._record([row for row in written if row.call == calls - 1])

    def begin_ring(self, step: int) -> None:
        """Begin to record updates inside of scans.

        Args:
            step: the step of the first one.
        """
        self._expected_step = step

    def record_inner(self, step: int) -> None:
        """Record the rows of an update inside of a scan that is being recorded."""
        number = self._next + max(0, step - self._expected_step)  # others were overwritten in device memory
        self._next, self._expected_step = number + 1, step + 1
        self._steps = self._next
        while self._snapshots and self._read <= number:
            self._load(self._snapshots.popleft(), number)
        self._record(self._rows.get(number, []))
        for earlier in [other for other in self._rows if other <= number]:
            del self._rows[earlier]

    def _load(self, snapshot: ActivationSnapshot, number: int) -> None:
        """Read the rows of the updates of a call."""
        _, inner, written = snapshot.read()
        if (
            snapshot.generation != self._generation
        ):  # memory of a failed dispatch was replaced, and counts from 0
            self._generation = snapshot.generation
            self._read = self._offset = number
        for row in written:
            place = row.inner + self._offset
            if self._read <= place < inner + self._offset:
                self._rows.setdefault(place, []).append(row)
        self._read = inner + self._offset

    def _record(self, written: list[WrittenRow]) -> None:
        """Record rows of one update, those that are in a collection."""
        rows = {row.rows.output.name: row for row in written}  # of one name with two shapes, the last traced
        described = [(self._info(row.rows), row) for row in rows.values()]
        chosen = [(info, row) for info, row in described if info.collections]
        if not chosen or self._session.mode != "train":
            return
        schedule, since = self._session.schedule, self._session.schedule.now()
        batch = StatisticsBatch.concatenate([row.rows.statistics(row.words) for _, row in chosen])
        probes: tuple[_ChannelCounts, ...] = ()
        if "channels" in self._session.config.probes:
            counts = np.array([row.rows.channels(row.words) for _, row in chosen], np.float64).T
            names = ("channels", "dead_channels", "saturated_channels")
            probes = (_ChannelCounts(dict(zip(names, counts, strict=True))),)
        group = Group.of(tuple(info for info, _ in chosen))
        self._session.recorder.add(group, Completed(batch), probes=probes)
        schedule.spent(tensors.ACTIVATIONS, since)

    def _info(self, rows: OutputRows) -> TensorInfo:
        output = rows.output
        info = self._infos.get(output.name)
        if info is None:
            info = TensorInfo(
                name=output.name,
                collections=(),
                role="output",
                module=output.module,
                module_type=output.module_type,
                order=output.order,
                shape=rows.shape,
                dtype=rows.dtype,
            )
            info = placed(info, (tensors.ACTIVATIONS,), self._session.config.chosen, output.bases)
            self._session.used_collections.update(info.collections)
            self._infos[output.name] = info
        return info

    def close(self) -> None:
        """Let programs write no more rows."""
        activation_ring.set_cadence(0)
