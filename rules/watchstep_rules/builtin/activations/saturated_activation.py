"""A hidden layer of sigmoids or tanhs at their bounds, where they pass hardly any gradient."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block, view
from watchstep.format.statistics import Floats
from watchstep.format.tensors import TensorInfo
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.loss_progress import LossProgress, follow_loss
from watchstep_rules.signals.loss_series import is_of_a_policy
from watchstep_rules.signals.robust import round_value
from watchstep_rules.signals.series import SeriesRows, in_training, step_numbers
from watchstep_rules.signals.tensor_selection import CatalogueCache, before_last_layer, rows_where
from watchstep_rules.signals.weight_steps import HALF

_MIDDLE_AND_HALF = {"Sigmoid": (0.5, 0.5), "Tanh": (0.0, 1.0)}
"""The output at which these activations are steepest, and the distance of their bounds from it."""
_CLOSED = 4.5e-5
"""Distance of a sigmoid's output from its bounds at an input of 10. Weights that saturate units produce some outputs beyond it, a bias of 5 none."""
_LEAST_SLOPE = 1e-3
_SHUTS = 0.1
"""Share of its first slope below which a gate that started closed has saturated: its input has moved by another 2.3."""


class SaturatedActivationParams(Params):
    """Parameters of `SaturatedActivation`."""

    slope: float = Field(
        0.1, gt=0, lt=1, description="Ratio of mean to greatest slope below which a layer is saturated."
    )
    share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of channels at a bound for every example at which a layer is saturated.",
    )
    steps: int = Field(3, ge=1, description="Consecutive saturated records.")
    examples: int = Field(32, ge=1, description="Fewest values of each channel in these records together.")
    converged: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Share of its first value at which a loss has converged, so that saturation is not a fault.",
    )
    stuck: float = Field(
        0.75,
        ge=0,
        lt=1,
        description="The same share for an activation without a later weighted layer, or one that started steep.",
    )


class SaturatedStreak(NamedTuple):
    """Consecutive saturated records of a layer, and values of each channel in them."""

    steps: int = 0
    values: float = 0.0

    def is_fault(self, params: SaturatedActivationParams) -> bool:
        """Whether the streak is long enough."""
        return self.steps >= params.steps and self.values >= params.examples


class SaturatedActivationState(State):
    """State of `SaturatedActivation`.

    Attributes:
        streaks: current streaks, by ``tensor@worker``.
        began_flat: whether a layer was at its bounds at its first record, by ``tensor@worker``.
        gates: the slope of a sigmoid at its first record if it is that of a closed gate, else 0, by ``tensor@worker``.
        losses: losses, by ``loss@worker``.
    """

    streaks: dict[str, SaturatedStreak] = Field(default_factory=dict)
    began_flat: dict[str, bool] = Field(default_factory=dict)
    gates: dict[str, float] = Field(default_factory=dict)
    losses: dict[str, LossProgress] = Field(default_factory=dict)


