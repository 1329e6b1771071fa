"""Updates that do not happen, gradients that nobody clears, and parameters that are in no optimizer.

Updates that do not happen: passes without a finite update, loops without an optimizer step, and which optimizer counts.

A pass whose loss or gradient norm is not finite, a step that a gradient scaler skips, and an update by a non-finite
gradient count as passes without a finite update; any other update resets the count, also one whose loss was NaN: the
gradient of a batch without labels is zero. A few such passes are how programs skip bad batches, many are a training that
stands still. If no optimizer steps at all, the step of the run does not end, and nothing else that is recorded shows it.

Whether gradients of before an optimizer's last step are still in those of the next: nobody cleared them.

Of each optimizer one parameter is looked at, when a backward pass begins and after the step. Its gradient was *kept* where
at the first pass after a step it is what that step left (the same tensor, not written to since), at no pass before the
next step is all zero or gone, and was added to by then. Micro-batches between two steps are no matter: before the
first of them a program that accumulates clears, too. `zero_grad` of either kind, a gradient set to None by hand, and one
that takes another tensor's place are all seen as cleared.

Parameters that get gradients and are in no optimizer: nothing will ever change them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from watchstep.capture.record import Group
from watchstep.capture.session import Session
from watchstep.format import tensors
from watchstep.format.statistics import Floats
from watchstep.kernels.measurement import Kernel
from watchstep.pytorch.losses import record_tensor
from watchstep.pytorch.names import NamedParameter
from watchstep.pytorch.parameters.parameters import Parameters
from watchstep.pytorch.probes.staging import OnTheWay, stacked, views

MISSING_METRIC = "updates:missing"
_HANDED_OVER = 50


class MissingUpdates:
    """Records, as ``updates:missing``, how many steps in a row had no finite update, and 0 at the first that has one again.

    A program that skips updates by itself stays within one step of the run. Its passes count as steps, and every fiftieth hands
    over what was recorded so far, for such a step may never end.
    """

    def __init__(self, session: Session, prefix: str) -> None:
        self._recorder = session.recorder
        self._wanted = session.config.gate and tensors.METRICS in session.config.chosen
        self._name = f"{prefix}.{MISSING_METRIC}" if prefix else MISSING_METRIC
        self._steps = 0
        self._passes = 0
        self._counted = False

    def pass_begins(self, *, logged_nan: bool) -> None:
        """A forward pass begins.

        Args:
            logged_nan: whether the program has logged a loss of the pass before it that is NaN.

        Raises:
            StopTraining: a guard asks for it.
        """
        if logged_nan:
            self.pass_is_bad()
        self._counted = False

    def backward_begins(self, *, finite: bool) -> None:
        """A loss is about to be differentiated: another pass, or another micro-batch of it.

        Raises:
            StopTraining: a guard asks for it.
        """
        self._counted = False
        if not finite:
            self.pass_is_bad()

    def pass_is_bad(self) -> None:
        """The loss or the gradient norm of the pass under way is not finite.

        Raises:
            StopTraining: a guard asks for it.
        """
        if self._counted:
            return
        self._counted = True
        self._passes += 1
        self._report()
        if self._wanted and self._passes % _HANDED_OVER == 0:
            self._recorder.hand_over_unfinished()

    def left_out(self) -> None:
        """A step is over whose update was left out, or was not finite."""
        self._steps, self._passes, self._counted = self._steps + 1, 0, False
        self._report()

    def updated(self) -> None:
        """A finite update was made."""
        if self._steps or self._passes:
            self._steps = self._passes = 0
            self._report()
        self._counted = False

    def _report(self) -> None:
        if self._wanted:
            self._recorder.scalar(self._name, float(self._steps + self._passes))


OVERDUE_METRIC = "updates:overdue"
_PASSES = 200
"""Backward passes within one step, at least. An accumulation of so many micro-batches does not begin in the middle of a run."""
_TIMES = 50
"""Also so many times the passes of any step before."""
_STEPS = 10
"""Steps before: a program that updates by other means than an optimizer has none."""
_SAMPLED = 64


class OverdueUpdates:
    """Records, as ``updates:overdue``, the backward passes of a step that should have ended, and 0 once an optimizer steps again.

    That needs, besides the passes, as many training losses that the program logs, half of them at least, and weights that are the
    same at both ends of the second half. A program that computes gradients for something else (the Fisher information, saliency,
    adversarial inputs) logs no training loss for each; one that updates weights by itself changes them. Weights are compared by
    their first elements, twice in such a step and never in another.
    """

    def __init__(self, session: Session, weights: Sequence[Tensor], prefix: str) -> None:
        self._recorder = session.recorder
        self._wanted = session.config.gate and tensors.METRICS in session.config.chosen
        self._name = f"{prefix}.{OVERDUE_METRIC}" if prefix else OVERDUE_METRIC
        self._weights = weights
        self._sample: list[Tensor] | None = None
        self._passes = 0
        self._most = 1
        self._steps = 0
        self._logged = 0
        self._recorded = False

    def backward_begins(self) -> None:
        """A training loss that is finite is about to be differentiated.

        Raises:
            StopTraining: a guard asks for it.
        """
        self._passes += 1
        if self._recorded and self._passes == 1:  # of the next step: the last one has its row
            self._recorded = False
            self._recorder.scalar(self._name, 0.0)
        if self._passes < _PASSES // 2 or self._steps < _STEPS or not self._wanted:
            return
        limit = max(_PASSES, _TIMES * self._most)
        if self._passes == limit // 2:
            self._sample, self._logged = _sample(self._weights), self._recorder.logged_losses
        elif self._passes == limit and self._sample is not None:
            logged = self._recorder.logged_losses - self._logged
            if 2 * logged >= limit // 2 and _is_same(self._sample, _sample(self._weights)):
                self._recorded = True
                self._recorder.scalar(self._name, float(limit))
                self._recorder.hand_over_unfinished()
            self._sample = None

    def step_ends(self) -> None:
        """An optimizer has stepped, of this model or another, or a gradient scaler has left it out."""
        self._most = max(self._most, self._passes)
        self._passes, self._steps, self._sample = 0, self._steps + 1, None


def _sample(weights: Sequence[Tensor]) -> list[Tensor] | None:
    """The first elements of each, copied; None where one is no plain tensor: a sharded one may need all ranks to be read."""
    learned = [weight.detach() for weight in weights if weight.requires_grad]
    if not all(map(_is_plain, learned)) or not any(weight.numel() for weight in learned):
        return None
    return [weight.view(-1)[:_SAMPLED].clone() for weight in learned]


def _is_plain(weight: Tensor) -> bool:
    return (
        type(weight) is Tensor
        and weight.layout is torch.strided
        and weight.device.type != "meta"
        and weight.is_contiguous()
    )


def _is_same(before: list[Tensor], after: list[Tensor] | None) -> bool:
    return after is not None and all(map(torch.equal, before, after))


_SHARED = 3
"""Updates in a row by another optimizer of the same parameters, after which that one counts."""

_OTHER = 200
"""The same where it updates other parameters: a critic is trained so many times between two steps of its generator."""


class CountingOptimizer:
    """The optimizer whose updates count: the one that was named, or the first; later the one that takes its place.

    Programs make a new optimizer when they unfreeze layers or go from warm-up to training, and let the old one go. It is
    not kept alive here.
    """

    def __init__(self, named: Optimizer | None) -> None:
        self._held = None if named is None else weakref.ref(named)
        self._parameters: frozenset[int] = frozenset()
        self._others = 0

    def counts(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's updates are steps of the run."""
        return self._held is not None and self._held() is optimizer

    @property
    def is_gone(self) -> bool:
        """Whether there was one, and the program has let it go."""
        return self._held is not None and self._held() is None

    def updates(self, optimizer: Optimizer, parameters: Collection[int]) -> None:
        """An optimizer is about to update.

        Args:
            optimizer: has watched parameters.
            parameters: the ids of all that it updates.
        """
        if self.counts(optimizer):
            self._others = 0
            if len(parameters) != len(self._parameters):
                self._parameters = frozenset(parameters)
        elif self._held is None or self._held() is None:
            self._take(optimizer, parameters)
        else:
            self._others += 1
            shared = self._others == _SHARED and not self._parameters.isdisjoint(parameters)
            if shared or self._others >= _OTHER:
                self._take(optimizer, parameters)

    def _take(self, optimizer: Optimizer, parameters: Collection[int]) -> None:
        self._held, self._parameters, self._others = weakref.ref(optimizer), frozenset(parameters), 0


