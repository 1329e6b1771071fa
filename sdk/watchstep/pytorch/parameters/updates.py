"""Missing updates, stale gradients, and parameters that are in no optimizer.

Missing updates. A pass with a non-finite loss or gradient norm, a step that a gradient scaler skips, and an update by a
non-finite gradient count as passes without a finite update. Any other update resets the count, also after a NaN loss: the gradient
of a batch without labels is zero. A program may skip a few bad batches in this way; many such passes mean that training makes no
progress. If no optimizer steps at all, the step of the run does not end, and no other recorded value shows it.

Stale gradients. The gradients of an optimizer's step still contain those of its previous step, because they were not cleared.
One parameter of each optimizer is checked when a backward pass begins and after the step. Its gradient is stale if it is
unchanged since the previous step at the first backward pass (the same tensor, not written to), is neither zero nor None at any
later pass before the next step, and has been added to by then. Micro-batches between two steps do not matter: a program that
accumulates gradients clears them before the first one. Either kind of `zero_grad`, a gradient set to None by the program, and a
gradient that is replaced by another tensor count as cleared.

Parameters with gradients in no optimizer. They are never updated.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from watchstep.capture.steps.record import Group
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.format.statistics import Floats
from watchstep.kernels.measurement import Kernel
from watchstep.pytorch import internals
from watchstep.pytorch.losses import record_tensor
from watchstep.pytorch.names import NamedParameter
from watchstep.pytorch.optimizer_map import OptimizerMap
from watchstep.pytorch.parameters.parameters import Parameters
from watchstep.pytorch.probes.staging import HostCopy, stacked, views

MISSING_METRIC = "updates:missing"
_HAND_OVER_INTERVAL = 50


class MissingUpdates:
    """Records the number of consecutive steps without a finite update as ``updates:missing``, and 0 at the next finite update.

    A program that skips updates by itself remains in one step of the run. Its passes count as steps, and every fiftieth one hands
    over the rows recorded so far, because such a step may never end.
    """

    def __init__(self, session: Session, prefix: str) -> None:
        self._recorder = session.recorder
        self._enabled = session.config.gate and tensors.METRICS in session.config.chosen
        self._name = f"{prefix}.{MISSING_METRIC}" if prefix else MISSING_METRIC
        self._steps = 0
        self._passes = 0
        self._counted = False

    def pass_begins(self, *, logged_nan: bool) -> None:
        """Handle the start of a forward pass.

        Args:
            logged_nan: Whether the program has logged a NaN loss of the previous pass.

        Raises:
            StopTraining: A guard requests a stop.
        """
        if logged_nan:
            self.pass_is_bad()
        self._counted = False

    def backward_begins(self, *, finite: bool) -> None:
        """Handle the start of a backward pass, of another pass or micro-batch.

        Raises:
            StopTraining: A guard requests a stop.
        """
        self._counted = False
        if not finite:
            self.pass_is_bad()

    def pass_is_bad(self) -> None:
        """Count the current pass, which has a non-finite loss or gradient norm.

        Raises:
            StopTraining: A guard requests a stop.
        """
        if self._counted:
            return
        self._counted = True
        self._passes += 1
        self._report()
        if self._enabled and self._passes % _HAND_OVER_INTERVAL == 0:
            self._recorder.hand_over_unfinished()

    def left_out(self) -> None:
        """Count a step with a skipped or non-finite update."""
        self._steps, self._passes, self._counted = self._steps + 1, 0, False
        self._report()

    def updated(self) -> None:
        """Reset the count after a finite update."""
        if self._steps or self._passes:
            self._steps = self._passes = 0
            self._report()
        self._counted = False

    def _report(self) -> None:
        if self._enabled:
            self._recorder.scalar(self._name, float(self._steps + self._passes))


OVERDUE_METRIC = "updates:overdue"
_MIN_PASSES = 200
"""Minimum number of backward passes in an overdue step. Accumulation of so many micro-batches does not begin in the middle of a run."""
_MIN_RATIO = 50
"""Minimum ratio to the number of passes of any earlier step."""
_MIN_STEPS = 10
"""Minimum number of earlier steps: a program that updates without an optimizer has none."""
_SAMPLED = 64


class OverdueUpdates:
    """Records the number of backward passes of a step that should have ended as ``updates:overdue``, and 0 when an optimizer steps again.

    In addition to the passes, this requires logged training losses for at least half of the passes in their second half, and weights
    that do not change during that half. A program that computes gradients for another purpose (Fisher information, saliency,
    adversarial inputs) does not log a training loss for each, and a program that updates weights by itself changes them. Weights
    are compared by their first elements, only in such a step, at both ends of the second half.
    """

    def __init__(self, session: Session, weights: Sequence[Tensor], prefix: str) -> None:
        self._recorder = session.recorder
        self._enabled = session.config.gate and tensors.METRICS in session.config.chosen
        self._name = f"{prefix}.{OVERDUE_METRIC}" if prefix else OVERDUE_METRIC
        self._weights = weights
        self._sample: list[Tensor] | None = None
        self._passes = 0
        self._max_passes = 1
        self._steps = 0
        self._logged = 0
        self._recorded = False

    def backward_begins(self) -> None:
        """Handle the start of a backward pass from a finite training loss.

        Raises:
            StopTraining: A guard requests a stop.
        """
        self._passes += 1
        if (
            self._recorded and self._passes == 1
        ):  # the first pass of the next step; the row of the overdue step is recorded
            self._recorded = False
            self._recorder.scalar(self._name, 0.0)
        if self._passes < _MIN_PASSES // 2 or self._steps < _MIN_STEPS or not self._enabled:
            return
        limit = max(_MIN_PASSES, _MIN_RATIO * self._max_passes)
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
        """Handle the end of a step: an optimizer of any model stepped, or a gradient scaler skipped it."""
        self._max_passes = max(self._max_passes, self._passes)
        self._passes, self._steps, self._sample = 0, self._steps + 1, None


def _sample(weights: Sequence[Tensor]) -> list[Tensor] | None:
    """Copy the first elements of each weight. None if one is not a plain tensor: reading a sharded one may require all ranks."""
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


_UPDATES_OF_SAME = 3
"""Number of consecutive updates by another optimizer of the same parameters after which that optimizer counts."""

_KNOWN_UPDATES = 10
_UPDATES_OF_UNKNOWN = 200
"""Consecutive updates by optimizers of other parameters after which one of them counts, while the counting one has made fewer than
`_KNOWN_UPDATES`: a critic may be trained alone first."""

MIN_UPDATES_OF_OTHERS = 20
_TIMES_MOST = 4
"""As above, later: so many times the number that have ever been between two updates of the counting one, as a critic may step often between two steps
of its generator, and at least `MIN_UPDATES_OF_OTHERS`."""


@dataclass
class UpdatesOfOthers:
    """Consecutive updates by other optimizers than the one that counts the steps of the run.

    Attributes:
        number: Their number since its last update.
        most: Their largest number between two of its updates.
        own: Number of its updates.
    """

    number: int = 0
    most: int = 0
    own: int = 0

    def add(self, *, is_own: bool) -> None:
        """Count an update."""
        if is_own:
            self.most, self.number, self.own = max(self.most, self.number), 0, self.own + 1
        else:
            self.number += 1

    @property
    def has_ended(self) -> bool:
        """Whether the counting optimizer steps no more, as that of a first stage of training."""
        if self.own < _KNOWN_UPDATES:
            return self.number >= _UPDATES_OF_UNKNOWN
        return self.number >= max(MIN_UPDATES_OF_OTHERS, _TIMES_MOST * self.most)


@dataclass
class UpdatesInStep:
    """Updates in a step by optimizers that do not end it.

    Attributes:
        number: Their number so far in the present step.
        most: Their largest number in any earlier step.
        step: The present step.
    """

    number: int = 0
    most: int = 0
    step: int = -1

    def add(self, step: int) -> None:
        """Count an update in a step."""
        if step != self.step:
            self.most, self.number, self.step = max(self.most, self.number), 0, step
        self.number += 1

    @property
    def is_overdue(self) -> bool:
        """Whether the step has more than any before it, so that it may never end."""
        return self.number > self.most


class CountingOptimizer:
    """The optimizer that defines the steps of the run: the passed one or the first one, later its replacement.

    Programs create a new optimizer when they unfreeze layers or change from warm-up to training, and delete the old one. This
    class does not keep it alive.
    """

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._reference = None if optimizer is None else weakref.ref(optimizer)
        self._parameters: frozenset[int] = frozenset()
        self._others = UpdatesOfOthers()

    def counts(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer's updates are steps of the run."""
        return self._reference is not None and self._reference() is optimizer

    @property
    def is_gone(self) -> bool:
        """Whether the program has deleted the optimizer."""
        return self._reference is not None and self._reference() is None

    def updates(self, optimizer: Optimizer, parameters: Collection[int]) -> None:
        """Handle an optimizer that is about to update.

        Args:
            optimizer: An optimizer of watched parameters.
            parameters: Ids of all its parameters.
        """
        is_own = self.counts(optimizer)
        self._others.add(is_own=is_own)
        if is_own:
            if len(parameters) != len(self._parameters):
                self._parameters = frozenset(parameters)
        elif self._reference is None or self._reference() is None:
            self._replace(optimizer, parameters)
        else:
            shared = self._others.number == _UPDATES_OF_SAME and not self._parameters.isdisjoint(parameters)
            if shared or self._others.has_ended:
                self._replace(optimizer, parameters)

    def _replace(self, optimizer: Optimizer, parameters: Collection[int]) -> None:
        self._reference, self._parameters = weakref.ref(optimizer), frozenset(parameters)
        self._others = UpdatesOfOthers(own=1)


