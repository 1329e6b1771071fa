"""What is recorded, how often, and within which bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from watchstep import tensors
from watchstep.errors import ConfigError


@dataclass(frozen=True)
class Cadence:
    """At which steps a collection is measured.

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
        if self.every is not None and self.every < 1:
            raise ConfigError(
                f"cadence: every={self.every}", "use 1 or more; leave the collection out for never"
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


def _default_collections() -> dict[str, Cadence]:
    costly = (tensors.GRADIENTS, tensors.WEIGHTS, tensors.BIASES, tensors.ACTIVATIONS)
    return {tensors.LOSSES: Cadence(), tensors.METRICS: Cadence(), **dict.fromkeys(costly, ADAPTIVE)}


@dataclass(frozen=True)
class Bounds:
    """Limits that hold whatever the store, the service or the disk do.

    Attributes:
        queue_bytes: statistics waiting to be encoded; what comes beyond is dropped and counted.
        backlog_bytes: encoded objects that wait in memory for the store; beyond, the oldest go to disk.
        spill_bytes: encoded objects that wait on disk; beyond, or with 0, the queue is left to fill.
        flush_seconds: how long statistics wait in the first minute; later 2 s and more with the number of workers.
        control_seconds: how often the control document is looked for on the store when no service answers.
        close_seconds: the longest that closing waits for the store.
        term_seconds: the longest that a SIGTERM is put off to write what is left.
    """

    queue_bytes: int = 64 * 1024 * 1024
    backlog_bytes: int = 64 * 1024 * 1024
    spill_bytes: int = 1024 * 1024 * 1024
    flush_seconds: float = 1.0
    control_seconds: float = 5.0
    close_seconds: float = 10.0
    term_seconds: float = 5.0


@dataclass(frozen=True)
class CaptureConfig:
    """What to record.

    Attributes:
        collections: collection → cadence; a collection that is not named is not recorded.
        overhead_budget: share of the program's own time that recording may take; it decides how often collections
            with an adaptive cadence are measured. None for no budget: these are then measured at every step.
        allowance_seconds: that may be spent on each step besides, for steps so short that a share is nothing.
        gate: look for NaN and infinity at every step, and measure everything of a step that has some.
        snapshot_every: full tensors of weights and gradients each so many steps; None for on request only.
        bounds: limits.
    """

    collections: Mapping[str, Cadence] = field(default_factory=_default_collections)
    overhead_budget: float | None = 0.01
    allowance_seconds: float = 0.0
    gate: bool = True
    snapshot_every: int | None = None
    bounds: Bounds = Bounds()

    def __post_init__(self) -> None:
        if self.snapshot_every is not None and self.snapshot_every < 1:
            raise ConfigError(
                f"snapshot_every={self.snapshot_every}", "use 1 or more, or None for on request only"
            )
        budget: Any = self.overhead_budget
        if budget is not None and not (isinstance(budget, float | int) and 0 < budget <= 1):
            raise ConfigError(
                f"overhead_budget={self.overhead_budget}",
                "use a share of the step's time, such as 0.01, or None",
            )
