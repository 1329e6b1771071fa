"""A hidden layer of sigmoids or tanhs that sit at their bounds, where they pass hardly any gradient."""

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
from watchstep_rules.signals.robust import short
from watchstep_rules.signals.series import SeriesRows, in_training, step_numbers
from watchstep_rules.signals.tensor_selection import OfCatalogue, before_last_layer, rows_where
from watchstep_rules.signals.weight_steps import HALF

_MIDDLE_AND_HALF = {"Sigmoid": (0.5, 0.5), "Tanh": (0.0, 1.0)}
"""Where these activations are steepest, and how far from there their bounds are."""
_CLOSED = 4.5e-5
"""Distance of a sigmoid's output from its bounds at an input of 10: weights that saturate units leave some beyond, a bias of 5 none."""
_LEAST_SLOPE = 1e-3
_SHUTS = 0.1
"""Share of its first slope below which a gate that began closed has shut: its input has moved by another 2.3."""


class SaturatedActivationParams(Params):
    """Parameters of `SaturatedActivation`."""

    slope: float = Field(
        0.1, gt=0, lt=1, description="Mean slope over the greatest one, below which a layer is saturated."
    )
    share: float = Field(
        0.5, gt=0, le=1, description="Share of channels at a bound for every example, from which on it is."
    )
    steps: int = Field(3, ge=1, description="Records in a row through which that holds …")
    examples: int = Field(32, ge=1, description="… and values of each channel that they saw together.")
    converged: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Share of its first value to which a loss that is learnt has come down: no fault then.",
    )
    stuck: float = Field(
        0.75,
        ge=0,
        lt=1,
        description="The same for an activation that no weighted layer follows, or that began steep: above it, it is judged too.",
    )


class SaturatedStreak(NamedTuple):
    """Records in a row in which a layer was saturated, and values of each channel in them."""

    steps: int = 0
    values: float = 0.0

    def is_fault(self, params: SaturatedActivationParams) -> bool:
        """Whether it is long enough."""
        return self.steps >= params.steps and self.values >= params.examples


class SaturatedActivationState(State):
    """Streaks under way by ``tensor@worker``, and losses by ``loss@worker``.

    ``began_flat``: of each layer, by ``tensor@worker``, whether it was at its bounds at its first record.
    ``gates``: of each sigmoid, by ``tensor@worker``, its slope at its first record if that is one of a closed gate; else 0.
    """

    streaks: dict[str, SaturatedStreak] = Field(default_factory=dict)
    began_flat: dict[str, bool] = Field(default_factory=dict)
    gates: dict[str, float] = Field(default_factory=dict)
    losses: dict[str, LossProgress] = Field(default_factory=dict)


class SaturatedActivation(Rule[SaturatedActivationParams, SaturatedActivationState]):
    """Fires when a hidden layer's sigmoids or tanhs lie at their bounds, record after record, while the loss is not low.

    The slope of tanh at an output y is ``1 - y^2``, that of a sigmoid ``y (1 - y)``; so of the greatest slope the mean
    over all outputs is, exactly::

        slope = 1 - mean(((y - middle) / half) ^ 2)

    A layer is saturated where that is below 0.1, or where half of its channels are within one percent of a bound for
    every example (SageMaker's SaturatedActivation asks for half of the nodes). Saturation of hidden layers early in
    training is what Glorot and Bengio (2010) found to stop learning. An activation that is computed after the last weighted layer is
    left alone once the loss has come down by a quarter: the output of a classifier that is sure lies at a bound, that
    of a network whose targets lie beyond the bounds does so too, and its loss stays where it was. So is any layer once the loss is down to
    half of its start: units that became switches while the network learnt are how it represents what it learnt, and
    saturation that keeps it from learning is there before that. A layer that was steep at its first record is left alone as soon as the loss has come
    down by a quarter: it became flat while the network learnt, and a loss that is high at its best (smoothed labels, noise) may never halve. Where a policy is learnt
    (a loss is named ``policy_loss``, ``actor_loss`` or ``pg_loss``) such a layer is not judged: losses grow with returns there, and do not tell whether
    the network learns. A layer that was found saturated before stays found until a
    record of it is steep again, however low the loss comes to be.

    *Closed gates.* Highway networks (Srivastava et al. 2015) and long-memory LSTMs begin with gates at a bias of -4 or -5, whose slope
    is below a tenth on purpose, and which still pass a gradient. A hidden layer of sigmoids counts as such a gate if at its first record it is
    flat, but no output lies nearer to a bound than that of an input of 10. It is then saturated only where its slope falls below a tenth of
    what it began with. Weights large enough to make a layer flat spread inputs by 16 and more, so that some outputs lie beyond. Sigmoids
    that another fault pushed to a steady input between 4 and 10 before the first record are not told from gates.
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
    merge = "sealed"
    usual_causes = (
        "Weights before the activation are too large.",
        "Inputs are not scaled: raw pixels of 0 to 255, for example.",
        "The learning rate is too high, and drove the units to their bounds.",
        "A sigmoid or tanh stands where its bounds do not suit the targets.",
    )
    what_to_try = (
        "Initialise by torch.nn.init.xavier_normal_ with the activation's gain.",
        "Scale inputs to about zero mean and unit variance, or normalise before the activation.",
        "Lower the learning rate.",
        "Use ReLU-like activations in hidden layers; give the loss logits instead of a sigmoid's output.",
    )
    cannot_distinguish = (
        "Hidden units that are meant to be binary from the beginning, such as hashes and hard attention, from saturated ones, while the loss has not fallen by half.",
        "Sigmoids that another fault pushed to a steady input between 4 and 10 before their first record, from gates that begin closed on purpose.",
        "Sigmoids and tanhs that are functions are not seen without the probe function_calls.",
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
        told = ~courses.any_named(is_of_a_policy)[step]
        suspect = np.where(hidden, np.where(began_flat, stuck, high & told), high & courses.known[step])
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
        seen: tuple[float, float],
        streak: SaturatedStreak,
    ) -> Finding:
        slope, share = seen
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
    kept: dict[str, SaturatedStreak],
    block: Block,
    flat: NDArray[np.bool_],
    suspect: NDArray[np.bool_],
    params: SaturatedActivationParams,
) -> tuple[dict[str, SaturatedStreak], dict[int, SaturatedStreak]]:
    """Follow the streaks of saturated records.

    Whether the loss is low decides only whether a streak can become a fault. What is a fault already stays one until a record
    shows that the layer is steep again: the loss may fall though the layer stays at its bounds.

    Args:
        kept: the streaks under way.
        block: the rows that can be judged.
        flat: of each whether the layer is saturated, shape (n,).
        suspect: of each whether the loss is not low, shape (n,).
        params: how long a streak has to be.

    Returns:
        The streaks to be kept, and that of each row at which there is a fault.
    """
    rows = SeriesRows.of(block)
    values = _values_by_channel(block)
    streaks, faults = dict(kept), {}
    goes_on = rows.before(flat, first=True)
    for row in rows.order[flat[rows.order]].tolist():
        name = rows.names[rows.series[row]]
        before = streaks.get(name, SaturatedStreak()) if goes_on[row] else SaturatedStreak()
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
    known: dict[str, bool], block: Block, flat: NDArray[np.bool_]
) -> tuple[dict[str, bool], NDArray[np.bool_]]:
    """Whether each layer was at its bounds at its first record: to be kept, and of each row's series."""
    rows = SeriesRows.of(block)
    began, of_row = dict(known), np.zeros(len(block), np.bool_)
    for name, of_series in zip(rows.names, rows.rows(), strict=True):
        of_row[of_series] = began.setdefault(name, bool(flat[of_series[0]]))
    return began, of_row


