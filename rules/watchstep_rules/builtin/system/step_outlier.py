"""Steps that take far longer than the others and occur often enough to cost much time."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from pydantic import Field

from watchstep.format.block import Block
from watchstep.format.statistics import Floats
from watchstep.format.system_figures import STEP_SECONDS
from watchstep_rules.rule import Finding, Needs, Params, Rule, State, finding_at
from watchstep_rules.signals.series import LaggedRows
from watchstep_rules.signals.system_samples import means, series_name, surely_above

_FEWEST = 6  # rows for which the median is representative
_LEAST_FACTOR = 2.0  # the resolution of histograms over powers of two
_DIGITS = 9


class StepOutlierParams(Params):
    """Parameters of `StepOutlier`."""

    stddev: float = Field(
        3.0, gt=0, description="Standard deviations above the usual duration at which a step is an outlier."
    )
    n_outliers: int = Field(10, ge=1, description="Number of outliers within the window.")
    lost: float = Field(
        10.0, ge=0, le=100, description="Percent of all time that outliers cost beyond the usual duration."
    )
    window: int = Field(60, ge=1, le=1000, description="Rows in the window; one every ten seconds.")


class Slow(NamedTuple):
    """Sums over the last rows of a worker, with less weight for older rows: outliers, seconds they cost, and total seconds."""

    outliers: float = 0.0
    lost: float = 0.0
    spent: float = 0.0

    def after(self, outliers: float, lost: float, spent: float, kept: float) -> Slow:
        """Add a row."""
        return Slow(
            round(self.outliers * kept + outliers, _DIGITS),
            round(self.lost * kept + lost, _DIGITS),
            round(self.spent * kept + spent, _DIGITS),
        )


class StepOutlierState(State):
    """State of `StepOutlier`, by ``figure@worker/mode``."""

    slow: dict[str, Slow] = Field(default_factory=dict)


class StepOutlier(Rule[StepOutlierParams, StepOutlierState]):
    """Fires when steps that take far longer than the others are frequent and cost a tenth of the time.

    Over the rows of the window before a row, centre is the median of their means, and spread is the larger of the median of their standard
    deviations and 1.4826 times the median distance of their means from the centre (both robust: Rousseeuw and Croux, 1993). An outlier
    takes::

        seconds >= max(centre + stddev * spread, 2 * centre)

    At least ``n_outliers`` steps of the last rows must be outliers, and the time beyond the centre of the rows that contain them must be
    ``lost`` percent of all time; checkpoints and compilation also take long, but cost little. Steps with an evaluation are not sampled.
    Three standard deviations and ten outliers are those of SageMaker's StepOutlier, which uses the mean and deviation of all steps,
    including outliers.

    Off by default, because programs with batches of different length have such steps without a fault.
    """

    name = "step_outlier"
    summary = "some steps take far longer than the others, and cost much time"
    needs = Needs(collections=("system",), roles=("system",), histograms=True)
    merge = "per_worker"
    usual_causes = (
        "the data loader stalls at times: the end of an epoch, a slow file, a cold cache",
        "checkpoints or logs are written while training waits",
        "the model is recompiled for every new shape",
        "another rank or program delays this one",
    )
    what_to_try = (
        "compare the steps with system/data_wait and system/node_io_stall, if the run records them",
        "write checkpoints less often, or asynchronously",
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
        statistics = block.statistics
        centre, limit = _usual(params, context, block)
        outliers = surely_above(statistics, limit)
        spent = np.where(statistics.finite > 0, statistics.mean * statistics.finite, 0.0)
        lost = np.where(outliers > 0, np.maximum(spent - centre * statistics.finite, 0.0), 0.0)
        slow, findings, decay = dict(state.slow), [], math.exp(-1 / params.window)
        judged = block.mask_of_tensors([info.name == STEP_SECONDS for info in block.catalogue])
        for row in map(int, np.flatnonzero(judged & np.isfinite(limit) & (spent > 0))):
            name = series_name(block, row)
            current = slow[name] = slow.get(name, Slow()).after(
                float(outliers[row]), float(lost[row]), float(spent[row]), decay
            )
            if (
                outliers[row]
                and current.outliers >= params.n_outliers
                and 100 * current.lost >= params.lost * current.spent
            ):
                duration = (float(statistics.max[row]), float(limit[row]), 100 * current.lost / current.spent)
                findings.append(self._finding(block, row, float(centre[row]), duration))
        return StepOutlierState(slow=slow), findings

    def _finding(
        self, block: Block, row: int, centre: float, duration: tuple[float, float, float]
    ) -> Finding:
        longest, limit, lost = duration
        message = (
            f"{block.info(row).name}: steps of up to {longest:.3g} s, usually {centre:.3g} s; such steps cost "
            f"{lost:.0f} % of the recent time"
        )
        return finding_at(self.name, block, row, value=longest, threshold=limit, message=message)


def _usual(params: StepOutlierParams, context: Block, block: Block) -> tuple[Floats, Floats]:
    """The usual duration of a step and the minimum duration of an outlier, from the rows before each row; NaN if there are too few."""
    lagged = LaggedRows.of(context, block)
    before = range(1, params.window + 1)
    columns = lagged.column(means), lagged.column(_stds)
    means_before, stds_before = (np.array([lagged.lag(column, row) for row in before]) for column in columns)
    has_enough = (~np.isnan(means_before)).sum(axis=0) >= min(_FEWEST, params.window)
    centre, limit = np.full((2, len(block)), np.nan)
    if has_enough.any():
        centre[has_enough] = np.nanmedian(means_before[:, has_enough], axis=0)
        distance = 1.4826 * np.nanmedian(np.abs(means_before[:, has_enough] - centre[has_enough]), axis=0)
        spread = np.fmax(np.nanmedian(stds_before[:, has_enough], axis=0), distance)
        limit[has_enough] = np.maximum(
            centre[has_enough] + params.stddev * spread, _LEAST_FACTOR * centre[has_enough]
        )
    return centre, np.where(limit > 0, limit, np.nan)


def _stds(block: Block) -> Floats:
    statistics = block.statistics
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(statistics.nonfinite == 0, np.sqrt(statistics.m2 / statistics.finite), np.nan)