METRIC = "gradients:stale"
_CHECKED_STEPS = (
    100  # number of steps that began with cleared gradients, after which only some steps are checked
)
_CHECK_INTERVAL = 4


@dataclass
class _Check:
    """The checked parameter of an optimizer.

    Attributes:
        name: Name of its metric.
        parameter: Parameter with the checked gradient; None if there is none. The reference is not weak, because
            `torch.utils.swap_tensors`, by which modules of sharded parameters change their dtype, refuses tensors with weak references.
        version: Version of the gradient after the last step; None while the gradient is not checked.
        is_uncleared: Whether the gradient was uncleared at all passes since then; None before the first.
        cleared: Number of steps with a cleared gradient.
        needs_reset: Whether the last step recorded a value that a later step has to reset.
    """

    name: str
    parameter: Tensor | None = None
    version: int | None = None
    is_uncleared: bool | Tensor | None = None
    cleared: int = 0
    needs_reset: bool = False

    def gradient(self) -> Tensor | None:
        """Return the current gradient."""
        return None if self.parameter is None else self.parameter.grad


class StaleGradients:
    """Records 1 as ``gradients:stale`` at each step with gradients that include those of the previous step, and 0 when this ends.

    The metric of a program's second optimizer is ``gradients:stale_2``. Nothing waits for a device: its result is recorded when
    it is known.
    """

    def __init__(self, session: Session, prefix: str) -> None:
        self._recorder = session.recorder
        self._prefix = f"{prefix}." if prefix else ""
        self._enabled = (
            "stale_gradients" in session.config.probes
            and tensors.METRICS in session.config.collections
            and internals.counts_changes()
        )
        self._checks: OptimizerMap[_Check] = OptimizerMap()

    def backward_begins(self) -> None:
        """Check gradients before a backward pass adds to them."""
        for check in self._checks.values():
            if check.version is None or check.is_uncleared is False:
                continue
            gradient = check.gradient()
            if gradient is None or (
                check.is_uncleared is None and internals.version(gradient) != check.version
            ):
                check.is_uncleared = False
                continue
            nonzero = _any_nonzero(gradient)
            if gradient.device.type == "cpu":
                check.is_uncleared = bool(nonzero)
            else:
                check.is_uncleared = nonzero if check.is_uncleared is None else nonzero & check.is_uncleared

    def after_step(self, optimizer: Optimizer, parameters: list[NamedParameter]) -> None:
        """Report the result since an optimizer's previous step, and start the next check.

        Args:
            optimizer: The optimizer.
            parameters: Its watched parameters in order.
        """
        if not self._enabled:
            return
        check = self._checks.get(optimizer)
        if check is None:
            if not parameters:
                return
            number = len(self._checks) + 1
            name = f"{self._prefix}{METRIC}" + (f"_{number}" if number > 1 else "")
            check = self._checks[optimizer] = _Check(name)
        gradient = check.gradient()
        if check.version is not None and check.is_uncleared is not None:
            self._report(check, gradient)
        if gradient is None:
            check.parameter, gradient = _last_with_gradient(parameters)
        is_paused = check.cleared > _CHECKED_STEPS and check.cleared % _CHECK_INTERVAL != 0
        check.cleared += is_paused
        check.version = None if gradient is None or is_paused else internals.version(gradient)
        check.is_uncleared = None

    def _report(self, check: _Check, gradient: Tensor | None) -> None:
        added = (
            gradient is not None and check.version is not None and internals.version(gradient) > check.version
        )
        stale = check.is_uncleared if added else False
        if isinstance(stale, Tensor):
            record_tensor(self._recorder, check.name, stale.float(), "train")
        elif stale or check.needs_reset:
            self._recorder.scalar(check.name, float(bool(stale)))
        check.needs_reset = stale is not False
        check.cleared = 0 if stale is True else check.cleared + 1  # an unknown result is most likely cleared


