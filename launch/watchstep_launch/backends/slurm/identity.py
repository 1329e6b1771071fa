"""Which job of Slurm's is meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from watchstep.errors import ConfigError
from watchstep_launch.backend import JobHandle
from watchstep_launch.backends.slurm.accounting import JobRow


@dataclass(frozen=True)
class SlurmIdentity:
    """What tells a job from every other with its id, however often Slurm starts it again.

    Attributes:
        cluster: its name.
        name: of the job; no two launches share one.
        submitted: when it was submitted, in seconds since 1970. A requeue gives it another time.
        restarts: how often it had been requeued by then.
    """

    cluster: str
    name: str
    submitted: int
    restarts: int

    @classmethod
    def of(cls, job: JobHandle) -> SlurmIdentity:
        """The identity of a job.

        Raises:
            ConfigError: it is none of Slurm's.
        """
        try:
            held = job.identity
            return cls(str(held["cluster"]), str(held["name"]), int(held["submitted"]), int(held["restarts"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"job {job.id!r}: its identity is none of Slurm's ({error!r})",
                "bind it with cluster, name, submitted and restarts, as Slurm.reattach gives them",
            ) from error

    @classmethod
    def of_row(cls, row: JobRow) -> SlurmIdentity:
        """The identity of what Slurm shows now."""
        return cls(row.cluster, row.name, row.submitted, row.restarts)

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)

    def means(self, row: JobRow) -> bool:
        """Whether it is this job, or what Slurm made of it by requeues."""
        if self.cluster != row.cluster:
            return False
        requeued = row.restarts > self.restarts and row.submitted > self.submitted
        return row.submitted == self.submitted or (requeued and row.name == self.name)

    def among_accounted(self, rows: Sequence[JobRow]) -> JobRow | None:
        """The last start of this job, of those that accounting has for its id, oldest first."""
        mine = [
            row
            for row in rows
            if (row.cluster, row.name) == (self.cluster, self.name) and row.submitted >= self.submitted
        ]
        known = any(row.submitted == self.submitted for row in mine)
        return mine[-1] if known else None
