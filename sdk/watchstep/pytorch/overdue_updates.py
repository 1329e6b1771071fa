"""A training loop that computes losses and gradients on and on while nothing updates the weights any more.

No optimizer steps, so that the step of the run does not end, and nothing else that is recorded shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from watchstep import tensors
from watchstep.capture.session import Session

METRIC = "updates:overdue"
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
        self._name = f"{prefix}.{METRIC}" if prefix else METRIC
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
