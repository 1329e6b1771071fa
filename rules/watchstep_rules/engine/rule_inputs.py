"""The rows of one evaluation as rules receive them: ordered, merged and filtered by scope, once for all rules.

`Lookback` is the number of earlier rows of each tensor that the rules of a run need. A loss may need many, most tensors need none.

Earlier rows of an attempt: as many as its rules look back on, up to `MOST_LOOKBACK_ROWS`, and all rows after the watermark.

Each row refers to the journal position of its segment. The positions of segments with needed rows are committed with the cursor, so
another process rebuilds exactly the same rows from exactly those segments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block, concatenate, sort_key, together, view
from watchstep.format.tensors import TensorInfo
from watchstep_rules.config.rule_config import RuleConfig, TensorScope
from watchstep_rules.engine.saved_tensors import SavedTensors
from watchstep_rules.rule import Needs
from watchstep_rules.signals.series import merge_shards
from watchstep_rules.signals.tensor_selection import CatalogueCache

if TYPE_CHECKING:
    from watchstep_rules.config.rule_config import RuleConfig, TensorScope
    from watchstep_rules.rule import Needs


MOST_LOOKBACK_ROWS = 500_000
"""Limit of the judged rows of an attempt that are kept for lookback, about 0.2 GB. Beyond it, rules look back on fewer rows of each series."""

LOOKBACK_BINS = 100
"""Limit of the histogram bins of these rows, for each of them on average. Rows of recorders have some tens."""

_depths: CatalogueCache[NDArray[np.int64]] = CatalogueCache()


def depths(
    catalogue: tuple[TensorInfo, ...], scope: TensorScope, needs: Needs, lookback: int
) -> NDArray[np.int64]:
    """Number of earlier rows of a series that one rule needs, for each tensor of a catalogue; 0 for tensors out of scope."""
    depth = [needs.earlier_rows(info, lookback) if scope.selects(info, needs) else 0 for info in catalogue]
    return np.array(depth, np.int64)


@dataclass(frozen=True)
class Lookback:
    """The number of earlier rows of a series that rules need, by scope. Hashable; equal lookbacks keep the same rows.

    Attributes:
        scopes: the tensors, the needs of their rules, and the number of rows.
        histograms: whether a rule reads histograms, including only those of new rows.
    """

    scopes: frozenset[tuple[TensorScope, Needs, int]] = frozenset()
    histograms: bool = False

    @classmethod
    def of(cls, configs: Iterable[RuleConfig]) -> Lookback:
        """The lookback of rule configs.

        A rule config whose lookback raises needs nothing: its evaluation fails too, and reports why.
        """
        scopes = [scope for scope in map(_scope_of, configs) if scope is not None]
        return cls(
            frozenset(scope for scope in scopes if scope[2] > 0),
            any(needs.histograms for _, needs, _ in scopes),
        )

    def __or__(self, other: Lookback) -> Lookback:
        """The larger of both."""
        return Lookback(self.scopes | other.scopes, self.histograms or other.histograms)

    def rows_of(self, catalogue: tuple[TensorInfo, ...]) -> NDArray[np.int64]:
        """Number of earlier rows of a series that are needed, for each tensor of a catalogue."""
        return _depths.get(catalogue, self, lambda: self._rows_of(catalogue))

    def _rows_of(self, catalogue: tuple[TensorInfo, ...]) -> NDArray[np.int64]:
        depth = np.zeros(len(catalogue), np.int64)
        for scope, needs, rows in self.scopes:
            depth = np.maximum(depth, depths(catalogue, scope, needs, rows))
        return depth


def _scope_of(config: RuleConfig) -> tuple[TensorScope, Needs, int] | None:
    try:
        rule, params = config.implementation, config.parameters
        return config.tensors, rule.needed(params), rule.lookback(params)
    except Exception:  # noqa: BLE001 - reported by the evaluation, and must not stop other rules
        return None


@dataclass(frozen=True)
class JudgingProgress:
    """The watermarks of an evaluation: rules that wait for the watermark judge steps in (before, now].

    Attributes:
        before: the watermark of the previous evaluation; -1 if there was none.
        now: the watermark of this evaluation.
        clock_ns: the stored tick of this evaluation, nanoseconds since the epoch.
        ended: whether the attempt has ended, so that missing rows mean nothing.
    """

    before: int
    now: int
    clock_ns: int
    ended: bool = False


class RuleInputs:
    """The rows of one evaluation of an attempt, shared by its rules.

    Columns are copied when a rule reads them, so a `RuleInputs` keeps its source rows in memory. Use it for one evaluation only.
    """

    def __init__(
        self, history: Block, arrived: Block, progress: JudgingProgress, saved: SavedTensors | None = None
    ) -> None:
        """Store the rows; nothing is computed yet.

        Args:
            history: earlier rows: all rows after the watermark, and the last rows of each series up to it.
            arrived: new rows, in the order of their segments.
            progress: the watermarks before and now.
            saved: reads full tensors for rules that need them; by default they cannot be read.
        """
        self.progress = progress
        self.saved = saved or SavedTensors(None)
        self._history = history
        self._arrived = arrived
        self._views: dict[tuple[int, bytes], Block] = {}
        self._from_end: dict[int, NDArray[np.intp]] = {}

    def block(self, config: RuleConfig) -> Block:
        """The rows that a rule config judges in this evaluation."""
        return self._in_scope(config, self._parts(config)[1])

    def context(self, config: RuleConfig) -> Block:
        """Earlier rows of each series, as many as the rule's lookback."""
        earlier = self._parts(config)[0]
        demand, catalogue = config.demand, earlier.catalogue
        if demand.lookback <= 0 or not len(earlier):
            return view(earlier, np.empty(0, np.intp))
        depth = _lookbacks.get(
            catalogue,
            demand.lookback_key,
            lambda: depths(catalogue, config.tensors, demand.needs, demand.lookback),
        )
        return self._last_rows(earlier, depth)

    def _last_rows(self, earlier: Block, depth: NDArray[np.int64]) -> Block:
        """The last rows of each series, as many as the depth of its tensor, in their order."""
        key = (id(earlier), depth.tobytes())
        rows = self._views.get(key)
        if rows is None:
            from_end = self._from_end.get(id(earlier))
            if from_end is None:
                from_end = self._from_end[id(earlier)] = _from_end(earlier.series_key())
            rows = self._views[key] = view(earlier, np.flatnonzero(from_end < depth[earlier.tensor]))
        return rows

    def _parts(self, config: RuleConfig) -> tuple[Block, Block]:
        if config.demand.merge == "per_worker":
            return self._history, self._arrived
        return self._by_watermark

    @functools.cached_property
    def _by_watermark(self) -> tuple[Block, Block]:
        """Rows up to the previous watermark, and rows between it and the current one."""
        progress = self.progress
        pool = _joined(self._history, self._arrived)
        judged = pool.step <= progress.before
        due = (pool.step <= progress.now) & ~judged
        return merge_shards(_where(pool, judged)), merge_shards(_where(pool, due))

    def _in_scope(self, config: RuleConfig, block: Block) -> Block:
        demand, catalogue = config.demand, block.catalogue
        chosen, name = _scopes.get(
            catalogue, demand.scope_key, lambda: _named_mask(catalogue, config.tensors, demand.needs)
        )
        if not name:
            return block
        key = (id(block), name)
        rows = self._views.get(key)
        if rows is None:
            rows = self._views[key] = view(block, np.flatnonzero(chosen[block.tensor]))
        return rows


