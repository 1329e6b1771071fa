"""What is so or not from one record until another says otherwise."""

from __future__ import annotations

from bisect import bisect_right


class Flags:
    """A yes or no by mode that holds from the step at which it was seen until another is."""

    def __init__(self, before: dict[str, bool]) -> None:
        self.last = dict(before)
        self._before = before
        self._seen: dict[str, tuple[list[int], list[bool]]] = {}

    def seen_at(self) -> list[tuple[str, int]]:
        """Modes and steps at which it was yes."""
        return [
            (mode, step)
            for mode, (steps, flags) in self._seen.items()
            for step, flag in zip(steps, flags, strict=True)
            if flag
        ]

    def see(self, mode: str, step: int, *, flag: bool) -> None:
        """Steps ascend; of one step the last counts."""
        steps, flags = self._seen.setdefault(mode, ([], []))
        steps.append(step)
        flags.append(flag)
        self.last[mode] = flag

    def at(self, mode: str, step: int) -> bool:
        """As of a step, its own included."""
        steps, flags = self._seen.get(mode, ([], []))
        place = bisect_right(steps, step)
        return flags[place - 1] if place else self._before.get(mode, False)


def both(before: dict[str, bool], risen: Flags, overwritten: Flags) -> Flags:
    """Whether there was a step with both so far."""
    flags = Flags(before)
    for mode, step in risen.seen_at():
        if overwritten.at(mode, step):
            flags.see(mode, step, flag=True)
    return flags
