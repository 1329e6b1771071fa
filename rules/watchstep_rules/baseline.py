"""Run summaries and pinned baselines.

`summarize_run` reads a finished run with bounded memory and returns the span of each statistic in each phase. The service merges such
summaries to a baseline, and stores it as an object before it judges the first rows of an attempt. The object never changes. A
backtest reads the same object, so it judges the attempt as it was judged live.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import FormatError, NotFoundError
from watchstep.format.documents import parse_json
from watchstep.format.layout import baseline_document
from watchstep.format.tensors import MODES, TensorInfo
from watchstep.reading import queries
from watchstep.reading.columns import Columns, Selection
from watchstep.reading.run import Run
from watchstep.store.store import Store
from watchstep_rules.builtin.tensors.unlike_earlier_runs import UnlikeEarlierRuns
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.signals.baseline import (
    BASELINE_COLLECTIONS,
    MAX_PHASES,
    MAX_TENSORS,
    Baseline,
    BaselineRun,
    BaselineTensor,
    Span,
    Statistic,
    statistic_of,
)

_ROWS_PER_PHASE = 500_000
"""Rows of a phase that are read at once; of longer phases some spans of steps, evenly spaced, are read."""

_SPANS = 4
_LOW, _HIGH = 0.05, 0.95
_MODES = (MODES.index("train"), MODES.index("global"))


def summarize_run(run: Run) -> BaselineRun:
    """Reduce a run to the spans of its statistics.

    Steps of the newest attempt are read, in train mode, and those of no mode. Shards are merged, and of replicas the first is taken.

    Args:
        run: finished or not.

    Raises:
        StoreError: the store cannot be read.
    """
    infos = run.index.tensors()
    chosen = _chosen(infos)
    spans: dict[str, dict[int, Span]] = {infos[place].name: {} for place in chosen}
    for phase, columns in _columns_by_phase(run):
        rows = _judged_rows(columns)
        order = rows[np.argsort(columns["tensor"][rows], kind="stable")]
        tensors = columns["tensor"][order]
        for own in np.split(order, np.flatnonzero(np.diff(tensors)) + 1):
            place = int(columns["tensor"][own[0]]) if len(own) else -1
            if place not in chosen:
                continue
            values = columns[chosen[place]][own]
            values = values[np.isfinite(values)]
            if len(values):
                low, high = (float(value) for value in np.quantile(values, [_LOW, _HIGH]))
                spans[infos[place].name][phase] = (low, high)
    return BaselineRun(
        tensors={
            infos[place].name: BaselineTensor(
                shape=infos[place].shape,
                statistic=statistic,
                phases=tuple(
                    spans[infos[place].name].get(phase) for phase in range(_end(spans[infos[place].name]))
                ),
            )
            for place, statistic in chosen.items()
            if spans[infos[place].name]
        }
    )


def _chosen(infos: Sequence[TensorInfo]) -> dict[int, Statistic]:
    """Place of a tensor among the run's → its statistic; losses first, then by the model's order."""
    rank = {name: place for place, (name, _) in enumerate(BASELINE_COLLECTIONS)}
    judged = {
        place: statistic for place, info in enumerate(infos) if (statistic := statistic_of(info)) is not None
    }
    order = sorted(
        judged, key=lambda place: min(rank[name] for name in infos[place].collections if name in rank)
    )
    return {place: judged[place] for place in order[:MAX_TENSORS]}


def _end(spans: Mapping[int, Span]) -> int:
    return max(spans, default=-1) + 1


def _judged_rows(columns: Columns) -> NDArray[np.intp]:
    """Rows in train mode and of no mode, of the first replica, and of the lowest worker that has the tensor."""
    rows = np.flatnonzero(np.isin(columns["mode"], _MODES) & (columns["replica"] == 0))
    lowest = np.full(int(columns["tensor"].max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(lowest, columns["tensor"][rows], columns["worker"][rows])
    chosen: NDArray[np.intp] = rows[columns["worker"][rows] == lowest[columns["tensor"][rows]]]
    return chosen


def _columns_by_phase(run: Run) -> Iterator[tuple[int, Columns]]:
    first, last = run.index.step_range()
    for phase in range(MAX_PHASES):
        start, end = 2**phase - 1, 2 ** (phase + 1) - 2
        if start > last or end < first:
            continue
        yield phase, _phase_columns(run, start, min(end, last))


def _phase_columns(run: Run, start: int, end: int) -> Columns:
    """The statistics of the steps from ``start`` to ``end``; of some spans of them where there are too many rows."""
    tensors = max(1, len(run.index.tensors()) * max(1, len(run.workers)))
    steps = max(_SPANS, _ROWS_PER_PHASE // tensors)
    if end - start + 1 <= steps:
        return _read(run, start, end)
    length = steps // _SPANS
    starts = np.linspace(start, end - length + 1, _SPANS).astype(np.int64)
    parts = [_read(run, int(begin), int(begin) + length - 1) for begin in starts]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _read(run: Run, first: int, last: int) -> Columns:
    want = Selection((), None, first, last)
    return run.index.consistently(lambda: queries.columns_of(run.index, ("mean", "rms"), want, merge=True))


MAX_BYTES = 4 * 1024 * 1024
_MAX_MEMORY = 64 * 1024 * 1024


def read_baseline(run_store: Store, attempt: str) -> str | None:
    """The JSON text of an attempt's baseline; None where none was pinned.

    Raises:
        FormatError: the object is not a baseline.
        StoreError: the store cannot be read.
    """
    key = baseline_document(attempt)
    try:
        data = run_store.get(key, limit=MAX_BYTES)
    except NotFoundError:
        return None
    try:
        return Baseline.model_validate(parse_json(data, _MAX_MEMORY)).model_dump_json()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{key}: not a baseline ({type(error).__name__})", "remove the object") from error


def with_baseline(config: RuleConfig, baseline: str | None) -> RuleConfig:
    """A rule config with the baseline of an attempt; itself where it has one of its own, or is of another rule.

    Args:
        config: the rule config.
        baseline: as JSON text, checked before; None where the attempt has none.
    """
    if baseline is None or config.rule != UnlikeEarlierRuns.name or "baseline" in config.params:
        return config
    return _with_baseline(config.model_dump_json(by_alias=True), baseline)


def configs_of_attempt(
    configs: Sequence[RuleConfig], run_store: Store, attempt: str
) -> tuple[list[RuleConfig], str]:
    """The rule configs as they judge an attempt.

    Returns:
        The configs, and what is wrong with the attempt's baseline; empty where nothing is.

    Raises:
        StoreError: the store cannot be read.
    """
    if not any(config.rule == UnlikeEarlierRuns.name for config in configs):
        return list(configs), ""
    try:
        baseline = read_baseline(run_store, attempt)
    except FormatError as error:
        return list(configs), error.what
    return [with_baseline(config, baseline) for config in configs], ""


@functools.lru_cache(maxsize=64)
def _with_baseline(config: str, baseline: str) -> RuleConfig:
    plain = RuleConfig.model_validate_json(config)
    params = {**plain.params, "baseline": Baseline.model_validate_json(baseline).model_dump(mode="json")}
    return plain.model_copy(update={"params": params})