_scopes: CatalogueCache[tuple[NDArray[np.bool_], bytes]] = CatalogueCache()
_lookbacks: CatalogueCache[NDArray[np.int64]] = CatalogueCache()


def _from_end(key: NDArray[np.int64]) -> NDArray[np.intp]:
    """For each row the number of later rows with the same key."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    later = np.empty(len(key), np.intp)
    later[order] = np.searchsorted(ordered, ordered, side="right") - np.arange(len(ordered)) - 1
    return later


def _mask(catalogue: tuple[TensorInfo, ...], scope: TensorScope, needs: Needs) -> NDArray[np.bool_]:
    """Which tensors of a catalogue are in scope."""
    return np.array([scope.selects(info, needs) for info in catalogue], np.bool_)


def _named_mask(
    catalogue: tuple[TensorInfo, ...], scope: TensorScope, needs: Needs
) -> tuple[NDArray[np.bool_], bytes]:
    """`_mask`, and its bytes as a name; empty if all tensors are in scope."""
    chosen = _mask(catalogue, scope, needs)
    return chosen, b"" if chosen.all() else chosen.tobytes()


def _where(block: Block, chosen: NDArray[np.bool_]) -> Block:
    return block if chosen.all() else view(block, np.flatnonzero(chosen))


def _joined(first: Block, second: Block) -> Block:
    return together(first, second) if len(first) and len(second) else (first if len(first) else second)


_sorted: CatalogueCache[tuple[TensorInfo, ...]] = CatalogueCache()


@dataclass(frozen=True)
class History:
    """Rows in journal order, and the journal position of each, int64 of shape (n,).

    ``limited``: whether `trimmed` dropped rows within the lookback because there were more than `MOST_LOOKBACK_ROWS`.
    """

    block: Block
    position: NDArray[np.int64]
    limited: bool = False

    @classmethod
    def empty(cls) -> History:
        """No rows."""
        return cls(Block.empty(), np.empty(0, np.int64))

    @property
    def positions(self) -> list[int]:
        """Journal positions with rows, ascending."""
        return [int(position) for position in np.unique(self.position)]


def joined(parts: list[tuple[int, Block]], before: History) -> History:
    """Earlier rows followed by those of further segments, given as (position, rows) in journal order."""
    block = concatenate([before.block, *(rows for _, rows in parts)])
    position = np.concatenate(
        [before.position, *(np.full(len(rows), position, np.int64) for position, rows in parts)]
    )
    return History(block, position)


def trimmed(
    history: History, lookback: Lookback | int, watermark: int, most: int = MOST_LOOKBACK_ROWS
) -> History:
    """Only the rows that a later evaluation can need.

    Args:
        history: all rows.
        lookback: how far the rules look back, in rows of a series: the same for every tensor, or by scope. Shards are judged merged,
            so that many steps of all shards of a tensor are kept.
        watermark: the last step that all live workers passed; all later rows are kept.
        most: limit of the rows up to the watermark; fewer if they have more than `LOOKBACK_BINS` on average. Beyond it, the lookback of all series is reduced in proportion; if even their last
            rows are more, the rows of the last steps are kept.
    """
    block = history.block
    if not len(block):
        return History.empty()
    if isinstance(lookback, int):
        depth = np.full(len(block), max(0, lookback), np.int64)
    else:
        depth = lookback.rows_of(block.catalogue)[block.tensor]
    needed = _within(block, depth, watermark)
    judged = block.step <= watermark
    count = np.count_nonzero(needed & judged)
    bins = block.statistics.histogram.size_of(needed & judged)
    if bins > LOOKBACK_BINS * most:
        most = min(most, LOOKBACK_BINS * most * count // bins)
    excess = count > most
    if excess:
        needed = _most_recent(block, depth, watermark, needed, most)
    rows = np.flatnonzero(needed)
    return History(block.take(rows), history.position[rows], bool(excess))


def _within(block: Block, depth: NDArray[np.int64], watermark: int) -> NDArray[np.bool_]:
    """Rows after the watermark, and the last ``depth`` rows of each series, both by step and by arrival."""
    key, arrival = block.series_key(), np.arange(len(block))
    needed = (block.step > watermark) | _last_of_each(key, arrival, depth)
    done = np.flatnonzero(block.step <= watermark)
    by_step = _last_of_each(key[done], np.lexsort((arrival[done], block.step[done])), depth[done])
    needed[done[by_step]] = True
    shards = done[block.places.shard_count[done] > 1]
    needed[shards[_of_last_steps(block.take(shards), depth[shards])]] = True
    return needed


def _most_recent(
    block: Block, depth: NDArray[np.int64], watermark: int, needed: NDArray[np.bool_], most: int
) -> NDArray[np.bool_]:
    """At most ``most`` of the needed rows up to the watermark, and all after it."""
    judged = block.step <= watermark
    count = np.count_nonzero(needed & judged)
    needed = _within(block, np.minimum(depth, np.maximum(1, depth * most // count)), watermark)
    rows = np.flatnonzero(needed & judged)
    if len(rows) > most:
        needed[rows[np.argsort(block.step[rows], kind="stable")[: len(rows) - most]]] = False
    return needed


def _last_of_each(
    key: NDArray[np.int64], order: NDArray[np.intp], depth: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Rows that are among the last ``depth`` rows of their series in an order."""
    chosen = np.zeros(len(key), np.bool_)
    order = order[depth[order] > 0]
    if not len(order):
        return chosen
    grouped = order[np.argsort(key[order], kind="stable")]
    keys = key[grouped]
    from_end = np.searchsorted(keys, keys, side="right") - np.arange(len(keys))
    chosen[grouped[from_end <= depth[grouped]]] = True
    return chosen


