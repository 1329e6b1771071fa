"""Where and when something of a run is published."""

from __future__ import annotations

from dataclasses import dataclass

from watchstep_services.evaluator.claim import Claim


@dataclass(frozen=True)
class Place:
    """A run's attempt at a moment.

    Attributes:
        base_url: of the API.
        run_id: in the database.
        project: the run's.
        run: its name.
        location: URL or path that holds the project's runs.
        attempt: which attempt.
        now_ns: the database's time.
    """

    base_url: str
    run_id: int
    project: str
    run: str
    location: str
    attempt: str
    now_ns: int

    @classmethod
    def of(cls, base_url: str, held: Claim, attempt: str, now_ns: int) -> Place:
        """That of an evaluation."""
        return cls(base_url, held.run_id, held.project, held.run, held.place.location, attempt, now_ns)

    @property
    def named(self) -> tuple[str, str]:
        """Project and run."""
        return self.project, self.run
