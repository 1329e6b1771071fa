"""Figures of boosted trees and of feature importance, as rows: one per round, per tree and per feature."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from watchstep.capture.steps.record import Group, Probe
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.format.statistics import Floats, StatisticsBatch, merge_rows, scalars
from watchstep.format.tensors import Mode, TensorInfo
from watchstep.kernels.measurement import Completed

TREE_DEPTH = "tree_depth"
FEATURE_IMPORTANCE = "feature_importance"
SHAP = "shap"
"""The kind of importance that is the mean magnitude of SHAP values."""

MAX_TREES = 100
"""Maximum number of trees of a round with a row of their own."""

TOP = tuple(range(1, 11))
"""Numbers of most important features whose share is recorded."""

_NAMES_PER_ROW = 10
"""Number of distinct features with a row in the whole run, as a multiple of those at one round: the first ones change from round to round."""

_MAX_NAME = 200
_MARK = 16


@dataclass(frozen=True)
class TreeFigures:
    """One tree.

    Attributes:
        depth: number of splits on the longest path; 0 for a single leaf.
        leaves: number of leaves.
        largest_node: largest node number, where each split numbers its two children next.
        gain: sum of the gains of all splits; NaN if unknown.
    """

    depth: int
    leaves: int
    largest_node: int
    gain: float


@dataclass(frozen=True)
class Columns:
    """Probe columns with one value per row."""

    values: dict[str, Floats]

    def collect(self) -> dict[str, Floats]:
        """Return the columns."""
        return self.values


@dataclass(frozen=True)
class TopShares:
    """The columns ``top_share_1``, ``top_share_2``, …: the share of the most important features in all importance."""

    values: Floats

    def collect(self) -> dict[str, Floats]:
        """Return one value per column; NaN if no feature has any importance yet."""
        running = np.cumsum(np.sort(np.abs(self.values))[::-1])
        total = running[-1] if len(running) else 0.0
        return {
            f"top_share_{count}": np.array(
                [running[min(count, len(running)) - 1] / total if total > 0 else np.nan]
            )
            for count in TOP
        }


class TreeRows:
    """Records the trees of a round: their depths as one row, and a row for each tree."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def record(self, trees: Sequence[TreeFigures]) -> None:
        """Record the trees.

        ``tree_depth`` has the depths of all trees, with the columns ``largest_node`` (of all trees), ``leaves`` and ``gain`` (sums).
        ``tree/0``, ``tree/1``, … has the depth of each tree, with ``tree_leaves``, ``tree_largest_node`` and ``tree_gain``.
        """
        if not trees:
            return
        depths = [float(tree.depth) for tree in trees]
        whole = Columns(
            {
                "largest_node": np.array([float(max(tree.largest_node for tree in trees))]),
                "leaves": np.array([float(sum(tree.leaves for tree in trees))]),
                "gain": np.array([float(sum(tree.gain for tree in trees))]),
            }
        )
        recorder = self._session.recorder
        recorder.add(
            Group.of((described(TREE_DEPTH, TREE_DEPTH, (len(trees),)),)),
            Completed(row_of(depths)),
            probes=(whole,),
        )
        shown = trees[:MAX_TREES]
        columns = Columns(
            {
                "tree_leaves": np.array([float(tree.leaves) for tree in shown]),
                "tree_largest_node": np.array([float(tree.largest_node) for tree in shown]),
                "tree_gain": np.array([tree.gain for tree in shown], np.float64),
            }
        )
        infos = tuple(described(f"tree/{number}", "custom") for number in range(len(shown)))
        recorder.add(Group.of(infos), Completed(scalars(depths[: len(shown)])), probes=(columns,))


class ImportanceRows:
    """Records importance: a row for all features, and one for each of the most important features, by name."""

    def __init__(self, session: Session, features: int) -> None:
        """Start without rows.

        Args:
            session: the recording.
            features: maximum number of features with a row at each round.
        """
        self._session = session
        self._features = features
        self._recorded: dict[str, dict[int, TensorInfo]] = {}

    def record(self, kind: str, names: Sequence[str], values: Floats, mode: Mode = "train") -> None:
        """Record one kind of importance, e.g. ``feature_importance/gain`` and ``feature_importance/gain:age``.

        Args:
            kind: the kind.
            names: names of the features.
            values: float64 of shape (features,).
            mode: mode of the rows.
        """
        recorder, name = self._session.recorder, f"{FEATURE_IMPORTANCE}/{kind}"
        whole = Group.of((described(name, FEATURE_IMPORTANCE, (len(values),)),))
        shares: tuple[Probe, ...] = (TopShares(values),)
        recorder.add(whole, Completed(row_of(values.tolist())), mode, probes=shares)
        infos = self._recorded.setdefault(kind, {})
        chosen: list[int] = []
        for feature in np.argsort(-np.abs(values), kind="stable")[: self._features].tolist():
            if feature not in infos:
                if not values[feature] or len(infos) >= _NAMES_PER_ROW * self._features:
                    continue
                label = bounded_name(names[feature])
                infos[feature] = described(f"{name}:{label}", FEATURE_IMPORTANCE)
            chosen.append(feature)
        group = Group.of(tuple(infos[feature] for feature in chosen))
        recorder.add(group, Completed(scalars([float(values[feature]) for feature in chosen])), mode)


def row_of(values: Sequence[float]) -> StatisticsBatch:
    """Return statistics of one tensor with these elements."""
    return merge_rows(scalars(list(values)), np.zeros(len(values), np.intp), 1)


def described(name: str, role: str, shape: tuple[int, ...] = ()) -> TensorInfo:
    """Describe a tensor with figures of a booster, in the collection ``custom``."""
    return TensorInfo(name, (tensors.CUSTOM,), role, shape=shape, dtype="float64")


def bounded_name(name: str) -> str:
    """Return a feature's name, or its beginning and a checksum of the whole name if it has more than 200 characters."""
    text = str(name).encode("utf-8", "replace").decode()
    if len(text) <= _MAX_NAME:
        return text
    mark = hashlib.sha256(text.encode()).hexdigest()[:_MARK]
    return f"{text[: _MAX_NAME - _MARK - 1]}~{mark}"
