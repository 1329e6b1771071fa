"""Blocks written out by hand, and blocks that Hypothesis makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from watchstep.format.block import Block, Places
from watchstep.format.statistics import StatisticsBatch, merge_rows, scalars
from watchstep.format.tensors import MODES, Mode, Placement, TensorInfo

Values = Sequence[float]
WHOLE = Placement()


def tensor(
    name: str, collection: str, *, role: str = "", order: int = 0, shape: tuple[int, ...] = (8, 8)
) -> TensorInfo:
    """A tensor of one collection; its role is the collection's, its module is the name before the last dot."""
    return TensorInfo(
        name=name,
        collections=(collection,),
        role=role
        or {"biases": "bias", "losses": "loss", "activations": "output"}.get(collection, collection[:-1]),
        module=name.rpartition(".")[0],
        module_type="" if collection == "losses" else "Linear",
        order=order,
        shape=shape,
    )


def gradient(name: str, *, order: int = 0, shape: tuple[int, ...] = (8, 8)) -> TensorInfo:
    """The gradient of a layer's weight."""
    return tensor(f"{name}.weight:gradient", "gradients", order=order, shape=shape)


@dataclass(frozen=True)
class Row:
    """One row of a block, given by the elements of its tensor."""

    step: int
    info: TensorInfo
    values: Values
    mode: Mode = "train"
    worker: int = 0
    place: Placement = field(default=WHOLE)
    probes: dict[str, float] = field(default_factory=dict)


def statistics_of(arrays: Sequence[Values]) -> StatisticsBatch:
    """The statistics of some tensors, each given by its elements."""
    elements = [float(value) for array in arrays for value in array]
    group = np.repeat(np.arange(len(arrays)), [len(array) for array in arrays])
    return merge_rows(scalars(elements), group, len(arrays))


def block_of(rows: Sequence[Row]) -> Block:
    """A block with these rows, in this order."""
    catalogue = tuple({row.info.name: row.info for row in rows}.values())
    place = {info.name: index for index, info in enumerate(catalogue)}
    names = sorted({name for row in rows for name in row.probes})
    return Block(
        step=np.array([row.step for row in rows], np.int64),
        mode=np.array([MODES.index(row.mode) for row in rows], np.int8),
        worker=np.array([row.worker for row in rows], np.int32),
        time_ns=np.array([1_000_000 * row.step + row.worker for row in rows], np.int64),
        tensor=np.array([place[row.info.name] for row in rows], np.int32),
        catalogue=catalogue,
        places=Places.of([row.place for row in rows]),
        statistics=statistics_of([row.values for row in rows]),
        probes={name: np.array([row.probes.get(name, np.nan) for row in rows]) for name in names},
    )


def rows_of(block: Block) -> list[tuple[object, ...]]:
    """Each row as plain data, so that blocks compare independently of the order of their catalogues; NaN is None."""
    statistics = block.statistics
    columns = [name for name in statistics.__dataclass_fields__ if name != "histogram"]

    def plain(value: float) -> float | None:
        return None if np.isnan(value) else float(value)

    return [
        (
            int(block.step[row]),
            block.mode_name(row),
            int(block.worker[row]),
            int(block.time_ns[row]),
            block.info(row),
            tuple(int(column[row]) for column in vars(block.places).values()),
            tuple(plain(getattr(statistics, name)[row]) for name in columns),
            tuple(tuple(part.tolist()) for part in statistics.histogram.row(row)),
            tuple(
                (name, float(column[row]))
                for name, column in sorted(block.probes.items())
                if not np.isnan(column[row])  # no figure is the same as no column
            ),
        )
        for row in range(len(block))
    ]


elements = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, 3e38, float("nan"), float("inf"), float("-inf")]),
)
"""float32 values, with special values more often than by chance."""

arrays = st.lists(elements, max_size=12)

INFOS = (
    tensor("loss", "losses", shape=()),
    tensor("first.weight", "weights", order=1),
    tensor("first.bias", "biases", order=1, shape=(8,)),
    gradient("first", order=1),
    gradient("second", order=2),
    tensor("Schicht-ü.output", "activations", order=3, shape=(4, 0, 2)),
)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Any row: any mode, a few workers and steps, whole tensors and shards, with and without a probe."""
    worker = draw(st.integers(0, 3))
    count = draw(st.sampled_from([1, 1, 2, 4]))
    return Row(
        step=draw(st.integers(0, 6)),
        info=draw(st.sampled_from(INFOS)),
        values=draw(arrays),
        mode=draw(st.sampled_from(MODES)),
        worker=worker,
        place=Placement(
            worker % count, count, draw(st.integers(0, 1)), draw(st.sampled_from(["local", "reduced"]))
        ),
        probes=draw(st.dictionaries(st.sampled_from(["cosine", "dead"]), elements, max_size=2)),
    )


blocks = st.lists(rows(), max_size=16).map(block_of)


BLOCK = block_of(
    [
        Row(step, info, [1.0 * step, -3e-5, float("nan")], worker=worker, place=Placement(worker, 2), probes={"dead": 0.5})
        for step in range(8)
        for info in INFOS
        for worker in (0, 1)
    ]
)  # fmt: skip
"""A block of all kinds of tensors, of two workers."""
