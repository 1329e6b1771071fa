"""Steps that take far longer than the others, often enough to cost much time."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep.format.system_figures import STEP_SECONDS
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.series import Trail
from watchstep_rules.signals.system_samples import means, series_name, surely_above

_FEWEST = 6  # rows from which on their median says what is usual
_LEAST_FACTOR = 2.0  # rows know powers of two: less than that they cannot tell
_DIGITS = 9


class StepOutlierParams(Params):
    """Parameters of `StepOutlier`."""

    stddev: float = Field(
        3.0, gt=0, description="Standard deviations above the usual from which on a step is one."
    )
    n_outliers: int = Field(10, ge=1, description="So many of them within the window.")
    lost: float = Field(10.0, ge=0, le=100, description="Percent of all time that they take more than usual.")
    window: int = Field(60, ge=1, le=1000, description="Rows that count; one comes every ten seconds.")


class Slow(NamedTuple):
    """Of the last rows of a worker, older ones for less and less: outliers, seconds they cost, seconds in all."""

    outliers: float = 0.0
    lost: float = 0.0
    spent: float = 0.0

    def after(self, outliers: float, lost: float, spent: float, kept: float) -> Slow:
        """With another row."""
        return Slow(
            round(self.outliers * kept + outliers, _DIGITS),
            round(self.lost * kept + lost, _DIGITS),
            round(self.spent * kept + spent, _DIGITS),
        )


class StepOutlierState(State):
    """By ``figure@worker/mode``."""

    slow: dict[str, Slow] = Field(default_factory=dict)


class StepOutlier(Rule[StepOutlierParams, StepOutlierState]):
    """Fires when steps that take far longer than the others come often, and cost a tenth of the time.

    Over the rows of the window before a row, centre is the median of their means, and spread the larger of the median of
    their standard deviations and 1.4826 times the median distance of their means from the centre (both robust: Rousseeuw
    and Croux, 1993). An outlier takes::

        seconds >= max(centre + stddev * spread, 2 * centre)

    At least n_outliers of the last rows' steps must be some, and what the rows that hold them take beyond the centre must
    be ``lost`` percent of all time: checkpoints and compilation are long too, and cost little. Steps with an evaluation in
    them are not sampled. Three standard deviations and ten outliers are SageMaker's StepOutlier, which takes the mean and
    the deviation of all steps, outliers included.

    Off by default: programs whose batches differ in length have such steps, and nothing is wrong.
    """

    name = "step_outlier"
    summary = "some steps take far longer than the others, and cost much time"
    needs = Needs(collections=("system",), roles=("system",), histograms=True)
    merge = "per_worker"
    usual_causes = (
        "the data loader stalls at times: the end of an epoch, a slow file, a cold cache",
        "checkpoints or logs are written while training waits",
        "the model is compiled anew for every new shape",
        "another rank or program holds this one up",
    )
    what_to_try = (
        "compare the steps with system/data_wait and system/node_io_stall, if the run records them",
        "write checkpoints more rarely, or beside training",
        "set TORCH_LOGS=recompiles, and pad batches to a few shapes",
        "compare the step times of all workers",
    )

    def lookback(self, params: StepOutlierParams) -> int:
        """The window."""
        return params.window

    def evaluate(
        self, params: StepOutlierParams, state: StepOutlierState, context: Block, block: Block, now: int
    ) -> tuple[StepOutlierState, list[Finding]]:
        """Judge each row by the window before it."""
        held = block.statistics
        centre, limit = _usual(params, context, block)
        outliers = surely_above(held, limit)
        spent = np.where(held.finite > 0, held.mean * held.finite, 0.0)
        lost = np.where(outliers > 0, np.maximum(spent - centre * held.finite, 0.0), 0.0)
        slow, findings, kept = dict(state.slow), [], math.exp(-1 / params.window)
        judged = block.mask_of_tensors([info.name == STEP_SECONDS for info in block.catalogue])
        for row in map(int, np.flatnonzero(judged & np.isfinite(limit) & (spent > 0))):
            name = series_name(block, row)
            now_is = slow[name] = slow.get(name, Slow()).after(
                float(outliers[row]), float(lost[row]), float(spent[row]), kept
            )
            if (
                outliers[row]
                and now_is.outliers >= params.n_outliers
                and 100 * now_is.lost >= params.lost * now_is.spent
            ):
                seen = (float(held.max[row]), float(limit[row]), 100 * now_is.lost / now_is.spent)
                findings.append(self._finding(block, row, float(centre[row]), seen))
        return StepOutlierState(slow=slow), findings

    def _finding(self, block: Block, row: int, centre: float, seen: tuple[float, float, float]) -> Finding:
        longest, limit, lost = seen
        message = (
            f"{block.info(row).name}: steps of up to {longest:.3g} s, where {centre:.3g} s are usual; such steps cost "
            f"{lost:.0f} % of the time lately"
        )
        return finding_at(self.name, block, row, value=longest, threshold=limit, message=message)


def _usual(params: StepOutlierParams, context: Block, block: Block) -> tuple[Floats, Floats]:
    """What a step takes, and what an outlier takes at least, by the rows before each row; NaN where there are too few."""
    trail = Trail.of(context, block)
    before = range(1, params.window + 1)
    columns = trail.column(means), trail.column(_stds)
    means_before, stds_before = (np.array([trail.back(column, row) for row in before]) for column in columns)
    known = (~np.isnan(means_before)).sum(axis=0) >= min(_FEWEST, params.window)
    centre, limit = np.full((2, len(block)), np.nan)
    if known.any():
        centre[known] = np.nanmedian(means_before[:, known], axis=0)
        apart = 1.4826 * np.nanmedian(np.abs(means_before[:, known] - centre[known]), axis=0)
        spread = np.fmax(np.nanmedian(stds_before[:, known], axis=0), apart)
        limit[known] = np.maximum(centre[known] + params.stddev * spread, _LEAST_FACTOR * centre[known])
    return centre, np.where(limit > 0, limit, np.nan)


def _stds(block: Block) -> Floats:
    held = block.statistics
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(held.nonfinite == 0, np.sqrt(held.m2 / held.finite), np.nan)
