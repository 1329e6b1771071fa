"""Parameters that get gradients and that no optimizer holds: nothing will ever change them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from watchstep.capture.record import Group
from watchstep.capture.session import Session
from watchstep.kernels.interface import Kernel
from watchstep.pytorch.names import NamedParameter
from watchstep.pytorch.parameters import Parameters
from watchstep.pytorch.probes.on_the_way import OnTheWay
from watchstep.pytorch.probes.samples import views
from watchstep.statistics import Floats

_ELEMENTS = 256


@dataclass(frozen=True)
class _Changed:
    """The column ``changed``: 1 where the parameter is another than when it was first looked at."""

    flags: OnTheWay

    def collect(self) -> dict[str, Floats]:
        return {"changed": self.flags.numbers()}


class UnheldParameters:
    """Measures their gradients, as ``fc.weight:unheld``, where that collection is due.

    Optimizers are known from their first step on: parameters of one that steps seldom are unheld until then.
    """

    def __init__(self, session: Session, parameters: Parameters, kernel: Kernel) -> None:
        self._recorder = session.recorder
        self._schedule = session.schedule
        self._parameters = parameters
        self._kernel = kernel
        self._first: dict[int, Tensor] = {}
        self._measured = -1
        self._wanted = {named.unheld.collections for named in parameters.named} - {()}

    def measure(self, step: int) -> None:
        """Record what is due, once a step.

        Args:
            step: of the run, of which gradients are there.
        """
        if step == self._measured:
            return
        self._measured = step
        for collections in self._wanted:
            charged = self._schedule.due(collections, step)
            members = [] if charged is None else self._unheld(collections)
            if charged is not None and members:
                since = self._schedule.now()
                self._record(members)
                self._schedule.spent(charged, since)

    def _unheld(self, collections: tuple[str, ...]) -> list[NamedParameter]:
        held = self._parameters.held()
        return [
            named
            for named in self._parameters.named
            if id(named.parameter) not in held
            and named.unheld.collections == collections
            and named.standing.records
            and named.parameter.requires_grad
            and named.parameter.grad is not None
        ]

    def _record(self, members: list[NamedParameter]) -> None:
        found = [named.parameter.grad for named in members if named.parameter.grad is not None]
        flags = []
        now = views([named.parameter for named in members], _ELEMENTS)
        for named, sample in zip(members, now, strict=True):
            first = self._first.get(id(named.parameter))
            if first is None or first.shape != sample.shape:
                first = self._first[id(named.parameter)] = sample.clone()
            flags.append((sample != first).any())
        group = Group(
            tuple(named.unheld for named in members), tuple(named.standing.gradient for named in members)
        )
        changed = _Changed(OnTheWay(torch.stack([flag.to(flags[0].device) for flag in flags])))
        self._recorder.add(group, self._kernel.measure(found), probes=(changed,))
