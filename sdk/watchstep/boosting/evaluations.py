"""Evaluations of a boosting round: which metric of each data set is its loss, and the mode and names of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from watchstep.format.tensors import Mode


@dataclass(frozen=True)
class MetricValue:
    """The value of one metric on one data set.

    Attributes:
        dataset: name of the data set.
        metric: name of the metric.
        value: its value; the mean over folds in a cross-validation.
        is_loss: whether smaller values are better.
    """

    dataset: str
    metric: str
    value: float
    is_loss: bool


def numbers_of(
    evaluations: Sequence[MetricValue], training: str, loss: str | None = None, *, is_last: bool = True
) -> Mapping[Mode, Mapping[str, float]]:
    """Return numbers by mode and name.

    The training data have mode train, and all others mode eval; the names of the second and later validation sets have the set's name as
    a prefix. The metric that is the loss is named ``loss``.

    Args:
        evaluations: evaluations of one round.
        training: name of the training data.
        loss: name of the metric that is the loss; by default one with smaller values that are better.
        is_last: whether the last one of these is chosen, and not the first.
    """
    by_dataset: dict[str, list[MetricValue]] = {}
    for evaluation in evaluations:
        by_dataset.setdefault(evaluation.dataset, []).append(evaluation)
    validation = [name for name in by_dataset if name != training]
    numbers: dict[Mode, dict[str, float]] = {}
    for name, members in by_dataset.items():
        mode: Mode = "train" if name == training else "eval"
        prefix = "" if mode == "train" or name == validation[0] else f"{name}:"
        losses = [
            member.metric for member in members if member.metric == loss or (not loss and member.is_loss)
        ]
        chosen = losses[-1 if is_last else 0] if losses else None
        for member in members:
            scalar = "loss" if member.metric == chosen else member.metric
            numbers.setdefault(mode, {})[f"{prefix}{scalar}"] = member.value
    return numbers
