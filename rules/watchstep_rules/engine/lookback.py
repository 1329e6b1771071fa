"""How far back the rules of a run look, tensor by tensor: a loss may be looked back on for long, most tensors are not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from watchstep.format.tensors import TensorInfo
from watchstep_rules.config.rule_config import RuleConfig, TensorScope
from watchstep_rules.rule import Needs
from watchstep_rules.signals.catalogue_cache import OfCatalogue

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
