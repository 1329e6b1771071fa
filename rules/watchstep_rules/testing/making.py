"""A made run: the rows of a test's series, as recorders would have left them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from watchstep.format.block import Block, Places, concatenate
from watchstep.format.statistics import StatisticsBatch
from watchstep.format.tensors import MODES, Placement, TensorInfo
from watchstep_rules.testing.file import RuleTest, Series
from watchstep_rules.testing.notation import values_of
from watchstep_rules.testing.synthesis import statistics_with

_BEGAN_NS = 1_700_000_000_000_000_000
_OF_SUFFIX = {"gradient": "gradient", "update": "update", "output": "output", "input": "input"}
_COLLECTIONS = {
    "weight": "weights", "bias": "biases", "gradient": "gradients", "update": "updates", "output": "activations",
    "input": "activations", "loss": "losses", "metric": "metrics", "label": "labels",
}  # fmt: skip


def made(test: RuleTest) -> Block:
    """All rows, in canonical order.

    Raises:
        ValueError: a series has a figure that no tensor of its shape can have; the message names it.
    """
    parts: list[Block] = []
    for place, series in enumerate(test.series):
        workers = range(test.workers) if series.worker is None else (series.worker,)
        try:
            rows = _rows(series, info_of(series, place), round(test.interval * 1e9))
        except ValueError as error:
            raise ValueError(f"series {series.tensor!r}: {error}") from error
        parts.extend(_of_worker(rows, worker) for worker in workers)
    return concatenate(parts).ordered()


def info_of(series: Series, place: int) -> TensorInfo:
    """What is known of a series' tensor; what it does not say follows from its name, as the SDK names tensors."""
    path, _, suffix = series.tensor.partition(":")
    module, _, last = path.rpartition(".")
    role = series.role or _OF_SUFFIX.get(suffix) or _role_of(last, bool(module))
    if series.module is not None:
        module = series.module
    elif suffix in {"output", "input"}:
        module = path
    shape = series.shape
    if shape is None:
        shape = () if role in {"loss", "metric"} else (8,) if "bias" in last else (8, 8)
    kind = series.module_type if series.module_type is not None else "Linear" if module else ""
    collections = series.collections or (_COLLECTIONS.get(role, "custom"),)
    order = place if series.order is None else series.order
    return TensorInfo(series.tensor, tuple(sorted(collections)), role, module, kind, order, shape)


def _role_of(last: str, has_module: bool) -> str:
    if has_module:
        return "bias" if last == "bias" else "weight"
    if "loss" in last:
        return "loss"
    return "label" if last == "labels" else "metric"


@dataclass(frozen=True)
class _Rows:
    """The rows of a series, of any worker."""

    info: TensorInfo
    mode: int
    step: np.ndarray[tuple[int], np.dtype[np.int64]]
    time_ns: np.ndarray[tuple[int], np.dtype[np.int64]]
    statistics: StatisticsBatch
    probes: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]


def _rows(series: Series, info: TensorInfo, interval_ns: int) -> _Rows:
    written = values_of(str(series.values))
    at = [place for place, value in enumerate(written) if value is not None]
    count = math.prod(info.shape)
    figure = series.figure or ("mean" if count == 1 else "abs_mean")
    step = series.start + series.every * np.array(at, np.int64)
    probes = {name: _probe(str(values), len(written), at) for name, values in series.probes.items()}
    values = [value for value in written if value is not None]
    return _Rows(
        info,
        MODES.index(series.mode),
        step,
        _BEGAN_NS + interval_ns * step,
        statistics_with(figure, values, count),
        probes,
    )


def _probe(text: str, length: int, at: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    values = [math.nan if value is None else value for value in values_of(text)]
    whole = values * length if len(values) == 1 else values
    return np.array([whole[place] for place in at], np.float64)


def _of_worker(rows: _Rows, worker: int) -> Block:
    number = len(rows.step)
    return Block(
        step=rows.step,
        mode=np.full(number, rows.mode, np.int8),
        worker=np.full(number, worker, np.int32),
        time_ns=rows.time_ns,
        tensor=np.zeros(number, np.int32),
        catalogue=(rows.info,),
        places=Places.of([Placement(replica=worker)] * number),
        statistics=rows.statistics,
        probes=rows.probes,
    )
