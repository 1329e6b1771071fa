"""The kind of layer of a row, by the type of its module, its place in the model, and experts of a mixture, by their names."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block, sort_key
from watchstep.format.tensors import TensorInfo
from watchstep_rules.signals.catalogue_cache import OfCatalogue
from watchstep_rules.signals.tensor_selection import rows_where

_orders_of: OfCatalogue[NDArray[np.int64]] = OfCatalogue()
_WEIGHTED = ("Linear", "Bilinear", "Conv", "LSTM", "GRU", "RNN")


def is_weighted(info: TensorInfo) -> bool:
    """Whether the module multiplies its input by weights: linear, convolution, recurrent."""
    kind = info.module_type.removeprefix("Lazy").removeprefix("NonDynamicallyQuantizable")
    return kind.startswith(_WEIGHTED)


def is_normalisation(info: TensorInfo) -> bool:
    """Whether the module normalises: ``BatchNorm2d``, ``LayerNorm``, ``LlamaRMSNorm``."""
    return "Norm" in info.module_type


def orders(catalogue: tuple[TensorInfo, ...]) -> NDArray[np.int64]:
    """Where in the model each tensor stands."""
    return _orders_of.get(catalogue, "", lambda: np.array([info.order for info in catalogue], np.int64))


class _LastLayer(NamedTuple):
    """The weighted layer that was computed last at each row's step and worker.

    ``time_ns``: when, shape (n,); -1 where no weighted layer was recorded. ``order``: where in the model it stands, shape (n,).
    """

    time_ns: NDArray[np.int64]
    order: NDArray[np.int64]


def after_last_layer(block: Block, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which rows of outputs were computed after the last weighted layer of their step and worker; bool, shape of ``rows``.

    What was computed at the same nanosecond is told apart by its place in the model. Where no weighted layer was recorded at the step none is.
    """
    last, order = _last_layer(block, rows), orders(block.catalogue)[block.tensor[rows]]
    time_ns = block.time_ns[rows]
    after: NDArray[np.bool_] = (last.time_ns >= 0) & (
        (time_ns > last.time_ns) | ((time_ns == last.time_ns) & (order > last.order))
    )
    return after


def before_last_layer(block: Block, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which rows of outputs were computed before the last weighted layer of their step and worker; bool, shape of ``rows``.

    As with `after_last_layer`, none is where no weighted layer was recorded at the step.
    """
    last, order = _last_layer(block, rows), orders(block.catalogue)[block.tensor[rows]]
    time_ns = block.time_ns[rows]
    before: NDArray[np.bool_] = (time_ns < last.time_ns) | ((time_ns == last.time_ns) & (order < last.order))
    return before


def _last_layer(block: Block, rows: NDArray[np.intp]) -> _LastLayer:
    _, group = np.unique(sort_key(block.step, block.worker), return_inverse=True)
    group = group.reshape(-1)
    groups = int(group.max()) + 1 if len(group) else 0
    layers = np.flatnonzero(rows_where(block, _is_output_of_layer))
    order = orders(block.catalogue)[block.tensor]
    last_ns, last_order = np.full(groups, -1, np.int64), np.full(groups, -1, np.int64)
    np.maximum.at(last_ns, group[layers], block.time_ns[layers])
    newest = layers[block.time_ns[layers] == last_ns[group[layers]]]
    np.maximum.at(last_order, group[newest], order[newest])
    return _LastLayer(last_ns[group[rows]], last_order[group[rows]])


def _is_output_of_layer(info: TensorInfo) -> bool:
    return info.role == "output" and is_weighted(info)


_EXPERT = re.compile(r"([^.]*expert[^.]*\.)\d+(\.)", re.IGNORECASE)


@functools.lru_cache(maxsize=1 << 14)
def kind_of_expert(name: str) -> str:
    """The name of an expert's tensor without the expert's number; empty where it is of none."""
    kind, experts = _EXPERT.subn(r"\1*\2", name)
    return kind if experts else ""


@functools.lru_cache(maxsize=1 << 14)
def expert_of(name: str) -> str:
    """The path of the expert that a tensor belongs to, the innermost; empty where it is of none."""
    ends = [found.end() for found in _EXPERT.finditer(name)]
    return name[: ends[-1] - 1] if ends else ""
