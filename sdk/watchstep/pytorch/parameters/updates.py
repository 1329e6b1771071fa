"""Updates that do not happen: passes without a finite update, loops without an optimizer step, and which optimizer counts.

A pass whose loss or gradient norm is not finite, a step that a gradient scaler skips, and an update by a non-finite
gradient count as passes without a finite update; any other update resets the count, also one whose loss was NaN: the
gradient of a batch without labels is zero. A few such passes are how programs skip bad batches, many are a training that
stands still. If no optimizer steps at all, the step of the run does not end, and nothing else that is recorded shows it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from watchstep.capture.session import Session
from watchstep.format import tensors

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
        self._tell()
        if self._wanted and self._passes % _HANDED_OVER == 0:
            self._recorder.hand_over_unfinished()

    def left_out(self) -> None:
        """A step is over whose update was left out, or was not finite."""
        self._steps, self._passes, self._counted = self._steps + 1, 0, False
        self._tell()

    def updated(self) -> None:
        """A finite update was made."""
        if self._steps or self._passes:
            self._steps = self._passes = 0
            self._tell()
        self._counted = False

    def _tell(self) -> None:
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
