"""Which optimizer's updates are the steps of a run, where a program has several or changes them."""

from __future__ import annotations

import weakref
from collections.abc import Collection

from torch.optim import Optimizer

_SHARED = 3
"""Updates in a row by another optimizer of the same parameters, after which that one counts."""

_OTHER = 200
"""The same where it updates other parameters: a critic is trained so many times between two steps of its generator."""


class CountingOptimizer:
    """The optimizer whose updates count: the one that was named, or the first; later the one that takes its place.

    Programs make a new optimizer when they unfreeze layers or go from warm-up to training, and let the old one go. It is
    not kept alive here.
    """

    def __init__(self, named: Optimizer | None) -> None:
        self._held = None if named is None else weakref.ref(named)
        self._parameters: frozenset[int] = frozenset()
        self._others = 0

    def counts(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer's updates are steps of the run."""
        return self._held is not None and self._held() is optimizer

    @property
    def is_gone(self) -> bool:
        """Whether there was one, and the program has let it go."""
        return self._held is not None and self._held() is None

    def updates(self, optimizer: Optimizer, parameters: Collection[int]) -> None:
        """An optimizer is about to update.

        Args:
            optimizer: has watched parameters.
            parameters: the ids of all that it updates.
        """
        if self.counts(optimizer):
            self._others = 0
            if len(parameters) != len(self._parameters):
                self._parameters = frozenset(parameters)
        elif self._held is None or self._held() is None:
            self._take(optimizer, parameters)
        else:
            self._others += 1
            shared = self._others == _SHARED and not self._parameters.isdisjoint(parameters)
            if shared or self._others >= _OTHER:
                self._take(optimizer, parameters)

    def _take(self, optimizer: Optimizer, parameters: Collection[int]) -> None:
        self._held, self._parameters, self._others = weakref.ref(optimizer), frozenset(parameters), 0
