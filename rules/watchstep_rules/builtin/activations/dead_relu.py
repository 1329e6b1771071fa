"""A layer of rectifiers most of which never fire again."""

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
from watchstep_rules.signals.nonfinite import has_probe
from watchstep_rules.signals.series import SeriesRows, in_training, step_numbers
from watchstep_rules.signals.tensor_selection import after_last_layer, has_role, rows_where

_LEARNS = 0.75
"""Share of its first value to which a loss has come down where the last rectifier does not keep the model from learning."""
_SETTLING = 50
"""Steps in which a loss may come down so far, as those of `vanishing_gradient`."""


class DeadReluParams(Params):
    """Parameters of `DeadRelu`."""

    share: float = Field(0.9, gt=0, le=1, description="Share of dead channels that is a dead layer.")
    silent_share: float = Field(
        0.5, gt=0, le=1, description="The same, where no layer of the model gets any gradient."
    )
    steps: int = Field(3, ge=1, description="Records in a row through which that holds …")
    examples: int = Field(32, ge=1, description="… and values of each channel that they saw together.")
    converged: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of its first value at which a loss has converged, and no gradient is no fault.",
    )


class DeadStreak(NamedTuple):
    """Records in a row of one layer, and values of each channel in them: of a dead layer, and of a silent one."""

    steps: int = 0
    values: float = 0.0
    silent_steps: int = 0
    silent_values: float = 0.0


class DeadReluState(State):
    """Streaks under way by ``tensor@worker``, workers' losses by ``loss@worker``, and parameters without any gradient.

    ``began``: the first step, None before it.
    """

    streaks: dict[str, DeadStreak] = Field(default_factory=dict)
    losses: dict[str, LossProgress] = Field(default_factory=dict)
    silent: dict[str, bool] = Field(default_factory=dict)
    began: int | None = None


class DeadRelu(Rule[DeadReluParams, DeadReluState]):
    """Fires when most channels of a rectifier's output are zero for every example, record after record.

    ``dead_channels / channels`` must reach ``share`` through ``steps`` records in a row that saw ``examples`` values of
    each channel; or half the channels, if meanwhile no weight of the model gets any gradient and the loss is not down
    to a tenth of its start: then learning has died, whatever the other half does.

    A rectifier that is computed after the last weighted layer (a penalty on what exceeds a bound, an output that is never negative) may well be zero: it is judged
    by ``share`` only after the first 50 steps, and until some loss has come down by a quarter, as `saturated_activation` does with the last activation.

    Half of all channels is the limit of SageMaker's DeadRelu, which healthy sparse networks pass: of randomly
    initialised units half are off for an example, and of small batches many are off altogether (Glorot, Bordes and
    Bengio 2011 report up to 80 percent zeros in good networks). That is why 90 percent are asked for, and why small
    batches must agree over 32 examples. A layer that is all dead passes no gradient back (Lu et al. 2019, "Dying ReLU
    and Initialization").
    """

    name = "dead_relu"
    summary = "nearly all channels of a rectifier are zero for every example, and stay so"
    needs = Needs(
        collections=("activations", "gradients", "losses"),
        roles=("output", "gradient", "loss"),
        probes=("channels",),
        about=("output",),
    )
    merge = "sealed"
    usual_causes = (
        "The learning rate is too high: one large step pushed the units below zero for every input.",
        "Biases began negative, or weights too large.",
        "Inputs are not centred, or are all of one sign.",
    )
    what_to_try = (
        "Lower the learning rate, or warm it up.",
        "Use LeakyReLU, ELU or GELU, which pass a gradient below zero.",
        "Initialise by torch.nn.init.kaiming_normal_, and biases by zero.",
        "Normalise inputs, or put a normalisation layer before the activation.",
    )
    cannot_distinguish = (
        "A layer that is meant to be sparser than a tenth of its channels, such as a wide dictionary or a hard gate, from one that died.",
        "Examples that are all alike, for instance padding or one class, from units that are off for every input.",
        "Rectifiers that are functions (torch.relu in forward) are not seen without the probe function_calls.",
    )

    def conclusive(self, params: DeadReluParams, block: Block) -> NDArray[np.bool_]:
        """Rows whose channels were counted."""
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
            if found := self._judge(params, block, row, float(share[place]), streak):
                findings[row] = found
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
        said = f"{share:.0%} of {channels} channels of {block.info(row).name} are zero for every example"
        if streak.steps >= params.steps and streak.values >= params.examples:
            message = f"{said}, at least {params.share:.0%} for {streak.steps} records in a row"
            return finding_at(self.name, block, row, value=share, threshold=params.share, message=message)
        if streak.silent_steps >= params.steps and streak.silent_values >= params.examples:
            message = f"{said}, and no weight had any gradient for {streak.silent_steps} records in a row"
            return finding_at(
                self.name, block, row, value=share, threshold=params.silent_share, message=message
            )
        return None


def _follow(
    kept: dict[str, DeadStreak],
    layers: Block,
    is_dead: NDArray[np.bool_],
    is_silent: NDArray[np.bool_],
    channels: Floats,
) -> tuple[dict[str, DeadStreak], dict[int, DeadStreak]]:
    """The streaks to be kept, and that of each row in one."""
    rows = SeriesRows.of(layers)
    streaks, found = dict(kept), {}
    hit = is_dead | is_silent
    goes_on = rows.before(hit, first=True)
    for row in rows.order[hit[rows.order]].tolist():
        name = rows.names[rows.series[row]]
        before = streaks.get(name, DeadStreak()) if goes_on[row] else DeadStreak()
        values = float(layers.statistics.count[row] / channels[row])
        found[row] = streaks[name] = _after(
            before, values, is_dead=bool(is_dead[row]), is_silent=bool(is_silent[row])
        )
    for name, last in zip(rows.names, rows.last(hit), strict=True):
        if not last:
            streaks.pop(name, None)
    return streaks, found


def _silence(
    kept: dict[str, bool], block: Block, numbers: NDArray[np.intp]
) -> tuple[dict[str, bool], NDArray[np.bool_]]:
    """Which parameters had no gradient at all when it was last seen, and whether that is all of them, by step."""
    rows = np.flatnonzero(rows_where(block, _is_parameters))
    rows = rows[block.statistics.finite[rows] > 0]
    steps = int(numbers[-1]) + 1 if len(numbers) else 0
    by_series = SeriesRows.of(view(block, rows))
    alive = (block.statistics.abs_sum[rows] != 0).astype(np.int64)
    # Counted: how many are alive, and how many known, change from row to row.
    known = np.array([name in kept for name in by_series.names], np.int64)
    was = np.array([not kept.get(name, True) for name in by_series.names], np.int64)
    change = alive - by_series.before(alive, was)
    new = 1 - by_series.before(np.ones(len(rows), np.int64), known)
    alive_now = sum(not one for one in kept.values()) + _by_step(change, numbers[rows], steps)
    known_now = len(kept) + _by_step(new, numbers[rows], steps)
    silent = {
        **kept,
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
