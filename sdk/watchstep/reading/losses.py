"""All losses of a run as one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from watchstep.reading.index import RunIndex
from watchstep.reading.scan import Want
from watchstep.tensors import LOSSES, MODES

if TYPE_CHECKING:
    import pyarrow as pa


def losses_of(index: RunIndex) -> pa.Table:
    """As `watchstep.Run.losses`."""
    import pyarrow as pa

    wanted = frozenset(info.name for info in index.tensors() if LOSSES in info.collections)
    held = index.consistently(lambda: index.collect(Want(("mean",), wanted)))
    names = [info.name for info in index.tensors()]
    ranks = np.empty(len(names), np.int64)
    ranks[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    order = np.lexsort((ranks[held["tensor"]], held["mode"], held["worker"], held["step"]))
    return pa.table(
        {
            "step": held["step"][order],
            "mode": [MODES[mode] for mode in held["mode"][order]],
            "worker": held["worker"][order].astype(np.int32),
            "name": [names[tensor] for tensor in held["tensor"][order]],
            "value": pa.array(held["mean"][order], from_pandas=True),
        },
        schema=pa.schema(
            [
                ("step", "int64"),
                ("mode", "string"),
                ("worker", "int32"),
                ("name", "string"),
                ("value", "float64"),
            ]
        ),
    )