METRIC = "gradients:stale"
_AT_EACH_STEP = (
    100  # steps that began with cleared gradients, after which a program is looked at now and then
)
_NOW_AND_THEN = 4


@dataclass
class _Looked:
    """One optimizer's parameter.

    Attributes:
        name: of its metric.
        parameter: whose gradient is looked at; None where there is none to look at. No weak reference: `torch.utils.swap_tensors`, by
            which modules of sharded parameters change their dtype, refuses tensors that have one.
        version: of the gradient, as the last step left it; None where the time until the next is left out.
        kept: what the passes since then say; None before the first.
        cleared: how many steps did not find it kept.
        told: whether the last step said something that a later one has to take back.
    """

    name: str
    parameter: Tensor | None = None
    version: int | None = None
    kept: bool | Tensor | None = None
    cleared: int = 0
    told: bool = False

    def gradient(self) -> Tensor | None:
        """As it is now."""
        return None if self.parameter is None else self.parameter.grad


class StaleGradients:
    """Records 1 as ``gradients:stale`` at each step whose gradients hold those of before the last, and 0 when that ends.

    Of a program's second optimizer it is ``gradients:stale_2``. On a device nothing waits: a number that is not known yet
    is recorded as it will be.
    """

    def __init__(self, session: Session, prefix: str) -> None:
        self._recorder = session.recorder
        self._prefix = f"{prefix}." if prefix else ""
        self._wanted = (
            "stale_gradients" in session.config.probes and tensors.METRICS in session.config.collections
        )
        self._looked: MutableMapping[Optimizer, _Looked] = WeakIdKeyDictionary()

    def backward_begins(self) -> None:
        """A backward pass is about to add to gradients."""
        for looked in list(self._looked.values()):  # a copy: another training's thread may add to it
            if looked.version is None or looked.kept is False:
                continue
            gradient = looked.gradient()
            if gradient is None or (looked.kept is None and gradient._version != looked.version):  # noqa: SLF001 - has no public name
                looked.kept = False
                continue
            some = _some(gradient)
            if gradient.device.type == "cpu":
                looked.kept = bool(some)
            else:
                looked.kept = some if looked.kept is None else some & looked.kept

    def after_step(self, optimizer: Optimizer, parameters: Callable[[], list[NamedParameter]]) -> None:
        """An optimizer has stepped: say what was seen since its last step, and look anew.

        Args:
            optimizer: the optimizer.
            parameters: gives the watched ones that it updates, in its order; called where none is looked at yet.
        """
        if not self._wanted:
            return
        looked = self._looked.get(optimizer)
        if looked is None:
            if not parameters():
                return
            number = len(self._looked) + 1
            name = f"{self._prefix}{METRIC}" + (f"_{number}" if number > 1 else "")
            looked = self._looked[optimizer] = _Looked(name)
        gradient = looked.gradient()
        if looked.version is not None and looked.kept is not None:
            self._report(looked, gradient)
        if gradient is None:
            looked.parameter, gradient = _last(parameters())
        rests = looked.cleared > _AT_EACH_STEP and looked.cleared % _NOW_AND_THEN != 0
        looked.cleared += rests
        looked.version = None if gradient is None or rests else gradient._version  # noqa: SLF001 - as above
        looked.kept = None

    def _report(self, looked: _Looked, gradient: Tensor | None) -> None:
        added = gradient is not None and looked.version is not None and gradient._version > looked.version  # noqa: SLF001 - as above
        stale = looked.kept if added else False
        if isinstance(stale, Tensor):
            record_tensor(self._recorder, looked.name, stale.float(), "train")
        elif stale or looked.told:
            self._recorder.scalar(looked.name, float(bool(stale)))
        looked.told = stale is not False
        looked.cleared = (
            0 if stale is True else looked.cleared + 1
        )  # what is not known yet is cleared, most likely


