"""The protocol of a run of another tool, and what is mirrored into it besides points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

PREFIX = "watchstep"
"""First part of all names in other tools."""

AlertPhase = Literal["firing", "resolved"]
MAX_TEXT = 1000
"""Maximum length of an alert's text in another tool."""


@dataclass(frozen=True)
class MirroredPoint:
    """Values of one step.

    Attributes:
        step: the step, as recorded.
        time_ns: when its last row was measured, in nanoseconds since the epoch.
        values: value by name; NaN and infinite values included.
    """

    step: int
    time_ns: int
    values: dict[str, float]


@dataclass(frozen=True)
class AlertChange:
    """A change of an alert that is mirrored.

    Attributes:
        name: name of the rule config; ``stop`` for the stop of the training.
        phase: what it became.
        severity: info, warning or critical.
        step: the step of the change.
        message: one sentence for users.
        url: URL of the alert's web page; empty if unknown.
    """

    name: str
    phase: AlertPhase
    severity: str
    step: int
    message: str
    url: str = ""

    @property
    def series(self) -> str:
        """Name of its series, which is 1 where the alert begins to fire and 0 where it resolves."""
        return f"{PREFIX}/alerts/{self.name}"

    @property
    def text(self) -> str:
        """The change as one line."""
        text = f"{self.phase} at step {self.step}: {self.message}"[:MAX_TEXT]
        return f"{text} {self.url}" if self.url else text


@dataclass(frozen=True)
class RunLinks:
    """Where the run is found in Watchstep.

    Attributes:
        project: the project.
        run: the run's id.
        url: URL of the run on its store, for `watchstep.open_run`.
        page: URL of the run's web page; empty if unknown.
    """

    project: str
    run: str
    url: str
    page: str = ""

    def as_data(self) -> dict[str, str]:
        """JSON-ready, without what is unknown."""
        data = {"project": self.project, "run": self.run, "url": self.url, "page": self.page}
        return {name: value for name, value in data.items() if value}


@dataclass(frozen=True)
class OtherRun:
    """Identity of the run of another tool.

    Attributes:
        id: its id.
        url: its URL for users; empty without one, such as offline.
        place: a folder or database that has it, for users.
    """

    id: str
    url: str = ""
    place: str = ""

    def as_data(self) -> dict[str, str]:
        """JSON-ready, without what is unknown."""
        return {name: value for name, value in vars(self).items() if value}


class MirroredRun(Protocol):
    """A run of another tool. Its methods may block and raise anything."""

    @property
    def identity(self) -> OtherRun:
        """Identity of the run."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the program has finished the run, so that nothing more can be written. Never raises."""
        ...

    def link(self, links: RunLinks) -> None:
        """Add links to Watchstep. Called again when more is known."""
        ...

    def alert(self, change: AlertChange) -> None:
        """Show a change of an alert. Its series is written as a point."""
        ...

    def write(self, points: Sequence[MirroredPoint]) -> int:
        """Write points, and earlier ones that the tool could not take yet. Returns the number of points that still wait."""
        ...

    def close(self, *, is_stopped: bool) -> int:
        """Write what waits. Returns the number of points that could not be written.

        Args:
            is_stopped: whether Watchstep stopped the training, so that the program logs nothing more.
        """
        ...