@torch.no_grad()
def _any_nonzero(gradient: Tensor) -> Tensor:
    """Return whether some of a few evenly spaced elements are nonzero, as a tensor."""
    return views([gradient], _SAMPLED)[0].any()


def _last_with_gradient(parameters: Iterable[NamedParameter]) -> tuple[Tensor | None, Tensor | None]:
    """Return the last parameter with a dense gradient, and the gradient. It is closest to the loss, so its gradient is rarely zero."""
    for named in reversed(list(parameters)):
        gradient = named.parameter.grad
        if gradient is not None and gradient.layout is torch.strided and gradient.numel():
            return named.parameter, gradient
    return None, None


_ELEMENTS = 256
_MAX_SEARCHES = 8
_SEARCH_REPEAT = 2
"""Number of records after a search until the search is repeated, for optimizers that have been created since."""

_WEIGHTED = ("Linear", "Bilinear", "Conv", "LSTM", "GRU", "RNN")
"""Prefixes of the names of classes, or of their bases, that multiply their input by weights."""


@dataclass(frozen=True)
class _NotInOptimizerColumns:
    """Columns of parameters in no optimizer.

    ``changed``: 1 if the parameter has changed since its first record. ``was_optimized``: 1 if it was in an optimizer before.
    ``optimized_share``: share of the elements that require a gradient which is in optimizers. ``after_optimized``: 1 if its layer is
    after a weighted layer that is in an optimizer. ``weight_optimized``: 1 for a vector of a module with a weight matrix in an optimizer.
    """

    flags: HostCopy
    columns: dict[str, Floats]

    def collect(self) -> dict[str, Floats]:
        return {"changed": self.flags.numbers(), **self.columns}