@torch.no_grad()
def _some(gradient: Tensor) -> Tensor:
    """Whether some of its elements are not zero, of a few that are evenly spaced."""
    return views([gradient], _SAMPLED)[0].any()


def _last(parameters: Iterable[NamedParameter]) -> tuple[Tensor | None, Tensor | None]:
    """The last parameter that has a dense gradient: closest to the loss, so that its gradient is hardly ever zero."""
    for named in reversed(list(parameters)):
        gradient = named.parameter.grad
        if gradient is not None and gradient.layout is torch.strided and gradient.numel():
            return named.parameter, gradient
    return None, None


_ELEMENTS = 256
_MOST_SEARCHES = 8
_SEARCHED_AGAIN = 2
"""Records after a search, at which those are searched for that the program has made since."""

_WEIGHTED = ("Linear", "Bilinear", "Conv", "LSTM", "GRU", "RNN")
"""Classes whose modules multiply their input by weights begin so, themselves or a base."""


@dataclass(frozen=True)
class _NotInOptimizerColumns:
    """Columns of parameters in no optimizer.

    ``changed``: 1 where the parameter changed since its first record. ``was_optimized``: 1 where it was in an optimizer before.
    ``optimized_share``: of the elements that require a gradient, the share in optimizers. ``after_optimized``: 1 where its layer comes after a
    weighted layer that is in an optimizer. ``weight_optimized``: 1 for a vector of a module whose weight matrix is in an optimizer.
    """

    flags: OnTheWay
    columns: dict[str, Floats]

    def collect(self) -> dict[str, Floats]:
        return {"changed": self.flags.numbers(), **self.columns}