def _gates(
    known: dict[str, float], block: Block, slope: Floats, limit: float
) -> tuple[dict[str, float], Floats]:
    """The first slope of each sigmoid that began as a closed gate, 0 of others: to be kept, and of each row's series."""
    sigmoid = rows_where(block, _is_sigmoid)
    held, rows = block.statistics, SeriesRows.of(block)
    half = rows_where(block, _is_half)  # in which what is near to 1 is rounded to 1
    within = (held.min >= _CLOSED) & ((held.max <= 1 - _CLOSED) | (half & (slope >= _LEAST_SLOPE)))
    closed = sigmoid & (slope < limit) & within & (held.finite == held.count)
    gates, first_slope = dict(known), np.zeros(len(block))
    for name, of_series in zip(rows.names, rows.rows(), strict=True):
        first = of_series[0]
        if sigmoid[first] and name not in gates:
            gates[name] = short(float(slope[first])) if closed[first] else 0.0
        first_slope[of_series] = gates.get(name, 0.0)
    return gates, first_slope


def _is_sigmoid(info: TensorInfo) -> bool:
    return info.module_type == "Sigmoid"


def _is_half(info: TensorInfo) -> bool:
    return info.dtype in HALF


_bounds_of: OfCatalogue[Floats] = OfCatalogue()


def _bounds(catalogue: tuple[TensorInfo, ...]) -> Floats:
    """Middle and half of what each tensor's function gives, shape (tensors, 2); NaN for what is no sigmoid or tanh."""
    bounds = [
        _MIDDLE_AND_HALF.get(info.module_type, (np.nan, np.nan)) if info.role == "output" else (np.nan,) * 2
        for info in catalogue
    ]
    return np.array(bounds).reshape(-1, 2)


def _slopes(block: Block) -> Floats:
    """Mean slope over the greatest one; NaN for what is no sigmoid or tanh."""
    middle, half = _bounds_of.get(block.catalogue, "", lambda: _bounds(block.catalogue))[block.tensor].T
    held = block.statistics
    with np.errstate(invalid="ignore", divide="ignore"):
        from_middle = held.m2 / held.finite + (held.mean - middle) ** 2
        return np.asarray(1 - from_middle / half**2)


def _shares(block: Block) -> Floats:
    """Share of saturated channels; NaN where there are no channels."""
    none = np.full(len(block), np.nan)
    channels, saturated = (block.probes.get(name, none) for name in ("channels", "saturated_channels"))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(saturated / channels)


def _values_by_channel(block: Block) -> Floats:
    """How many values there are of each channel; of the whole tensor where there are no channels."""
    channels = block.probes.get("channels", np.full(len(block), np.nan))
    with np.errstate(invalid="ignore", divide="ignore"):
        values = block.statistics.count / channels
    return np.where(np.isfinite(values), values, np.maximum(block.statistics.count, 0))
