"""What has been measured in a step already, where several updates are one step.

A critic steps five times for one step of its generator; an optimizer may step inside another's, as Lookahead's and
SAM's do. Weights and gradients are then those of the first update: rows of one tensor and step merge, and would tell
of a tensor five times as large.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

Kind = tuple[str, Hashable]


class FirstOfStep:
    """Ids of what was measured in the step under way, by kind."""

    def __init__(self) -> None:
        self._step = -1
        self._measured: dict[Kind, set[int] | Collection[int]] = {}

    def left(self, kind: Kind, ids: Collection[int], step: int) -> Collection[int]:
        """Those that have not been measured in this step; they count as measured from now on.

        Args:
            kind: what is measured of them.
            ids: the same object at each step, or else a short one: of the first update it is kept, and not copied.
            step: of the run.
        """
        if step != self._step:
            self.forget()
            self._step = step
        known = self._measured.get(kind)
        if known is None:
            self._measured[kind] = ids
            return ids
        if not isinstance(known, set):
            known = self._measured[kind] = set(known)
        left = [one for one in ids if one not in known]
        known.update(left)
        return left

    def forget(self) -> None:
        """Measure all again: something is wrong that the first update did not show."""
        self._measured.clear()
