"""A layer of rectifiers with mostly dead units."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from watchstep.format.block import Block, view
from watchstep.format.statistics import Floats
from watchstep.format.tensors import TensorInfo
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.loaded_weights import LOADED
from watchstep_rules.signals.loss_progress import LossProgress, follow_loss
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import SeriesRows, in_training, step_numbers
from watchstep_rules.signals.tensor_selection import after_last_layer, has_role, rows_where

_LEARNS = 0.75
"""Share of its first value at or below which a loss shows that the last rectifier does not prevent learning."""
_SETTLING = 50
"""Steps in which a loss may fall this far, as in `vanishing_gradient`."""


class DeadReluParams(Params):
    """Parameters of `DeadRelu`."""

    share: float = Field(0.9, gt=0, le=1, description="Share of dead channels at which a layer is dead.")
    silent_share: float = Field(
        0.5, gt=0, le=1, description="The same share if no layer of the model gets any gradient."
    )
    steps: int = Field(3, ge=1, description="Consecutive records with a dead layer.")
    examples: int = Field(32, ge=1, description="Fewest values of each channel in these records together.")
    converged: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of its first value at which a loss has converged, so that gradients may be missing.",
    )


class DeadStreak(NamedTuple):
    """Consecutive records of one layer, and values of each channel in them: as a dead layer, and as a silent layer."""

    steps: int = 0
    values: float = 0.0
    silent_steps: int = 0
    silent_values: float = 0.0


class DeadReluState(State):
    """State of `DeadRelu`.

    Attributes:
        streaks: current streaks, by ``tensor@worker``.
        losses: losses, by ``loss@worker``.
        silent: whether a parameter had no gradient at its last record.
        began: the first step; None before it.
    """

    streaks: dict[str, DeadStreak] = Field(default_factory=dict)
    losses: dict[str, LossProgress] = Field(default_factory=dict)
    silent: dict[str, bool] = Field(default_factory=dict)
    began: int | None = None


class DeadRelu(Rule[DeadReluParams, DeadReluState]):
    """Fires when most channels of a rectifier's output are zero for every example, record after record.

    ``dead_channels / channels`` must reach ``share`` at ``steps`` consecutive records with at least ``examples`` values of each channel. Half
    of the channels suffice if meanwhile no weight of the model gets any gradient and the loss is above a tenth of its first value: then
    learning has stopped, whatever the other channels do.

    A rectifier after the last weighted layer (a penalty above a bound, an output that is never negative) may legitimately be zero. It is
    judged by ``share`` only after the first 50 steps, and until some loss has fallen by a quarter, as `saturated_activation` does with the
    last activation.

    Half of all channels is the limit of SageMaker's DeadRelu, which healthy sparse networks exceed: half of randomly initialized units are
    off for an example, and many are off for all examples of a small batch (Glorot, Bordes and Bengio 2011 report up to 80 percent zeros in
    good networks). This rule therefore requires 90 percent, over at least 32 examples. A layer with only dead units passes no gradient
    back (Lu et al. 2019, "Dying ReLU and Initialization").
    """

    name = "dead_relu"
    summary = "nearly all channels of a rectifier are zero for every example, and stay so"
    needs = Needs(
        collections=("activations", "gradients", "losses"),
        roles=("output", "gradient", "loss"),
        probes=("channels",),
        about=("output",),
        metrics=(LOADED,),
    )
    merge = "watermark"
    usual_causes = (
        "The learning rate is too high: one large step pushed the units below zero for every input.",
        "Initial biases are negative, or initial weights too large.",
        "Inputs are not centered, or all have the same sign.",
    )
    what_to_try = (
        "Lower the learning rate, or warm it up.",
        "Use LeakyReLU, ELU or GELU, which pass a gradient below zero.",
        "Initialize weights with torch.nn.init.kaiming_normal_, and biases with zero.",
        "Normalize inputs, or add a normalization layer before the activation.",
    )
    cannot_distinguish = (
        "A layer with fewer than a tenth of its channels active by design, such as a wide dictionary or a hard gate, from a dead layer.",
        "Identical examples, for instance padding or a single class, from units that are off for every input.",
        "Rectifier functions (torch.relu in forward) are not recorded without the probe function_calls.",
    )

    def conclusive(self, params: DeadReluParams, block: Block) -> NDArray[np.bool_]:
        """Rows with counted channels."""
        return has_probe(block, "dead_channels")

    def evaluate(
        self, params: DeadReluParams, state: DeadReluState, context: Block, block: Block, now: int
    ) -> tuple[DeadReluState, list[Finding]]:
        """Judge the layers of each step after its losses and gradients."""
        block = in_training(block)
        numbers = step_numbers(block)
        losses, courses = follow_loss(state.losses, block, numbers)
        silent, all_silent = _silence(state.silent, block, numbers)
        none = np.full(len(block), np.nan)
        channels, dead = (block.probes.get(name, none) for name in ("channels", "dead_channels"))
        is_output = rows_where(block, has_role, "output")
        layers = np.flatnonzero(is_output & (channels > 0) & np.isfinite(dead))
        share = dead[layers] / channels[layers]
        stuck = ~courses.any_converged(params.converged)
        is_last = after_last_layer(block, layers)
        began = state.began if state.began is not None or not len(block) else int(block.step.min())
        learns = courses.any_converged(_LEARNS)[numbers[layers]]
        if began is not None:
            learns |= block.step[layers] < began + _SETTLING
        is_dead = (share >= params.share) & ~(is_last & learns)
        is_silent = (share >= params.silent_share) & (all_silent & stuck)[numbers[layers]]
        streaks, ends = _follow(state.streaks, view(block, layers), is_dead, is_silent, channels[layers])
        findings = {}
        for place, streak in ends.items():
            row = int(layers[place])
            if finding := self._judge(params, block, row, float(share[place]), streak):
                findings[row] = finding
        return (
            DeadReluState(
                streaks=streaks,
                losses=losses,
                silent=silent,
                began=began,
            ),
            [findings[row] for row in sorted(findings)],
        )

    def _judge(
        self, params: DeadReluParams, block: Block, row: int, share: float, streak: DeadStreak
    ) -> Finding | None:
        channels = round(block.probes["channels"][row])
        measured = f"{share:.0%} of {channels} channels of {block.info(row).name} are zero for every example"
        if streak.steps >= params.steps and streak.values >= params.examples:
            message = f"{measured}, at least {params.share:.0%} for {streak.steps} records in a row"
            return finding_at(self.name, block, row, value=share, threshold=params.share, message=message)
        if streak.silent_steps >= params.steps and streak.silent_values >= params.examples:
            message = f"{measured}, and no weight had any gradient for {streak.silent_steps} records in a row"
            return finding_at(
                self.name, block, row, value=share, threshold=params.silent_share, message=message
            )
        return None


def _follow(
    streaks_before: dict[str, DeadStreak],
    layers: Block,
    is_dead: NDArray[np.bool_],
    is_silent: NDArray[np.bool_],
    channels: Floats,
) -> tuple[dict[str, DeadStreak], dict[int, DeadStreak]]:
    """The streaks after the block, and the streak of each row in one."""
    rows = SeriesRows.of(layers)
    streaks, streak_of = dict(streaks_before), {}
    hit = is_dead | is_silent
    continues = rows.before(hit, first=True)
    for row in rows.order[hit[rows.order]].tolist():
        name = rows.names[rows.series[row]]
        before = streaks.get(name, DeadStreak()) if continues[row] else DeadStreak()
        values = float(layers.statistics.count[row] / channels[row])
        streak_of[row] = streaks[name] = _after(
            before, values, is_dead=bool(is_dead[row]), is_silent=bool(is_silent[row])
        )
    for name, last in zip(rows.names, rows.last(hit), strict=True):
        if not last:
            streaks.pop(name, None)
    return streaks, streak_of


def _silence(
    before: dict[str, bool], block: Block, numbers: NDArray[np.intp]
) -> tuple[dict[str, bool], NDArray[np.bool_]]:
    """Parameters without any gradient at their last record, and whether all known parameters are, by step."""
    rows = np.flatnonzero(rows_where(block, _is_parameters))
    rows = rows[block.statistics.finite[rows] > 0]
    steps = int(numbers[-1]) + 1 if len(numbers) else 0
    by_series = SeriesRows.of(view(block, rows))
    alive = (block.statistics.abs_sum[rows] != 0).astype(np.int64)
    # Count the changes, from row to row, of the numbers of parameters with a gradient and of known parameters.
    is_known = np.array([name in before for name in by_series.names], np.int64)
    was_alive = np.array([not before.get(name, True) for name in by_series.names], np.int64)
    change = alive - by_series.before(alive, was_alive)
    new = 1 - by_series.before(np.ones(len(rows), np.int64), is_known)
    alive_now = sum(not is_silent for is_silent in before.values()) + _by_step(change, numbers[rows], steps)
    known_now = len(before) + _by_step(new, numbers[rows], steps)
    silent = {
        **before,
        **{name: not last for name, last in zip(by_series.names, by_series.last(alive), strict=True)},
    }
    return silent, (known_now > 0) & (alive_now == 0)


def _is_parameters(info: TensorInfo) -> bool:
    return info.role not in ("output", "loss") and len(info.shape) > 1


def _by_step(changes: NDArray[np.int64], numbers: NDArray[np.intp], steps: int) -> NDArray[np.int64]:
    """The sum of all changes up to each step."""
    return np.cumsum(np.bincount(numbers, changes, steps)).astype(np.int64)


def _after(streak: DeadStreak, values: float, *, is_dead: bool, is_silent: bool) -> DeadStreak:
    return DeadStreak(
        streak.steps + 1 if is_dead else 0,
        streak.values + values if is_dead else 0.0,
        streak.silent_steps + 1 if is_silent else 0,
        streak.silent_values + values if is_silent else 0.0,
    )
