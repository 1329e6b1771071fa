"""All losses of a run as one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from watchstep.arrow_arrays import from_codes
from watchstep.reading.columns import Columns
from watchstep.reading.index import RunIndex
from watchstep.reading.scan import Want
from watchstep.statistics import Floats
from watchstep.tensors import LOSSES, MODES

if TYPE_CHECKING:
    import pyarrow as pa

_FIGURES = ("mean", "count", "nan", "pos_inf", "neg_inf")


def losses_of(index: RunIndex) -> pa.Table:
    """As `watchstep.Run.losses`."""
    import pyarrow as pa

    wanted = frozenset(info.name for info in index.tensors() if LOSSES in info.collections)
    rows = index.consistently(lambda: index.collect(Want(_FIGURES, wanted)))
    infos = index.tensors()
    names = [info.name for info in infos]
    ranks = np.empty(len(names), np.int64)
    ranks[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    order = np.lexsort((ranks[rows["tensor"]], rows["mode"], rows["worker"], rows["step"]))
    tensor = rows["tensor"][order]
    return pa.table(
        {
            "step": rows["step"][order],
            "mode": [MODES[mode] for mode in rows["mode"][order]],
            "worker": rows["worker"][order].astype(np.int32),
            "name": from_codes(tensor, names),
            "value": loss_values(rows)[order],
            "count": rows["count"][order],
            "derived": np.array([info.derived for info in infos], np.bool_)[tensor],
        },
        schema=pa.schema(
            [
                ("step", "int64"),
                ("mode", "string"),
                ("worker", "int32"),
                ("name", pa.dictionary(pa.int32(), pa.string())),
                ("value", "float64"),
                ("count", "int64"),
                ("derived", "bool"),
            ]
        ),
    )


def loss_values(rows: Columns) -> Floats:
    """The mean of the losses that each row holds, with those that were not finite: as their sum by IEEE 754, over their number.

    Args:
        rows: the columns ``mean`` (of the finite ones), ``nan``, ``pos_inf`` and ``neg_inf``.
    """
    values = np.array(rows["mean"], np.float64)
    values[rows["pos_inf"] > 0] = np.inf
    values[rows["neg_inf"] > 0] = -np.inf
    values[(rows["nan"] > 0) | ((rows["pos_inf"] > 0) & (rows["neg_inf"] > 0))] = np.nan
    return values
