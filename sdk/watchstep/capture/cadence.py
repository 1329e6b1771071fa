"""At which steps something is measured."""

from __future__ import annotations

from dataclasses import dataclass

from watchstep.errors import ConfigError


@dataclass(frozen=True)
class Cadence:
    """At which steps a collection is measured. In other modes than train, forward passes of that mode are counted.

    Attributes:
        every: each so many steps; None for as often as the overhead budget allows.
        start: the first step.
        stop: the first step no more; None for no end.
        steps: these steps besides, whether within start and stop or not.
    """

    every: int | None = 1
    start: int = 0
    stop: int | None = None
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise ConfigError(
                f"cadence: every={self.every}",
                "use a whole number from 1; leave the collection out for never",
            )

    def due(self, step: int) -> bool:
        """Whether the collection is measured at this step, where that does not depend on the budget."""
        every = self.every or 1
        return step in self.steps or (self.within(step) and (step - self.start) % every == 0)

    def within(self, step: int) -> bool:
        """Whether the step lies between start and stop."""
        return step >= self.start and (self.stop is None or step < self.stop)


ADAPTIVE = Cadence(every=None)
"""As often as the overhead budget allows."""
