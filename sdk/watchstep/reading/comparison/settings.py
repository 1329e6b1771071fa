"""Settings that differ between runs: hyperparameters over the steps, the environment of their attempts and their capture configuration."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from watchstep.format.statistics import Floats
from watchstep.format.tensors import METRICS, TensorInfo
from watchstep.reading.columns import NO_CUT, Selection
from watchstep.reading.queries import loss_values
from watchstep.reading.run import Run

_HYPERPARAMETER = re.compile(
    r"(?:.*\.)?optimizer(?:_\d+)?:(?:learning_rate|momentum|beta1|beta2|weight_decay)/.*", re.DOTALL
)
"""Names of the metrics that recorders write for each parameter group of an optimizer, when a value changes."""

_FIGURES = ("mean", "count", "nan", "pos_inf", "neg_inf")

SettingSource = Literal["hyperparameter", "environment", "config"]
SettingValue = str | float | bool | None
_Series = tuple[NDArray[np.int64], Floats]
"""Steps at which a hyperparameter was recorded, ascending, and its values. A value is valid until the next one."""


@dataclass(frozen=True)
class SettingDifference:
    """A setting that is not the same in all runs.

    Attributes:
        source: kind of the setting.
        name: its name; of nested ones the names joined by dots.
        values: its value in each run; None where it is not set.
        step: of a hyperparameter, the first step at which the values differ; None for a setting of the whole run.
    """

    source: SettingSource
    name: str
    values: tuple[SettingValue, ...]
    step: int | None = None

    def as_line(self, runs: Sequence[str]) -> str:
        """Format it as ``optimizer:learning_rate/0: 0.1 in a, 0.001 in b, from step 30 on``, with the names of the runs."""
        values = ", ".join(
            f"{'not set' if value is None else _text(value)} in {run}"
            for run, value in zip(runs, self.values, strict=True)
        )
        return f"{self.name}: {values}" + ("" if self.step is None else f", from step {self.step} on")


@dataclass(frozen=True)
class SettingDifferences:
    """What differs in the settings of runs.

    Attributes:
        differing: hyperparameters first, by step; then the environment and the capture configuration, by name.
        compared: kind of setting → number of settings that were compared.
    """

    differing: list[SettingDifference]
    compared: dict[SettingSource, int]


def is_hyperparameter(info: TensorInfo) -> bool:
    """Whether a tensor is a hyperparameter of an optimizer, which is recorded when it changes."""
    return METRICS in info.collections and _HYPERPARAMETER.fullmatch(info.name) is not None


def differing_settings(runs: Sequence[Run], steps: tuple[int, int] = (0, NO_CUT)) -> SettingDifferences:
    """Compare the settings of runs: hyperparameters at each step that all runs have, and those of the documents.

    Args:
        runs: at least one run.
        steps: first and last step.

    Raises:
        StoreError: a run cannot be read.
        OverBudgetError: reading exceeds the budget of a run.
    """
    series = [_hyperparameters(run) for run in runs]
    last = min(steps[1], *(run.index.step_range()[1] for run in runs))
    names = list(dict.fromkeys(name for of_run in series for name in of_run))
    differing = [
        setting
        for name in names
        if (setting := _compared(name, [of_run.get(name) for of_run in series], (steps[0], last))) is not None
    ]
    differing.sort(key=lambda setting: (-1 if setting.step is None else setting.step, setting.name))
    compared: dict[SettingSource, int] = {"hyperparameter": len(names)}
    documents: dict[SettingSource, list[dict[str, SettingValue]]] = {
        "environment": [dict(_flattened("", run.environment())) for run in runs],
        "config": [dict(_flattened("", run.document.config)) for run in runs],
    }
    for source, by_run in documents.items():
        keys = sorted({key for values in by_run for key in values})
        compared[source] = len(keys)
        for key in keys:
            values = tuple(of_run.get(key) for of_run in by_run)
            if any(value != values[0] for value in values[1:]):
                differing.append(SettingDifference(source, key, values))
    return SettingDifferences(differing, compared)


def _hyperparameters(run: Run) -> dict[str, _Series]:
    """Return the hyperparameters of a run, as its first worker recorded them."""
    infos = run.index.tensors()
    names = frozenset(info.name for info in infos if is_hyperparameter(info))
    if not names:
        return {}
    columns = run.index.consistently(lambda: run.index.collect(Selection(_FIGURES, names)))
    values = loss_values(columns)
    found: dict[str, _Series] = {}
    for place, info in enumerate(infos):
        rows = np.flatnonzero(columns["tensor"] == place)
        if info.name not in names or not len(rows):
            continue
        rows = rows[columns["worker"][rows] == columns["worker"][rows].min()]
        rows = rows[np.argsort(columns["step"][rows], kind="stable")]
        found[info.name] = columns["step"][rows].astype(np.int64), values[rows]
    return found


def _compared(
    name: str, series: Sequence[_Series | None], steps: tuple[int, int]
) -> SettingDifference | None:
    """Return where a hyperparameter first differs; None if it does not."""
    recorded = [of_run for of_run in series if of_run is not None]
    if len(recorded) < len(series):
        values = tuple(None if of_run is None else _value(of_run[1][0]) for of_run in series)
        return SettingDifference("hyperparameter", name, values)
    first = max(steps[0], *(int(of_steps[0]) for of_steps, _ in recorded))
    changes = np.unique(np.concatenate([[first], *(of_steps for of_steps, _ in recorded)]))
    changes = changes[(changes >= first) & (changes <= steps[1])]
    at = [of_values[np.searchsorted(of_steps, changes, "right") - 1] for of_steps, of_values in recorded]
    differs = np.flatnonzero(
        np.any([~((values == at[0]) | (np.isnan(values) & np.isnan(at[0]))) for values in at], axis=0)
    )
    if not len(differs):
        return None
    place = int(differs[0])
    values = tuple(_value(values[place]) for values in at)
    return SettingDifference("hyperparameter", name, values, int(changes[place]))


def _value(value: float) -> SettingValue:
    return float(value) if math.isfinite(value) else str(value)


def _text(value: SettingValue) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _flattened(prefix: str, value: Any) -> Iterator[tuple[str, SettingValue]]:
    """Yield the leaves of JSON data by their path; lists are leaves, as text."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _flattened(f"{prefix}.{name}" if prefix else str(name), part)
    elif isinstance(value, bool | str) or value is None:
        yield prefix, value
    elif isinstance(value, int | float) and abs(value) < 2**53:  # also false for NaN
        yield prefix, float(value)
    else:
        yield prefix, json.dumps(value, default=str)
