"""What is recorded, how often, and within which bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from watchstep import tensors
from watchstep.errors import ConfigError


@dataclass(frozen=True)
class Cadence:
    """At which steps a collection is measured.

    Attributes:
        every: each so many steps.
        start: the first step.
        stop: the first step no more; None for no end.
    """

    every: int = 1
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(
                f"cadence: every={self.every}", "use 1 or more; leave the collection out for never"
            )

    def due(self, step: int) -> bool:
        """Whether the collection is measured at this step."""
        return (
            step >= self.start
            and (self.stop is None or step < self.stop)
            and (step - self.start) % self.every == 0
        )


def _default_collections() -> dict[str, Cadence]:
    names = (
        tensors.LOSSES,
        tensors.METRICS,
        tensors.GRADIENTS,
        tensors.WEIGHTS,
        tensors.BIASES,
        tensors.ACTIVATIONS,
    )
    return {name: Cadence() for name in names}


@dataclass(frozen=True)
class Bounds:
    """Limits that hold whatever the store, the service or the disk do.

    Attributes:
        queue_bytes: statistics waiting to be encoded; what comes beyond is dropped and counted.
        backlog_bytes: encoded objects waiting to be written; beyond, the queue is left to fill.
        flush_seconds: how long statistics wait in the first minute; later 2 s and more with the number of workers.
        control_seconds: how often the control document is looked for on the store when no service answers.
        close_seconds: the longest that closing waits for the store.
    """

    queue_bytes: int = 64 * 1024 * 1024
    backlog_bytes: int = 64 * 1024 * 1024
    flush_seconds: float = 0.25
    control_seconds: float = 5.0
    close_seconds: float = 10.0


@dataclass(frozen=True)
class CaptureConfig:
    """What to record.

    Attributes:
        collections: collection → cadence; a collection that is not named is not recorded.
        snapshot_every: full tensors of weights and gradients each so many steps; None for on request only.
        bounds: limits.
    """

    collections: Mapping[str, Cadence] = field(default_factory=_default_collections)
    snapshot_every: int | None = None
    bounds: Bounds = Bounds()

    def due(self, collection: str, step: int) -> bool:
        """Whether a collection is measured at a step."""
        cadence = self.collections.get(collection)
        return cadence is not None and cadence.due(step)
