"""Amazon's rules as its developer guide documents them, over the elements of saved tensors. Written for these tests, from the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Steps = Mapping[int, Array]
"""A tensor at the steps at which it was saved."""
Trial = Mapping[str, Steps]
"""Tensors by name."""
Verdict = set[tuple[int, str]]
"""Steps and tensors at which a rule returns True."""


def at_each_step(trial: Trial, fires: Callable[[Array], bool]) -> Verdict:
    """Of a rule that judges each tensor at each step by itself."""
    return {(step, name) for name, steps in trial.items() for step, value in steps.items() if fires(value)}


def vanishing_gradient(gradients: Trial, threshold: float = 1e-7) -> Verdict:
    return at_each_step(gradients, lambda value: bool(np.mean(np.abs(value)) < threshold))


def exploding_tensor(trial: Trial, *, only_nan: bool = False) -> Verdict:
    test = np.isnan if only_nan else lambda value: ~np.isfinite(value)
    return at_each_step(trial, lambda value: bool(np.any(test(value))))


def all_zero(trial: Trial, threshold: float = 100) -> Verdict:
    return at_each_step(trial, lambda value: bool(100 * np.mean(value == 0) >= threshold))


def tensor_variance(trial: Trial, max_threshold: float, min_threshold: float) -> Verdict:
    return at_each_step(
        trial, lambda value: bool(np.var(value) > max_threshold or np.var(value) < min_threshold)
    )


def inactive_nodes(active: Array, threshold_inactivity: float, threshold_layer: float) -> bool:
    """Of shape (examples, nodes), or images: a node is a channel, and its activity that over all else."""
    nodes = np.moveaxis(active, 1, -1).reshape(-1, active.shape[1])
    inactive = 100 * nodes.mean(axis=0) < threshold_inactivity
    return bool(100 * inactive.mean() > threshold_layer)


def dead_relu(outputs: Trial, threshold_inactivity: float = 1.0, threshold_layer: float = 50.0) -> Verdict:
    return at_each_step(
        outputs, lambda value: inactive_nodes(value > 0, threshold_inactivity, threshold_layer)
    )


def saturated_activation(
    inputs: Trial,
    low: float,
    high: float,
    threshold_inactivity: float = 1.0,
    threshold_layer: float = 50.0,
) -> Verdict:
    return at_each_step(
        inputs,
        lambda value: inactive_nodes((value > low) & (value < high), threshold_inactivity, threshold_layer),
    )


def weight_update_ratio(
    weights: Trial,
    num_steps: int | None = None,
    large_threshold: float = 10.0,
    small_threshold: float = 1e-8,
    epsilon: float = 1e-9,
) -> Verdict:
    found = set()
    for name, steps in weights.items():
        saved = sorted(steps)
        for at, step in enumerate(saved[1:], 1):
            reach = [saved[at - 1]] if num_steps is None else [s for s in saved[:at] if s >= step - num_steps]
            if not reach:
                continue
            before = steps[reach[0]].astype(np.float64)
            ratio = np.linalg.norm(steps[step] - before) / (np.linalg.norm(before) + epsilon)
            if ratio > large_threshold or ratio < small_threshold:
                found.add((step, name))
    return found


def unchanged_tensor(
    trial: Trial, num_steps: int = 3, rtol: float = 1e-5, atol: float = 1e-8, *, equal_nan: bool = False
) -> Verdict:
    found = set()
    for name, steps in trial.items():
        saved = sorted(steps)
        for at in range(num_steps - 1, len(saved)):
            last = [steps[step] for step in saved[at - num_steps + 1 : at + 1]]
            pairs = zip(last[1:], last[:-1], strict=True)
            if all(np.allclose(new, old, rtol=rtol, atol=atol, equal_nan=equal_nan) for new, old in pairs):
                found.add((saved[at], name))
    return found


def poor_weight_initialization(  # noqa: PLR0917 - the inputs, and the parameters by their names
    activation_inputs: Trial,
    gradients: Trial,
    losses: Sequence[float],
    threshold: float = 10.0,
    distribution_range: float = 0.001,
    patience: int = 5,
    steps: int = 10,
) -> set[int]:
    """Steps at which one of the three tests returns True."""
    found, not_decreasing = set(), 0
    for step in range(min(steps, len(losses))):
        variances = [np.var(values[step].astype(np.float64)) for values in activation_inputs.values()]
        ranges = [np.subtract(*np.percentile(values[step], [95, 5])) for values in gradients.values()]
        not_decreasing = not_decreasing + 1 if step and losses[step] >= losses[step - 1] else 0
        if (
            max(variances) / min(variances) > threshold
            or min(ranges) < distribution_range
            or not_decreasing >= patience
        ):
            found.add(step)
    return found


def loss_not_decreasing(
    losses: Mapping[int, float],
    num_steps: int = 10,
    diff_percent: float = 0.1,
    increase_threshold: float = 5.0,
) -> set[int]:
    """The guide's example: saved every three steps with num_steps 10, step 21 is compared with 9, and 33 is next."""
    found: set[int] = set()
    last: int | None = None
    for step in sorted(losses):
        if last is None:
            last = step
        elif step - last >= num_steps:
            change = 100 * (losses[step] - losses[last]) / abs(losses[last])
            if -change < diff_percent or change > increase_threshold:
                found.add(step)
            last = step
    return found


