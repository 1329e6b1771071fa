"""A learning rate or a weight decay that jumped far above all earlier values, and its effect on the training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from watchstep.format.block import Block
from watchstep.format.statistics import Floats, rms
from watchstep.format.tensors import TensorInfo
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.loss_series import LossSeries, first_steps, is_whole, loss_series
from watchstep_rules.signals.robust import medians, robust_spread
from watchstep_rules.signals.series import probe
from watchstep_rules.signals.tensor_selection import is_matrix_of, rows_where

_NAME = re.compile(r"(?:.*\.)?optimizer(?:_\d+)?:(learning_rate|weight_decay)/")
_SPAN = 50
_WINDOW = 30
_LAST = 10
_ABOVE = 8


class HyperparameterJumpParams(Params):
    """Parameters of `HyperparameterJump`."""

    factor: float = Field(
        10.0, gt=1, description="Ratio to the largest earlier value at which a value is a jump."
    )
    warmup: int = Field(20, ge=1, le=1000, description="Fewest steps before a jump.")
    patience: int = Field(500, ge=1, description="Steps after a jump within which harm is attributed to it.")
    deviations: float = Field(
        3.0, gt=0, description="Robust standard deviations by which the loss exceeds its level."
    )
    rise: float = Field(0.2, ge=0, description="Share of the level by which the loss exceeds it.")
    large: float = Field(
        0.3, gt=0, description="Median relative update above which a learning rate is harmful."
    )
    shrunk: float = Field(
        0.7,
        gt=0,
        lt=1,
        description="Median share of their earlier size below which a weight decay has shrunk the weights.",
    )


class Level(BaseModel):
    """A loss since a jump.

    Attributes:
        limit: value above which the loss is harmed; None if there were too few losses before the jump.
        level: median of the loss before the jump.
        above: bit mask of the last losses above the limit; the newest is the lowest bit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    limit: float | None = None
    level: float = 0.0
    above: int = 0

    def after(self, value: float) -> Level:
        """Add a loss; NaN if it was not finite."""
        if self.limit is None:
            return self
        is_above = value > self.limit or np.isnan(value)
        return self.model_copy(update={"above": ((self.above << 1) | int(is_above)) & ((1 << _LAST) - 1)})

    @property
    def is_harmed(self) -> bool:
        """Whether most of the last losses were above the limit."""
        return self.above.bit_count() >= _ABOVE


