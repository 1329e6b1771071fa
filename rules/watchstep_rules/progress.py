"""How far the training loss has come: what tells a training that has converged from one that is stuck."""

from __future__ import annotations

from typing import NamedTuple

_FIRST = 5
_MEMORY = 0.9


class Progress(NamedTuple):
    """A loss so far.

    Attributes:
        seen: finite values, counted up to the first few.
        first: mean of the first few.
        smooth: exponentially weighted mean over about the last ten.
    """

    seen: int = 0
    first: float = 0.0
    smooth: float = 0.0

    def after(self, value: float) -> Progress:
        """With one more finite value."""
        if self.seen < _FIRST:
            mean = (self.first * self.seen + value) / (self.seen + 1)
            return Progress(self.seen + 1, mean, mean)
        return self._replace(smooth=_MEMORY * self.smooth + (1 - _MEMORY) * value)

    def converged(self, share: float) -> bool:
        """Whether the loss has come down to a share of what it was at first."""
        return self.seen > 0 and abs(self.smooth) <= share * abs(self.first)
