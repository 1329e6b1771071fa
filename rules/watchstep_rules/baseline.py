"""Run summaries and pinned baselines.

`summarize_run` reads a finished run with bounded memory and returns the span of each statistic in each phase. The service merges such
summaries into a baseline, and stores it as an object before it evaluates the first rows of an attempt. The object never changes. A
backtest reads the same object, so its result equals the live evaluation.
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
from watchstep.reading.budget import ReadBudget
from watchstep.reading.columns import Columns, Selection
from watchstep.reading.run import Run
from watchstep.store.store import Store
from watchstep_rules.builtin.tensors.unlike_earlier_runs import UnlikeEarlierRuns
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.signals.baseline import (
    BASELINE_COLLECTIONS,
    MAX_DIMENSIONS,
    MAX_PHASES,
    MAX_TENSORS,
    Baseline,
    BaselineRun,
    BaselineTensor,
    Span,
    Statistic,
    architecture_of,
    statistic_of,
)

_ROWS_PER_PHASE = 500_000
"""Maximum number of rows read for a phase. Of longer phases, evenly spaced spans of steps are read."""

_SECONDS, _MEGABYTES = 600, 512
"""Limits of reading a span of steps, because the rows of a step are not limited: shards have a row each."""

_SPANS = 4
_LOW, _HIGH = 0.05, 0.95
_MODES = (MODES.index("train"), MODES.index("global"))


def summarize_run(run: Run) -> BaselineRun:
    """Reduce a run to the spans of its statistics.

    Reads steps of the newest attempt, in train mode and without a mode. Merges shards, and uses the first replica.

    Args:
        run: the run, finished or not.

    Raises:
        OverBudgetError: some steps have too many rows.
        StoreError: the store cannot be read.
    """
    infos = run.index.tensors()
    chosen = _chosen(infos)
    spans: dict[str, dict[int, Span]] = {infos[index].name: {} for index in chosen}
    for phase, columns in _columns_by_phase(run):
        rows = _judged_rows(columns)
        order = rows[np.argsort(columns["tensor"][rows], kind="stable")]
        tensors = columns["tensor"][order]
        for tensor_rows in np.split(order, np.flatnonzero(np.diff(tensors)) + 1):
            index = int(columns["tensor"][tensor_rows[0]]) if len(tensor_rows) else -1
            if index not in chosen:
                continue
            values = columns[chosen[index]][tensor_rows]
            values = values[np.isfinite(values)]
            if len(values):
                low, high = (float(value) for value in np.quantile(values, [_LOW, _HIGH]))
                spans[infos[index].name][phase] = (low, high)
    return BaselineRun(
        tensors={
            infos[index].name: BaselineTensor(
                shape=infos[index].shape,
                statistic=statistic,
                phases=tuple(
                    spans[infos[index].name].get(phase) for phase in range(_end(spans[infos[index].name]))
                ),
            )
            for index, statistic in chosen.items()
            if spans[infos[index].name]
        },
        architecture=architecture_of(infos),
    )


def _chosen(infos: Sequence[TensorInfo]) -> dict[int, Statistic]:
    """Map the index of each compared tensor to its statistic; losses first, then in model order."""
    rank = {name: index for index, (name, _) in enumerate(BASELINE_COLLECTIONS)}
    compared = {
        index: statistic
        for index, info in enumerate(infos)
        if len(info.shape) <= MAX_DIMENSIONS and (statistic := statistic_of(info)) is not None
    }
    order = sorted(
        compared, key=lambda index: min(rank[name] for name in infos[index].collections if name in rank)
    )
    return {index: compared[index] for index in order[:MAX_TENSORS]}


def _end(spans: Mapping[int, Span]) -> int:
    return max(spans, default=-1) + 1


def _judged_rows(columns: Columns) -> NDArray[np.intp]:
    """Return rows in train mode or without a mode, of the first replica and of the lowest worker that has the tensor."""
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
    """Read the statistics of the steps ``start`` to ``end``, or of some spans of them if there are too many rows."""
    tensors = max(1, len(run.index.tensors()) * max(1, len(run.workers)))
    steps = max(_SPANS, _ROWS_PER_PHASE // tensors)
    if end - start + 1 <= steps:
        return _read(run, start, end)
    length = steps // _SPANS
    starts = np.linspace(start, end - length + 1, _SPANS).astype(np.int64)
    parts = [_read(run, int(begin), int(begin) + length - 1) for begin in starts]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _read(run: Run, first: int, last: int) -> Columns:
    index = run.index.snapshot(ReadBudget(_SECONDS, _MEGABYTES))
    selection = Selection((), None, first, last)
    return index.consistently(lambda: queries.columns_of(index, ("mean", "rms"), selection, merge=True))


MAX_BYTES = 4 * 1024 * 1024
_MAX_MEMORY = 64 * 1024 * 1024


def read_baseline(run_store: Store, attempt: str) -> str | None:
    """Return the JSON text of an attempt's baseline; None if no baseline is pinned.

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
    """Add the baseline of an attempt to a rule config. Configs with their own baseline or of other rules stay unchanged.

    Args:
        config: the rule config.
        baseline: validated JSON text; None if the attempt has no baseline.
    """
    if baseline is None or config.rule != UnlikeEarlierRuns.name or "baseline" in config.params:
        return config
    return _with_baseline(config.model_dump_json(by_alias=True), baseline)


def configs_of_attempt(
    configs: Sequence[RuleConfig], run_store: Store, attempt: str
) -> tuple[list[RuleConfig], str]:
    """Return the rule configs that apply to an attempt.

    Returns:
        The configs, and the error in the attempt's baseline; empty if there is none.

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


@functools.lru_cache(maxsize=16)  # 11 MiB each at most
def _with_baseline(config: str, baseline: str) -> RuleConfig:
    parsed = RuleConfig.model_validate_json(config)
    params = {**parsed.params, "baseline": Baseline.model_validate_json(baseline).model_dump(mode="json")}
    return parsed.model_copy(update={"params": params})