class _Coverage(NamedTuple):
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
    def of(cls, ids: frozenset[int], named: Iterable[NamedParameter]) -> _Coverage:
        """Of a model, by the ids of all that is held."""
        elements, learning, first, modules = 0, 0, np.inf, set()
        for member in named:
            if not member.parameter.requires_grad:
                continue
            elements += member.parameter.numel()
            if id(member.parameter) in ids:
                learning += member.parameter.numel()
                if member.parameter.dim() > 1:
                    modules.add(member.weight.module)
                    first = min(first, member.weight.order) if _is_weighted(member) else first
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
        self._in_optimizers: frozenset[int] = frozenset()
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
        optimized = self._held()
        members = [
            named
            for named in self._parameters.named
            if id(named.parameter) not in optimized
            and named.not_in_optimizer.collections == collections
            and named.standing.records
            and named.parameter.requires_grad
            and named.parameter.grad is not None
        ]
        if members and self._search(members):
            optimized = self._held()
            members = [named for named in members if id(named.parameter) not in optimized]
        return members

    def _held(self) -> frozenset[int]:
        """Ids of what optimizers hold: those that have stepped, and those that were found."""
        others = {
            id(p)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        optimized = self._parameters.optimized().union(others)
        watched = {id(named.parameter) for named in self._parameters.named}
        if not self._ever.keys() <= watched:
            self._ever = {key: tensor for key, tensor in self._ever.items() if key in watched}
        if optimized != self._in_optimizers:
            self._in_optimizers = optimized
            self._ever.update(
                {
                    id(named.parameter): named.parameter
                    for named in self._parameters.named
                    if id(named.parameter) in optimized
                }
            )
        return optimized

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
        self._schedule.report_extra(since)
        return True

    def _record(self, members: list[NamedParameter]) -> None:
        gradients = [named.parameter.grad for named in members if named.parameter.grad is not None]
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
        flags_and_columns = _NotInOptimizerColumns(OnTheWay(stacked(flags)), self._columns(members))
        self._recorder.add(group, self._kernel.measure(gradients), probes=(flags_and_columns,))

    def _columns(self, members: list[NamedParameter]) -> dict[str, Floats]:
        coverage = _Coverage.of(self._in_optimizers, self._parameters.named)

        def column(flags: Iterable[bool]) -> Floats:
            return np.array([float(flag) for flag in flags])

        return {
            "was_optimized": column(id(named.parameter) in self._ever for named in members),
            "optimized_share": np.full(len(members), coverage.share),
            "after_optimized": column(named.weight.order > coverage.first for named in members),
            "weight_optimized": column(
                named.parameter.dim() == 1 and named.weight.module in coverage.modules for named in members
            ),
        }
