"""The rows of one evaluation as rules take them: put in order, merged and told apart by scope once for all rules."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block, together, view
from watchstep.format.tensors import TensorInfo
from watchstep_rules.engine.lookback import depths
from watchstep_rules.signals.catalogue_cache import OfCatalogue
from watchstep_rules.signals.shards import merge_shards

if TYPE_CHECKING:
    from watchstep_rules.config.rule_config import RuleConfig, TensorScope
    from watchstep_rules.rule import Needs


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