class PendingJump(BaseModel):
    """A jump with an effect that is not known yet.

    Attributes:
        name: the metric; of several that jumped at one step, the one that rose most.
        step: step of the first update with the new value.
        before: largest value before.
        after: new value, or a greater value that followed.
        losses: losses since the jump, by ``name/mode``.
        sizes: for a weight decay, the first rms of each weight since the jump.
        is_harmed: whether a loss has been harmed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    step: int
    before: float
    after: float
    losses: dict[str, Level] = Field(default_factory=dict)
    sizes: dict[str, float] = Field(default_factory=dict)
    is_harmed: bool = False

    @property
    def is_of_rate(self) -> bool:
        """Whether a learning rate jumped, and not a weight decay."""
        return ":learning_rate/" in self.name

    @property
    def text(self) -> str:
        """The jump as text."""
        ratio = self.after / self.before
        return (
            f"{self.name} went to {self.after:.3g} at step {self.step}, {ratio:.3g} times its largest before"
        )


class Peak(BaseModel):
    """The largest values of a positive hyperparameter.

    Attributes:
        since: step of the first value.
        recent: indices of spans of `_SPAN` steps, and the largest value up to the end of each, ascending: the last two spans and one before.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    since: int
    recent: tuple[tuple[int, float], ...]

    def reference(self, step: int) -> float:
        """Return the largest value up to the second to last span, or of all earlier values if there is no such span."""
        older = [largest for span, largest in self.recent if span <= step // _SPAN - 2]
        return older[-1] if older else self.recent[-1][1]

    def after(self, step: int, value: float) -> Peak:
        """Add a value."""
        now, largest = step // _SPAN, max(value, self.recent[-1][1])
        if largest == self.recent[-1][1]:
            return self
        older = [entry for entry in self.recent if entry[0] <= now - 2][-1:]
        newer = [entry for entry in self.recent if now - 2 < entry[0] < now]
        return Peak(since=self.since, recent=(*older, *newer, (now, largest)))


class HyperparameterJumpState(State):
    """State of `HyperparameterJump`: the peak of each hyperparameter, the last jump, and the step of each loss's first row."""

    peaks: dict[str, Peak] = Field(default_factory=dict)
    jump: PendingJump | None = None
    names: dict[str, int] = Field(default_factory=dict)


class HyperparameterJump(Rule[HyperparameterJumpParams, HyperparameterJumpState]):
    """Fires when a learning rate or weight decay of a parameter group jumps during a run, and the training suffers.

    A *jump* is a value of ``factor`` times the largest value of the group 50 to 100 steps before, at least ``warmup`` steps after its first
    value above zero; in the first hundred steps, ``factor`` times the largest value before. A return to an earlier value is not a jump: warm
    restarts, cycles, a restarted schedule. Neither is a rise over hundreds of steps, as in one-cycle and warm-up schedules, nor a rise from
    zero. A jump alone does not make the rule fire, because a warm-up with few stages, or a second phase with other rates, may contain it.
    Within ``patience`` steps it must be followed by one of:

    - 8 of the last 10 training losses are above ``level + max(deviations * spread, rise * |level|)``, with the median and the robust
      spread (Hampel 1974) of the 30 losses before the jump;
    - after a jump of the learning rate, the median over weight matrices of ``rms(update) / rms(weight)`` is above ``large``. Working
      trainings have values near 1e-3 (Karpathy, CS231n, 2015);
    - after a jump of the weight decay, the median size of weight matrices is below ``shrunk`` of the size before.

    The values are those that capture records automatically, ``optimizer:learning_rate/0`` and ``optimizer:weight_decay/0``. The history
    starts again when a training resumes from a checkpoint.
    """

    name = "hyperparameter_jump"
    summary = "a learning rate or weight decay jumps far above all earlier values, and the training suffers"
    needs = Needs(
        collections=("metrics", "losses", "updates", "weights"),
        roles=("metric", "loss", "update", "weight"),
        probes=("update_ratio",),
        about=("metric", "loss"),
        evidence_rows=0,
    )
    merge = "watermark"
    usual_causes = (
        "A schedule, or code that edits param_groups, sets a value in the wrong unit, or multiplies it at each call.",
        "A scheduler was recreated with a base rate other than the optimizer's.",
        "Learning rate and weight decay were swapped in a parameter group.",
    )
    what_to_try = (
        "Plot the series that the message names, and look at what the program does at that step.",
        "Restart from a checkpoint before that step, with the earlier value.",
        "If the jump is intended, raise factor, or disable the rule.",
    )
    cannot_distinguish = (
        "A harmful jump, from one that is followed by worse data.",
        "A jump to a value that the schedule had reached before is not detected.",
    )

    def lookback(self, params: HyperparameterJumpParams) -> int:
        """Return the number of losses before a jump."""
        return _WINDOW

    def evaluate(
        self,
        params: HyperparameterJumpParams,
        state: HyperparameterJumpState,
        context: Block,
        block: Block,
        now: int,
    ) -> tuple[HyperparameterJumpState, list[Finding]]:
        """Follow the values, and after a jump the losses, updates and weights."""
        series = loss_series(context, block, "train")
        names = first_steps(state.names, series)
        peaks, jump = dict(state.peaks), state.jump
        values = _values(block)
        if jump is None and not _may_jump(params, peaks, values):
            for hyperparameter in values:
                _follow(peaks, hyperparameter)
            return HyperparameterJumpState(peaks=peaks, names=names), []
        findings: dict[int, Finding] = {}
        for event in _events(block, values, series, names):
            if jump is not None and _is_over(params, jump, event.step):
                jump = None
            if isinstance(event, _Value):
                before = _follow(peaks, event)
                if before is not None and _is_jump(params, before, event):
                    reference = before.reference(event.step)
                    new = PendingJump(name=event.name, step=event.step, before=reference, after=event.value)
                    jump = _select_jump(jump, new)
            elif jump is not None:
                jump, harm = _check(params, block, jump, event)
                for row, value, limit, reason in harm:
                    message = f"{jump.text}; {reason}"
                    findings[row] = finding_at(
                        self.name, block, row, value=value, threshold=limit, message=message
                    )
        return HyperparameterJumpState(peaks=peaks, jump=jump, names=names), [
            findings[row] for row in sorted(findings)
        ]


class _Value(NamedTuple):
    """A value of a hyperparameter at a step."""

    step: int
    name: str
    value: float


class _Loss(NamedTuple):
    """A loss at a step, as an index into a series."""

    step: int
    series: LossSeries
    place: int


class _Tensors(NamedTuple):
    """Rows of a step's updates and weights."""

    step: int
    rows: NDArray[np.intp]


_Event = _Value | _Loss | _Tensors
_Harm = tuple[int, float, float, str]


def _values(block: Block) -> list[_Value]:
    """Return positive hyperparameters by step and name, then by value (over workers)."""
    rows = np.flatnonzero(rows_where(block, _is_hyperparameter) & (block.mode == 0))
    if not len(rows):
        return []
    statistics = block.statistics
    return sorted(
        _Value(int(block.step[row]), block.info(row).name, float(statistics.mean[row]))
        for row in rows.tolist()
        if statistics.finite[row] > 0 and 0 < statistics.mean[row] < np.inf
    )


def _is_hyperparameter(info: TensorInfo) -> bool:
    return info.role == "metric" and _NAME.match(info.name) is not None


def _follow(peaks: dict[str, Peak], value: _Value) -> Peak | None:
    """Add a value to the peaks; return the peak before it, None for the first value."""
    before = peaks.get(value.name)
    if before is None:
        peaks[value.name] = Peak(since=value.step, recent=((value.step // _SPAN, value.value),))
    else:
        peaks[value.name] = before.after(value.step, value.value)
    return before


def _is_jump(params: HyperparameterJumpParams, before: Peak, value: _Value) -> bool:
    long_enough = value.step >= before.since + params.warmup
    return long_enough and value.value >= params.factor * before.reference(value.step)


def _may_jump(params: HyperparameterJumpParams, peaks: dict[str, Peak], values: list[_Value]) -> bool:
    lowest = {name: peak.recent[0][1] for name, peak in peaks.items()}
    return any(value.value >= params.factor * lowest.setdefault(value.name, value.value) for value in values)


def _select_jump(jump: PendingJump | None, new: PendingJump) -> PendingJump:
    """Return which of two jumps to follow: a harmful one, else the first of close ones; at the same step, the larger."""
    if jump is None or (new.step > jump.step + 2 * _SPAN and not jump.is_harmed):
        return new
    if new.step == jump.step:
        return new if new.after / new.before > jump.after / jump.before else jump
    if new.name == jump.name and new.after > jump.after and not jump.is_harmed:
        return jump.model_copy(update={"after": new.after})
    return jump


def _events(
    block: Block, values: list[_Value], series: list[LossSeries], names: dict[str, int]
) -> Iterator[_Event]:
    """Yield the events of a block by step: values, then updates and weights, then losses."""
    events: list[tuple[int, int, int, _Event]] = [(value.step, 0, 0, value) for value in values]
    is_matrix = rows_where(block, is_matrix_of, "update") | rows_where(block, is_matrix_of, "weight")
    rows = np.flatnonzero(is_matrix & (block.mode == 0))
    rows = rows[np.argsort(block.step[rows], kind="stable")]
    for part in np.split(rows, np.flatnonzero(np.diff(block.step[rows])) + 1):
        if len(part):
            step = int(block.step[part[0]])
            events.append((step, 1, 0, _Tensors(step, part)))
    for number, losses in enumerate(series):
        for index in np.flatnonzero(is_whole(losses, names)).tolist():
            step = int(losses.steps[index])
            events.append((step, 2, number, _Loss(step, losses, index)))
    for _, _, _, event in sorted(events, key=lambda event: event[:3]):
        yield event


def _is_over(params: HyperparameterJumpParams, jump: PendingJump, step: int) -> bool:
    """Return whether a jump is no longer followed: it caused no harm in time, or the losses have recovered."""
    late = step > jump.step + params.patience
    return late and not (jump.is_harmed and any(level.above for level in jump.losses.values()))


def _check(
    params: HyperparameterJumpParams, block: Block, jump: PendingJump, event: _Loss | _Tensors
) -> tuple[PendingJump, list[_Harm]]:
    if isinstance(event, _Loss):
        return _check_loss(params, jump, event) if event.step > jump.step else (jump, [])
    if event.step < jump.step or event.step > jump.step + params.patience:
        return jump, []
    return (
        _check_updates(params, block, jump, event)
        if jump.is_of_rate
        else _check_weights(params, block, jump, event)
    )


def _check_loss(
    params: HyperparameterJumpParams, jump: PendingJump, event: _Loss
) -> tuple[PendingJump, list[_Harm]]:
    series, index = event.series, event.place
    tracked = jump.losses.get(series.key)
    if tracked is None:  # the first loss after the jump: all earlier ones precede the jump
        tracked = _level(params, np.concatenate([series.before, series.values[:index]])[-_WINDOW:])
    value = float(series.values[index])
    level = tracked.after(value)
    jump = jump.model_copy(
        update={
            "losses": {**jump.losses, series.key: level},
            "is_harmed": jump.is_harmed or level.is_harmed,
        }
    )
    if level.limit is None or not level.is_harmed:
        return jump, []
    reason = f"{series.name} is {value:.4g}, {level.above.bit_count()} of the last {_LAST} are above {level.limit:.4g}, and it was {level.level:.4g} before"
    return jump, [(int(series.rows[index]), np.inf if np.isnan(value) else value, level.limit, reason)]


def _level(params: HyperparameterJumpParams, before: Floats) -> Level:
    finite = before[np.isfinite(before)][None, :]
    if finite.shape[1] < min(params.warmup, _WINDOW):
        return Level()
    level, spread = float(medians(finite)[0]), float(robust_spread(finite)[0])
    with np.errstate(over="ignore"):
        limit = level + max(params.deviations * spread, params.rise * abs(level))
    return Level(limit=limit, level=level) if np.isfinite(limit) else Level()


def _check_updates(
    params: HyperparameterJumpParams, block: Block, jump: PendingJump, event: _Tensors
) -> tuple[PendingJump, list[_Harm]]:
    ratio = probe(block, "update_ratio")[event.rows]
    is_finite = np.isfinite(ratio)
    if not is_finite.any():
        return jump, []
    rows, ratio = event.rows[is_finite], ratio[is_finite]
    median = float(np.median(ratio))
    if not params.large < median < np.inf:
        return jump, []
    row = int(rows[np.argmax(ratio)])
    reason = f"{block.info(row).name} is {ratio.max():.2g} of the weight and the median {median:.2g}, near 1e-3 is usual"
    return jump, [(row, median, params.large, reason)]


def _check_weights(
    params: HyperparameterJumpParams, block: Block, jump: PendingJump, event: _Tensors
) -> tuple[PendingJump, list[_Harm]]:
    is_weight = rows_where(block, is_matrix_of, "weight")[event.rows]
    rows = event.rows[is_weight]
    if not len(rows):
        return jump, []
    with np.errstate(over="ignore", invalid="ignore"):
        size = rms(block.statistics)[rows]
    sizes, shares = dict(jump.sizes), []
    for row, current in zip(rows.tolist(), size.tolist(), strict=True):
        if 0 < current < np.inf:
            shares.append(current / sizes.setdefault(block.info(row).name, current))
    jump = jump.model_copy(update={"sizes": sizes})
    median = float(np.median(shares)) if shares else 1.0
    if median >= params.shrunk:
        return jump, []
    reason = f"{block.info(int(rows[0])).name} and others have shrunk since, the median to {median:.2g} of its size"
    return jump, [(int(rows[0]), median, params.shrunk, reason)]