class SaturatedActivation(Rule[SaturatedActivationParams, SaturatedActivationState]):
    """Fires when a hidden layer's sigmoids or tanhs are at their bounds, record after record, while the loss is not low.

    The slope of tanh at an output y is ``1 - y^2``, that of a sigmoid ``y (1 - y)``. Relative to the greatest slope, the mean over all
    outputs is therefore exactly::

        slope = 1 - mean(((y - middle) / half) ^ 2)

    A layer is saturated if this is below 0.1, or if half of its channels are within one percent of a bound for every example (SageMaker's
    SaturatedActivation requires half of the nodes). Glorot and Bengio (2010) found that saturation of hidden layers early in training
    stops learning. Exceptions:

    - An activation after the last weighted layer is not reported once the loss has fallen by a quarter: the output of a confident
      classifier is at a bound. So is that of a network with targets beyond the bounds, but its loss does not fall.
    - No layer is reported once the loss is down to half of its first value: units that became switches during learning represent what was
      learned, and saturation that prevents learning occurs before.
    - A layer that was steep at its first record is not reported once the loss has fallen by a quarter: it became flat during learning, and
      a loss with a high minimum (smoothed labels, noise) may never halve. If a policy is learned (a loss is named ``policy_loss``,
      ``actor_loss`` or ``pg_loss``) such a layer is not judged, because losses grow with returns and do not show whether the network learns.

    A layer that was reported remains reported until one of its records is steep again, however low the loss becomes.

    *Closed gates.* Highway networks (Srivastava et al. 2015) and long-memory LSTMs start with gates at a bias of -4 or -5, with a slope
    below a tenth on purpose, which still pass a gradient. A hidden layer of sigmoids counts as such a gate if at its first record it is
    flat, but no output is nearer to a bound than that of an input of 10. It is then saturated only if its slope falls below a tenth of its
    first slope. Weights large enough to make a layer flat spread inputs by 16 and more, so that some outputs are beyond. Sigmoids that
    another fault pushed to a steady input between 4 and 10 before the first record cannot be distinguished from gates.
    """

    name = "saturated_activation"
    version = 2
    summary = "a hidden layer's sigmoids or tanhs stay at their bounds"
    needs = Needs(
        collections=("activations", "losses"),
        roles=("output", "loss"),
        probes=("channels",),
        about=("output",),
    )
    merge = "watermark"
    usual_causes = (
        "Weights before the activation are too large.",
        "Inputs are not scaled: raw pixels of 0 to 255, for example.",
        "The learning rate is too high and moved the units to their bounds.",
        "The bounds of a sigmoid or tanh do not match the targets.",
    )
    what_to_try = (
        "Initialize with torch.nn.init.xavier_normal_ and the activation's gain.",
        "Scale inputs to about zero mean and unit variance, or normalize before the activation.",
        "Lower the learning rate.",
        "Use ReLU-like activations in hidden layers; pass logits to the loss instead of a sigmoid's output.",
    )
    cannot_distinguish = (
        "Hidden units that are binary by design from the start, such as hashes and hard attention, from saturated ones, while the loss has not fallen by half.",
        "Sigmoids that another fault pushed to a steady input between 4 and 10 before their first record, from gates that start closed on purpose.",
        "Sigmoid and tanh functions are not recorded without the probe function_calls.",
    )

    def conclusive(self, params: SaturatedActivationParams, block: Block) -> NDArray[np.bool_]:
        """Rows with a slope or with counted channels."""
        return ~(np.isnan(_slopes(block)) & np.isnan(_shares(block)))

    def evaluate(
        self,
        params: SaturatedActivationParams,
        state: SaturatedActivationState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[SaturatedActivationState, list[Finding]]:
        """Judge the layers of each step after its losses."""
        block = in_training(block)
        numbers = step_numbers(block)
        losses, courses = follow_loss(state.losses, block, numbers)
        slope, share = _slopes(block), _shares(block)
        judged = np.flatnonzero(~(np.isnan(slope) & np.isnan(share)))
        step = numbers[judged]
        stuck = ~courses.any_converged(params.converged)[step]
        high = ~courses.any_converged(params.stuck)[step]
        hidden = before_last_layer(block, judged)
        flat = (slope[judged] < params.slope) | (share[judged] >= params.share)
        began, began_flat = _beginnings(state.began_flat, view(block, judged), flat)
        gates, first_slope = _gates(state.gates, view(block, judged), slope[judged], params.slope)
        flat &= ~(hidden & (slope[judged] >= _SHUTS * first_slope) & (first_slope > 0))
        no_policy = ~courses.any_named(is_of_a_policy)[step]
        suspect = np.where(hidden, np.where(began_flat, stuck, high & no_policy), high & courses.known[step])
        streaks, faults = _follow(state.streaks, view(block, judged), flat, suspect, params)
        findings = {}
        for place, streak in faults.items():
            row = int(judged[place])
            findings[row] = self._finding(params, block, row, (slope[row], share[row]), streak)
        state = SaturatedActivationState(
            streaks=streaks,
            began_flat=began,
            gates=gates,
            losses=losses,
        )
        return state, [findings[row] for row in sorted(findings)]

    def _finding(
        self,
        params: SaturatedActivationParams,
        block: Block,
        row: int,
        slope_and_share: tuple[float, float],
        streak: SaturatedStreak,
    ) -> Finding:
        slope, share = slope_and_share
        since = f"for {streak.steps} records in a row"
        name = block.info(row).name
        if slope < params.slope:
            message = f"{name} has {slope:.2g} of its greatest slope, below {params.slope:.2g} {since}"
            return finding_at(
                self.name, block, row, value=float(slope), threshold=params.slope, message=message
            )
        message = f"{share:.0%} of the channels of {name} are at a bound for every example, {since}"
        return finding_at(self.name, block, row, value=float(share), threshold=params.share, message=message)


def _follow(
    streaks_before: dict[str, SaturatedStreak],
    block: Block,
    flat: NDArray[np.bool_],
    suspect: NDArray[np.bool_],
    params: SaturatedActivationParams,
) -> tuple[dict[str, SaturatedStreak], dict[int, SaturatedStreak]]:
    """Follow the streaks of saturated records.

    A low loss only prevents a streak from becoming a fault. An existing fault remains until a record shows that the layer is steep again,
    because the loss may fall while the layer stays at its bounds.

    Args:
        streaks_before: the current streaks.
        block: the rows that can be judged.
        flat: whether the layer is saturated at each row, shape (n,).
        suspect: whether the loss is not low at each row, shape (n,).
        params: the required length of a streak.

    Returns:
        The streaks after the block, and the streak of each row with a fault.
    """
    rows = SeriesRows.of(block)
    values = _values_by_channel(block)
    streaks, faults = dict(streaks_before), {}
    continues = rows.before(flat, first=True)
    for row in rows.order[flat[rows.order]].tolist():
        name = rows.names[rows.series[row]]
        before = streaks.get(name, SaturatedStreak()) if continues[row] else SaturatedStreak()
        if suspect[row] or before.is_fault(params):
            streak = streaks[name] = SaturatedStreak(before.steps + 1, before.values + float(values[row]))
            if streak.is_fault(params):
                faults[row] = streak
        else:
            streaks.pop(name, None)
    for name, last in zip(rows.names, rows.last(flat), strict=True):
        if not last:
            streaks.pop(name, None)
    return streaks, faults


def _beginnings(
    before: dict[str, bool], block: Block, flat: NDArray[np.bool_]
) -> tuple[dict[str, bool], NDArray[np.bool_]]:
    """Whether each layer was at its bounds at its first record: for the state, and for the series of each row."""
    rows = SeriesRows.of(block)
    began, of_row = dict(before), np.zeros(len(block), np.bool_)
    for name, of_series in zip(rows.names, rows.rows(), strict=True):
        of_row[of_series] = began.setdefault(name, bool(flat[of_series[0]]))
    return began, of_row


def _gates(
    before: dict[str, float], block: Block, slope: Floats, limit: float
) -> tuple[dict[str, float], Floats]:
    """The first slope of each sigmoid that started as a closed gate, else 0: for the state, and for the series of each row."""
    sigmoid = rows_where(block, _is_sigmoid)
    statistics, rows = block.statistics, SeriesRows.of(block)
    half = rows_where(block, _is_half)  # rounds values near 1 to 1
    within = (statistics.min >= _CLOSED) & (
        (statistics.max <= 1 - _CLOSED) | (half & (slope >= _LEAST_SLOPE))
    )
    closed = sigmoid & (slope < limit) & within & (statistics.finite == statistics.count)
    gates, first_slope = dict(before), np.zeros(len(block))
    for name, of_series in zip(rows.names, rows.rows(), strict=True):
        first = of_series[0]
        if sigmoid[first] and name not in gates:
            gates[name] = round_value(float(slope[first])) if closed[first] else 0.0
        first_slope[of_series] = gates.get(name, 0.0)
    return gates, first_slope


def _is_sigmoid(info: TensorInfo) -> bool:
    return info.module_type == "Sigmoid"


def _is_half(info: TensorInfo) -> bool:
    return info.dtype in HALF


_bounds_of: CatalogueCache[Floats] = CatalogueCache()


def _bounds(catalogue: tuple[TensorInfo, ...]) -> Floats:
    """Middle and half range of each tensor's activation function, shape (tensors, 2); NaN if it is not a sigmoid or tanh."""
    bounds = [
        _MIDDLE_AND_HALF.get(info.module_type, (np.nan, np.nan)) if info.role == "output" else (np.nan,) * 2
        for info in catalogue
    ]
    return np.array(bounds).reshape(-1, 2)


def _slopes(block: Block) -> Floats:
    """Ratio of mean to greatest slope; NaN if the tensor is not the output of a sigmoid or tanh."""
    middle, half = _bounds_of.get(block.catalogue, "", lambda: _bounds(block.catalogue))[block.tensor].T
    statistics = block.statistics
    with np.errstate(invalid="ignore", divide="ignore"):
        from_middle = statistics.m2 / statistics.finite + (statistics.mean - middle) ** 2
        return np.asarray(1 - from_middle / half**2)


def _shares(block: Block) -> Floats:
    """Share of saturated channels; NaN if there are no channels."""
    none = np.full(len(block), np.nan)
    channels, saturated = (block.probes.get(name, none) for name in ("channels", "saturated_channels"))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(saturated / channels)


def _values_by_channel(block: Block) -> Floats:
    """Number of values of each channel; of the whole tensor if there are no channels."""
    channels = block.probes.get("channels", np.full(len(block), np.nan))
    with np.errstate(invalid="ignore", divide="ignore"):
        values = block.statistics.count / channels
    return np.where(np.isfinite(values), values, np.maximum(block.statistics.count, 0))