def _of_last_steps(block: Block, depth: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Rows of shards that belong to the last ``depth`` steps of their logical tensor."""
    places = block.places
    key = sort_key(block.tensor, block.mode, places.replica, places.stage)
    order = np.lexsort((block.step, key))
    keys = key[order]
    # The number of each (tensor, step) pair, ascending.
    number = np.cumsum(np.diff(sort_key(key, block.step)[order], prepend=-1) != 0)
    last = number[np.searchsorted(keys, keys, side="right") - 1] if len(keys) else number
    chosen = np.zeros(len(block), np.bool_)
    chosen[order[last - number < depth[order]]] = True
    return chosen


def with_catalogue(block: Block, catalogue: tuple[TensorInfo, ...]) -> Block:
    """The same rows over another catalogue that contains all of the block's tensors."""
    if block.catalogue is catalogue or block.catalogue == catalogue:
        return replace(block, catalogue=catalogue) if block.catalogue is not catalogue else block
    index_of = {info.name: index for index, info in enumerate(catalogue)}
    new_index = np.array([index_of[info.name] for info in block.catalogue], np.int32)
    tensor = new_index[block.tensor] if len(block) else block.tensor
    return replace(block, tensor=tensor, catalogue=catalogue)


def union_catalogue(blocks: list[Block]) -> tuple[TensorInfo, ...]:
    """All tensors of the blocks, sorted by name; of several descriptions of one tensor, the last.

    Sorting makes the order of rows within a step independent of how segments are combined.
    """
    first = blocks[0].catalogue if blocks else ()
    if all(block.catalogue is first for block in blocks):
        return _sorted.get(first, "", lambda: _by_name(blocks))
    return _by_name(blocks)


def _by_name(blocks: list[Block]) -> tuple[TensorInfo, ...]:
    by_name = {info.name: info for block in blocks for info in block.catalogue}
    catalogue = tuple(by_name[name] for name in sorted(by_name))
    for block in blocks:
        if block.catalogue == catalogue:
            return block.catalogue  # the same object: caches identify a catalogue by its identity
    return catalogue


def canonical(block: Block) -> Block:
    """A segment's rows in canonical order over a catalogue sorted by name, as every evaluation uses them."""
    return with_catalogue(block, union_catalogue([block])).ordered()


def over_one_catalogue(history: Block, arrived: Block) -> tuple[Block, Block]:
    """Both blocks over one catalogue, so that rows of one step have the same order however segments are split."""
    catalogue = union_catalogue([history, arrived])
    return with_catalogue(history, catalogue), with_catalogue(arrived, catalogue)
