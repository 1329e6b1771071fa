"""Shards of a tensor merged into the logical tensor's figures; replicas and whole tensors stay as they are."""

from __future__ import annotations

import numpy as np

from watchstep.reading.columns import COUNTED, IDENTITY, Columns, batch_of
from watchstep.segment_checks import PROBE
from watchstep.statistics import merge_rows


def merged(columns: Columns) -> Columns:
    """Merge the shards of each (step, mode, tensor, replica, stage), workers in ascending order.

    Args:
        columns: `IDENTITY` and `COUNTED`, probes and ``time_ns`` where they are wanted, n rows.

    Returns:
        The same columns. A merged row takes the lowest worker of its shards, as rules see it, and that one's time. Its
        probes are NaN: what a probe counted of shards does not follow for the whole.
    """
    names = (*IDENTITY, *COUNTED)
    others = [name for name in columns if name not in names]
    sharded = columns["shard_count"] > 1
    parts = {name: columns[name][sharded] for name in names}
    order = np.lexsort([parts[key] for key in ("worker", "stage", "replica", "tensor", "mode", "step")])
    parts = {name: column[order] for name, column in parts.items()}
    starts = np.ones(len(order), np.bool_)
    starts[1:] = False
    for key in ("step", "mode", "tensor", "replica", "stage"):
        starts[1:] |= parts[key][1:] != parts[key][:-1]
    first = np.flatnonzero(starts)
    figures = merge_rows(batch_of(parts), np.cumsum(starts) - 1, len(first))
    found = {name: parts[name][first] for name in IDENTITY}
    found["shard_count"] = np.ones_like(found["shard_count"])
    found |= {name: getattr(figures, name) for name in COUNTED}
    for name in others:
        of_first = columns[name][sharded][order][first]
        found[name] = np.full(len(first), np.nan) if name.startswith(PROBE) else of_first
    return {name: np.concatenate([columns[name][~sharded], found[name]]) for name in (*names, *others)}
