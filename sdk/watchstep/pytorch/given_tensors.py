"""Tensors that the program gives by hand: labels, inputs, outputs, or whatever it wants to see."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from watchstep import tensors
from watchstep.capture.record import Group, Probe
from watchstep.capture.session import Session
from watchstep.pytorch.confusion import Confusion
from watchstep.pytorch.kernel import TorchKernel
from watchstep.pytorch.names import dtype_name
from watchstep.pytorch.probes.channel_sums import ChannelSums
from watchstep.pytorch.probes.class_counts import ClassCounts
from watchstep.pytorch.probes.since_earlier import Unchanged
from watchstep.tensors import MODES, Mode, TensorInfo

_ROLES = {tensors.INPUTS: "input", tensors.OUTPUTS: "output", tensors.LABELS: "label"}


class GivenTensors:
    """Records what the program gives, into one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last_given: dict[str, int] = {}
        self._confusion = Confusion(session)
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
        held = collection or (name if name in _ROLES else tensors.CUSTOM)
        if collection is not None and collection not in session.config.collections:
            raise ValueError(f"collection {collection!r}: name it in CaptureConfig.collections")
        if mode == "train":
            self._begin_if_given_before(name)
        if isinstance(value, Tensor):
            self._confusion.give(name, value, mode)
        charged = session.schedule.due((held,), session.recorder.step, mode)
        if charged is None:
            return
        since = session.schedule.now()
        tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        info = TensorInfo(
            name=name,
            collections=(held,),
            role=_ROLES.get(name) or _ROLES.get(held, "custom"),
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
        )
        probes = self._probes(info, tensor, mode)
        session.recorder.add(Group.of((info,)), TorchKernel().measure([tensor]), mode, probes)
        session.schedule.spent(charged, since)

    def _probes(self, info: TensorInfo, tensor: Tensor, mode: Mode) -> tuple[Probe, ...]:
        found: list[Probe | None] = []
        if info.role == "label":
            found.extend(self._count(tensor, info.name, mode))
        if info.role == "input" and self._sums.applies:
            found.append(self._sums.look(tensor))
        if self._unchanged.applies and tensor.dtype is not torch.bool and not tensor.is_complex():
            found.append(self._unchanged.look([(info.name, mode)], [tensor], 1))
        return tuple(probe for probe in found if probe is not None)

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
