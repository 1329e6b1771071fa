"""Figures of boosted trees as rows: how deep the newest are, and how much each feature counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from watchstep.format import tensors
from watchstep.format.statistics import Floats, StatisticsBatch, merge_rows, scalars
from watchstep.format.tensors import TensorInfo

TOP = tuple(range(1, 11))
"""Of so many features that count most the share is told."""


@dataclass(frozen=True)
class TopShares:
    """The columns ``top_share_1``, ``top_share_2``, …: the share of the most important features in all importance."""

    values: Floats

    def collect(self) -> dict[str, Floats]:
        """One value each; NaN where nothing has any importance yet."""
        ordered = np.sort(np.abs(self.values))[::-1]
        whole = ordered.sum()
        return {
            f"top_share_{count}": np.array([ordered[:count].sum() / whole if whole > 0 else np.nan])
            for count in TOP
        }


@dataclass(frozen=True)
class LargestNode:
    """The column ``largest_node``: the largest number of a node in the newest round's trees, as XGBoost's dump counts them."""

    number: int

    def collect(self) -> dict[str, Floats]:
        """One value."""
        return {"largest_node": np.array([float(self.number)])}


def has_trees(booster: Any) -> bool:
    """Whether a booster is made of trees, and not linear."""
    name = json.loads(booster.save_config())["learner"]["gradient_booster"]["name"]
    return bool(name != "gblinear")


def depths(booster: Any) -> list[int]:
    """How deep each tree of the newest round is: 0 where it is one leaf."""
    newest = booster[booster.num_boosted_rounds() - 1]
    return [_depth(dumped) for dumped in newest.get_dump()]


def largest_node(booster: Any) -> LargestNode:
    """Of the trees of the newest round."""
    newest = booster[booster.num_boosted_rounds() - 1]
    numbers = [
        int(line.strip().partition(":")[0]) for dumped in newest.get_dump() for line in dumped.splitlines()
    ]
    return LargestNode(max(numbers, default=0))


def importance(booster: Any, kind: str) -> Floats:
    """How much each feature counts, over all trees.

    Args:
        booster: of trees.
        kind: ``weight``, ``gain``, ``cover``, ``total_gain`` or ``total_cover``, as XGBoost defines them.

    Returns:
        float64 of shape (features,): first those that some tree uses, then zeros.
    """
    scores = [float(score) for score in booster.get_score(importance_type=kind).values()]
    return np.array(scores + [0.0] * (int(booster.num_features()) - len(scores)))


def row_of(values: Sequence[float]) -> StatisticsBatch:
    """Statistics of one tensor with these elements."""
    return merge_rows(scalars(list(values)), np.zeros(len(values), np.intp), 1)


def described(name: str, role: str, elements: int) -> TensorInfo:
    """A tensor of figures of trees."""
    return TensorInfo(name, (tensors.CUSTOM,), role, shape=(elements,), dtype="float64")


def _depth(dumped: str) -> int:
    """Each level of a dumped tree is indented by one tab more."""
    return max((len(line) - len(line.lstrip("\t")) for line in dumped.splitlines()), default=0)