class _Coverage(NamedTuple):
    """Part of a model that is in optimizers.

    Attributes:
        ids: Ids of the parameters.
        share: Share of the elements that require a gradient.
        first: Order of the first weighted layer among them; infinite if there is none.
        modules: Modules with a matrix in an optimizer.
    """

    ids: frozenset[int]
    share: float
    first: float
    modules: frozenset[str]

    @classmethod
    def of(cls, ids: frozenset[int], named: Iterable[NamedParameter]) -> _Coverage:
        """Return the coverage of a model by the ids of all parameters in optimizers."""
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
    """Measures gradients of parameters in no optimizer, as ``fc.weight:not_in_optimizer``, when that collection is due.

    An optimizer is known from its first step on. If a parameter seems to be in none, all optimizers of the process are searched, to
    find those that step rarely or have not stepped yet. The search is done at most eight times.
    """

    def __init__(self, session: Session, parameters: Parameters, kernel: Kernel) -> None:
        self._recorder = session.recorder
        self._schedule = session.schedule
        self._parameters = parameters
        self._kernel = kernel
        self._first: dict[int, Tensor] = {}
        self._measured = -1
        self._collections = {named.not_in_optimizer.collections for named in parameters.named} - {()}
        self._ever_optimized: dict[
            int, Tensor
        ] = {}  # not weak: `torch.utils.swap_tensors` refuses tensors with weak references
        self._in_optimizers: frozenset[int] = frozenset()
        self._optimizers: OptimizerMap[bool] = OptimizerMap()
        self._searched_for: set[int] = set()
        self._searches = 0
        self._since_search = 0

    def measure(self, step: int) -> None:
        """Record the collections that are due, once per step.

        Args:
            step: Step of the run to which the current gradients belong.
        """
        if step == self._measured:
            return
        self._measured = step
        for collections in self._collections:
            charged = self._schedule.due(collections, step)
            members = [] if charged is None else self._not_in_optimizer(collections)
            if charged is not None and members:
                since = self._schedule.now()
                self._record(members)
                self._schedule.spent(charged, since)

    def _not_in_optimizer(self, collections: tuple[str, ...]) -> list[NamedParameter]:
        optimized = self._optimized_ids()
        members = [
            named
            for named in self._parameters.named
            if id(named.parameter) not in optimized
            and named.not_in_optimizer.collections == collections
            and named.placement.records
            and named.parameter.requires_grad
            and named.parameter.grad is not None
        ]
        if members and self._search(members):
            optimized = self._optimized_ids()
            members = [named for named in members if id(named.parameter) not in optimized]
        return members

    def _optimized_ids(self) -> frozenset[int]:
        """Return the ids of parameters in optimizers that have stepped or were found by a search."""
        others = {
            id(p)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        optimized = self._parameters.optimized().union(others)
        watched = {id(named.parameter) for named in self._parameters.named}
        if not self._ever_optimized.keys() <= watched:
            self._ever_optimized = {
                key: tensor for key, tensor in self._ever_optimized.items() if key in watched
            }
        if optimized != self._in_optimizers:
            self._in_optimizers = optimized
            self._ever_optimized.update(
                {
                    id(named.parameter): named.parameter
                    for named in self._parameters.named
                    if id(named.parameter) in optimized
                }
            )
        return optimized

    def _search(self, members: list[NamedParameter]) -> bool:
        """Search for optimizers unless this was done for these parameters. Returns whether a search was done."""
        ids = {id(named.parameter) for named in members}
        self._since_search += 1
        if (
            ids <= self._searched_for and self._since_search != _SEARCH_REPEAT
        ) or self._searches >= _MAX_SEARCHES:
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
            tuple(named.placement.gradient for named in members),
        )
        flags_and_columns = _NotInOptimizerColumns(HostCopy(stacked(flags)), self._columns(members))
        self._recorder.add(group, self._kernel.measure(gradients), probes=(flags_and_columns,))

    def _columns(self, members: list[NamedParameter]) -> dict[str, Floats]:
        coverage = _Coverage.of(self._in_optimizers, self._parameters.named)

        def column(flags: Iterable[bool]) -> Floats:
            return np.array([float(flag) for flag in flags])

        return {
            "was_optimized": column(id(named.parameter) in self._ever_optimized for named in members),
            "optimized_share": np.full(len(members), coverage.share),
            "after_optimized": column(named.weight.order > coverage.first for named in members),
            "weight_optimized": column(
                named.parameter.dim() == 1 and named.weight.module in coverage.modules for named in members
            ),
        }