def overfit(
    train: Mapping[int, float],
    validation: Mapping[int, float],
    start_step: int = 0,
    patience: int = 1,
    ratio_threshold: float = 0.1,
) -> set[int]:
    found, above = set(), 0
    for step in sorted(step for step in validation if step >= start_step):
        newest = train[max(at for at in train if at <= step)]
        above = above + 1 if (validation[step] - newest) / newest > ratio_threshold else 0
        if above >= patience:
            found.add(step)
    return found


def overtraining(losses: Mapping[int, float], patience: int, delta: float = 0.01) -> set[int]:
    found, best, since = set(), np.inf, 0
    for step in sorted(losses):
        if losses[step] < best - delta:
            best, since = losses[step], 0
        else:
            since += 1
        if since >= patience:
            found.add(step)
    return found


def class_imbalance(
    batches: Iterable[tuple[Array, Array]],
    threshold_imbalance: float = 10.0,
    threshold_misprediction: float = 0.7,
    samples: int = 500,
    *,
    argmax: bool = False,
) -> tuple[set[int], Verdict]:
    """Steps at which classes are out of balance, and steps and classes that are predicted wrong."""
    labels: list[int] = []
    predictions: list[int] = []
    imbalanced, mispredicted = set(), set()
    for step, (label, prediction) in enumerate(batches):
        labels += label.tolist()
        predictions += (np.argmax(prediction, 1) if argmax else prediction).tolist()
        if len(labels) < samples:
            continue
        true, guessed = np.array(labels), np.array(predictions)
        counts = np.unique(true, return_counts=True)[1]
        if counts.max() / counts.min() > threshold_imbalance:
            imbalanced.add(step)
        for category in np.unique(true).tolist():
            if np.mean(guessed[true == category] != category) > threshold_misprediction:
                mispredicted.add((step, f"confusion/{category}"))
    return imbalanced, mispredicted


def confusion(
    batches: Iterable[tuple[Array, Array]], category_no: int, min_diag: float = 0.9, max_off_diag: float = 0.1
) -> Verdict:
    """With the diagonal over the sum of its column, as the rule here documents it."""
    matrix = np.zeros((category_no, category_no))
    found = set()
    for step, (label, prediction) in enumerate(batches):
        np.add.at(matrix, (label, prediction), 1)
        if not matrix.sum(1).all():
            continue
        for category in range(category_no):
            whole = matrix[:, category].sum()
            shares = matrix[:, category] / whole if whole else np.full(category_no, np.nan)
            off = np.delete(shares, category)
            if whole and (shares[category] < min_diag or (off > max_off_diag).any()):
                found.add((step, f"confusion/{category}"))
    return found


def check_input_images(
    batches: Iterable[Array], threshold_mean: float = 0.2, threshold_samples: int = 500, channel: int = 1
) -> set[int]:
    seen: list[Array] = []
    found = set()
    for step, batch in enumerate(batches):
        seen.append(batch)
        images = np.concatenate(seen).astype(np.float64)
        others = tuple(axis for axis in range(images.ndim) if axis != channel)
        if len(images) >= threshold_samples and (np.abs(images.mean(others)) > threshold_mean).any():
            found.add(step)
    return found


def nlp_sequence_ratio(
    batches: Iterable[Array], token_values: Sequence[int] = (0,), thresholds: Sequence[float] = (50.0, 50.0)
) -> set[int]:
    pairs = list(zip(token_values, thresholds, strict=False))
    return {
        step
        for step, batch in enumerate(batches)
        if any(100 * np.mean(batch == token) > limit for token, limit in pairs)
    }


def tree_depth(largest_nodes: Sequence[int], depth: float = 4) -> set[int]:
    return {step for step, node in enumerate(largest_nodes) if node and np.log2(node) > depth}


def feature_importance_overweight(
    importances: Sequence[Array], threshold: float = 0.8, nfeatures: int = 3
) -> set[int]:
    return {
        step
        for step, values in enumerate(importances)
        if values.sum() and np.sort(values)[::-1][:nfeatures].sum() / values.sum() > threshold
    }
