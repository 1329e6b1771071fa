"""Parameters that get gradients and are in no optimizer: nothing will ever change them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from watchstep.capture.record import Group
from watchstep.capture.session import Session
from watchstep.format.statistics import Floats
from watchstep.kernels.measurement import Kernel
from watchstep.pytorch.names import NamedParameter
from watchstep.pytorch.parameters.parameters import Parameters
from watchstep.pytorch.probes.staging import OnTheWay, stacked, views

_ELEMENTS = 256
_MOST_SEARCHES = 8
_SEARCHED_AGAIN = 2
"""Records after a search, at which those are searched for that the program has made since."""

_WEIGHTED = ("Linear", "Bilinear", "Conv", "LSTM", "GRU", "RNN")
"""Classes whose modules multiply their input by weights begin so, themselves or a base."""


@dataclass(frozen=True)
class _Beside:
    """Columns of parameters in no optimizer.

    ``changed``: 1 where the parameter changed since its first record. ``was_optimized``: 1 where it was in an optimizer before.
    ``optimized_share``: of the elements that require a gradient, the share in optimizers. ``after_optimized``: 1 where its layer comes after a
    weighted layer that is in an optimizer. ``weight_optimized``: 1 for a vector of a module whose weight matrix is in an optimizer.
    """

    flags: OnTheWay
    columns: dict[str, Floats]

    def collect(self) -> dict[str, Floats]:
        return {"changed": self.flags.numbers(), **self.columns}


class _Held(NamedTuple):
    """What optimizers hold of a model.

    Attributes:
        ids: of the parameters.
        share: of the elements that require a gradient.
        first: order of the first weighted layer among them; infinite where there is none.
        modules: those of which a matrix is held.
    """

    ids: frozenset[int]
    share: float
    first: float
    modules: frozenset[str]

    @classmethod
    def of(cls, ids: frozenset[int], named: Iterable[NamedParameter]) -> _Held:
        """Of a model, by the ids of all that is held."""
        elements, learning, first, modules = 0, 0, np.inf, set()
        for one in named:
            if not one.parameter.requires_grad:
                continue
            elements += one.parameter.numel()
            if id(one.parameter) in ids:
                learning += one.parameter.numel()
                if one.parameter.dim() > 1:
                    modules.add(one.weight.module)
                    first = min(first, one.weight.order) if _is_weighted(one) else first
        return cls(ids, learning / max(1, elements), first, frozenset(modules))


def _is_weighted(named: NamedParameter) -> bool:
    return any(kind.startswith(_WEIGHTED) for kind in (named.weight.module_type, *named.bases))


class ParametersNotInOptimizer:
    """Measures their gradients, as ``fc.weight:not_in_optimizer``, where that collection is due.

    An optimizer is known from its first step on. Where a parameter seems to be held by none, all optimizers of the process are looked for, so
    that one that steps seldom, or has not stepped yet, is known as well; that is done eight times at most.
    """

    def __init__(self, session: Session, parameters: Parameters, kernel: Kernel) -> None:
        self._recorder = session.recorder
        self._schedule = session.schedule
        self._parameters = parameters
        self._kernel = kernel
        self._first: dict[int, Tensor] = {}
        self._measured = -1
        self._wanted = {named.not_in_optimizer.collections for named in parameters.named} - {()}
        self._ever: dict[
            int, Tensor
        ] = {}  # no weak references: `torch.utils.swap_tensors` refuses tensors that have one
        self._known: frozenset[int] = frozenset()
        self._optimizers: MutableMapping[Optimizer, bool] = WeakIdKeyDictionary()
        self._searched_for: set[int] = set()
        self._searches = 0
        self._since_search = 0

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
            members = [] if charged is None else self._not_in_optimizer(collections)
            if charged is not None and members:
                since = self._schedule.now()
                self._record(members)
                self._schedule.spent(charged, since)

    def _not_in_optimizer(self, collections: tuple[str, ...]) -> list[NamedParameter]:
        held = self._held()
        members = [
            named
            for named in self._parameters.named
            if id(named.parameter) not in held
            and named.not_in_optimizer.collections == collections
            and named.standing.records
            and named.parameter.requires_grad
            and named.parameter.grad is not None
        ]
        if members and self._search(members):
            held = self._held()
            members = [named for named in members if id(named.parameter) not in held]
        return members

    def _held(self) -> frozenset[int]:
        """Ids of what optimizers hold: those that have stepped, and those that were found."""
        others = {
            id(p)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        held = self._parameters.held().union(others)
        watched = {id(named.parameter) for named in self._parameters.named}
        if not self._ever.keys() <= watched:
            self._ever = {key: tensor for key, tensor in self._ever.items() if key in watched}
        if held != self._known:
            self._known = held
            self._ever.update(
                {
                    id(named.parameter): named.parameter
                    for named in self._parameters.named
                    if id(named.parameter) in held
                }
            )
        return held

    def _search(self, members: list[NamedParameter]) -> bool:
        """Look for optimizers, where these have not been looked for; whether some may have been found."""
        ids = {id(named.parameter) for named in members}
        self._since_search += 1
        if (
            ids <= self._searched_for and self._since_search != _SEARCHED_AGAIN
        ) or self._searches >= _MOST_SEARCHES:
            return False
        if not ids <= self._searched_for:
            self._since_search = 0
        self._searches += 1
        self._searched_for |= ids
        since = self._schedule.now()
        for candidate in gc.get_objects():
            if issubclass(type(candidate), Optimizer) and hasattr(candidate, "param_groups"):
                self._optimizers[candidate] = True
        self._schedule.asked(since)
        return True

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
            tuple(named.not_in_optimizer for named in members),
            tuple(named.standing.gradient for named in members),
        )
        beside = _Beside(OnTheWay(stacked(flags)), self._columns(members))
        self._recorder.add(group, self._kernel.measure(found), probes=(beside,))

    def _columns(self, members: list[NamedParameter]) -> dict[str, Floats]:
        held = _Held.of(self._known, self._parameters.named)

        def column(flags: Iterable[bool]) -> Floats:
            return np.array([float(flag) for flag in flags])

        return {
            "was_optimized": column(id(named.parameter) in self._ever for named in members),
            "optimized_share": np.full(len(members), held.share),
            "after_optimized": column(named.weight.order > held.first for named in members),
            "weight_optimized": column(
                named.parameter.dim() == 1 and named.weight.module in held.modules for named in members
            ),
        }
