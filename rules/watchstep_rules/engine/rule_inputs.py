"""The rows of one evaluation as rules receive them: ordered, merged and filtered by scope, once for all rules.

`Lookback` says how many earlier rows of each tensor the rules of a run need. A loss may need many, most tensors need none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block, together, view
from watchstep.format.tensors import TensorInfo
from watchstep_rules.config.rule_config import RuleConfig, TensorScope
from watchstep_rules.rule import Needs
from watchstep_rules.signals.series import merge_shards
from watchstep_rules.signals.tensor_selection import OfCatalogue

if TYPE_CHECKING:
    from watchstep_rules.config.rule_config import RuleConfig, TensorScope
    from watchstep_rules.rule import Needs


_depths: OfCatalogue[NDArray[np.int64]] = OfCatalogue()


def depths(
    catalogue: tuple[TensorInfo, ...], scope: TensorScope, needs: Needs, lookback: int
) -> NDArray[np.int64]:
    """How many earlier rows of a series one rule needs, for each tensor of a catalogue; 0 for those out of scope."""
    held = [needs.earlier_rows(info, lookback) if scope.holds(info, needs) else 0 for info in catalogue]
    return np.array(held, np.int64)


@dataclass(frozen=True)
class Lookback:
    """Of each scope, how many earlier rows of a series its rules need. Hashable; equal ones keep the same rows.

    Attributes:
        scopes: tensors, what their rules need, and how many rows.
        histograms: whether a rule looks into histograms, be it only those of new rows.
    """

    scopes: frozenset[tuple[TensorScope, Needs, int]] = frozenset()
    histograms: bool = False

    @classmethod
    def of(cls, configs: Iterable[RuleConfig]) -> Lookback:
        """How far rule configs look back.

        One whose rule cannot say it needs nothing: it cannot be judged either, and judging tells why.
        """
        found = [one for one in map(_of_one, configs) if one is not None]
        return cls(
            frozenset(one for one in found if one[2] > 0), any(needs.histograms for _, needs, _ in found)
        )

    def __or__(self, other: Lookback) -> Lookback:
        """As far as both."""
        return Lookback(self.scopes | other.scopes, self.histograms or other.histograms)

    def rows_of(self, catalogue: tuple[TensorInfo, ...]) -> NDArray[np.int64]:
        """How many earlier rows of a series are needed, for each tensor of a catalogue."""
        return _depths.get(catalogue, self, lambda: self._rows_of(catalogue))

    def _rows_of(self, catalogue: tuple[TensorInfo, ...]) -> NDArray[np.int64]:
        depth = np.zeros(len(catalogue), np.int64)
        for scope, needs, rows in self.scopes:
            depth = np.maximum(depth, depths(catalogue, scope, needs, rows))
        return depth


def _of_one(config: RuleConfig) -> tuple[TensorScope, Needs, int] | None:
    try:
        rule, params = config.implementation, config.parameters
        return config.tensors, rule.needed(params), rule.lookback(params)
    except Exception:  # noqa: BLE001 - told by judging, and must not stop the others
        return None


@dataclass(frozen=True)
class JudgingProgress:
    """How far a rule that waits for seals may judge: steps in (before, now] of each attempt.

    Attributes:
        before: the last step sealed at the previous evaluation; -1 for none.
        now: the last step sealed at this one.
        clock_ns: the stored tick of this evaluation.
        ended: the attempt has ended: that no row comes says nothing any more.
    """

    before: int
    now: int
    clock_ns: int
    ended: bool = False


class Prepared:
    """Rows of one attempt that rules are to judge.

    Columns are copied where a rule reads them, so a `Prepared` keeps all that it was made of in memory: it is for one
    evaluation.
    """

    def __init__(self, history: Block, arrived: Block, progress: JudgingProgress) -> None:
        """Take rows; nothing is computed yet.

        Args:
            history: rows that arrived before: all that are not sealed, and of each series the last ones that are.
            arrived: rows that are new, in the order of their segments.
            progress: which steps are sealed.
        """
        self.progress = progress
        self._history = history
        self._arrived = arrived
        self._views: dict[tuple[int, bytes], Block] = {}
        self._from_end: dict[int, NDArray[np.intp]] = {}

    def block(self, config: RuleConfig) -> Block:
        """The rows that a rule config judges now."""
        return self._in_scope(config, self._parts(config)[1])

    def context(self, config: RuleConfig) -> Block:
        """As many earlier rows of each series as its rule looks back on."""
        earlier = self._parts(config)[0]
        rule, params, catalogue = config.implementation, config.parameters, earlier.catalogue
        reach = rule.lookback(params)
        if reach <= 0 or not len(earlier):
            return view(earlier, np.empty(0, np.intp))
        key = (config.tensors, rule.needed(params), reach)
        depth = _reaches.get(catalogue, key, lambda: depths(catalogue, *key))
        return self._last_rows(earlier, depth)

    def _last_rows(self, earlier: Block, depth: NDArray[np.int64]) -> Block:
        """Of each series as many last rows as the depth of its tensor says, in the order in which they stand."""
        key = (id(earlier), depth.tobytes())
        found = self._views.get(key)
        if found is None:
            places = self._from_end.get(id(earlier))
            if places is None:
                places = self._from_end[id(earlier)] = _from_end(earlier.series_key())
            found = self._views[key] = view(earlier, np.flatnonzero(places < depth[earlier.tensor]))
        return found

    def _parts(self, config: RuleConfig) -> tuple[Block, Block]:
        if config.implementation.merged(config.parameters) == "per_worker":
            return self._history, self._arrived
        return self._sealed

    @functools.cached_property
    def _sealed(self) -> tuple[Block, Block]:
        """Rows of steps that were sealed before, and of those that are sealed now."""
        progress = self.progress
        pool = _joined(self._history, self._arrived)
        judged = pool.step <= progress.before
        due = (pool.step <= progress.now) & ~judged
        return merge_shards(_where(pool, judged)), merge_shards(_where(pool, due))

    def _in_scope(self, config: RuleConfig, block: Block) -> Block:
        needs = config.implementation.needed(config.parameters)
        catalogue, scope = block.catalogue, config.tensors
        chosen = _scopes.get(catalogue, (scope, needs), lambda: _mask(catalogue, scope, needs))
        if chosen.all():
            return block
        key = (id(block), chosen.tobytes())
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = view(block, np.flatnonzero(chosen[block.tensor]))
        return found


_scopes: OfCatalogue[NDArray[np.bool_]] = OfCatalogue()
_reaches: OfCatalogue[NDArray[np.int64]] = OfCatalogue()


def _from_end(key: NDArray[np.int64]) -> NDArray[np.intp]:
    """Of each row how many of the same key stand after it."""
    order = np.argsort(key, kind="stable")
    held = key[order]
    places = np.empty(len(key), np.intp)
    places[order] = np.searchsorted(held, held, side="right") - np.arange(len(held)) - 1
    return places


def _mask(catalogue: tuple[TensorInfo, ...], scope: TensorScope, needs: Needs) -> NDArray[np.bool_]:
    """Which tensors of a catalogue are in scope."""
    return np.array([scope.holds(info, needs) for info in catalogue], np.bool_)


def _where(block: Block, chosen: NDArray[np.bool_]) -> Block:
    return block if chosen.all() else view(block, np.flatnonzero(chosen))


def _joined(first: Block, second: Block) -> Block:
    return together(first, second) if len(first) and len(second) else (first if len(first) else second)
