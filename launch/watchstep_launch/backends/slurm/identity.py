"""A Slurm job's identity and its owner."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from watchstep.errors import ConfigError
from watchstep_launch.backend import BackendError, JobHandle
from watchstep_launch.backends.slurm.commands import JobRow, run


@dataclass(frozen=True)
class SlurmIdentity:
    """Distinguishes a job from every other job with its id, across Slurm's restarts of it.

    Attributes:
        cluster: name of the cluster.
        name: the job's name, unique among launches.
        submitted: time of submission in seconds since 1970. A requeue changes it.
        restarts: how often the job had been requeued by then.
    """

    cluster: str
    name: str
    submitted: int
    restarts: int

    @classmethod
    def of(cls, job: JobHandle) -> SlurmIdentity:
        """Return the identity of a job.

        Raises:
            ConfigError: the identity is not a Slurm identity.
        """
        try:
            data = job.identity
            return cls(str(data["cluster"]), str(data["name"]), int(data["submitted"]), int(data["restarts"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"job {job.id!r}: the identity is not a Slurm identity ({error!r})",
                "use cluster, name, submitted and restarts, as Slurm.reattach returns them",
            ) from error

    @classmethod
    def of_row(cls, row: JobRow) -> SlurmIdentity:
        """Return the identity of a row."""
        return cls(row.cluster, row.name, row.submitted, row.restarts)

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return asdict(self)

    def means(self, row: JobRow) -> bool:
        """Whether a row is this job, or a requeue of it."""
        if self.cluster != row.cluster:
            return False
        requeued = row.restarts > self.restarts and row.submitted > self.submitted
        return row.submitted == self.submitted or (requeued and row.name == self.name)

    def last_start(self, rows: Sequence[JobRow]) -> JobRow | None:
        """Return the last start of this job among accounting rows for its id, oldest first."""
        matching = [
            row
            for row in rows
            if (row.cluster, row.name) == (self.cluster, self.name) and row.submitted >= self.submitted
        ]
        has_first = any(row.submitted == self.submitted for row in matching)
        return matching[-1] if has_first else None


_SLURM_USER = re.compile(r"^SlurmUser\s*=\s*.*\((\d+)\)\s*$", re.MULTILINE)
_ADMINS = frozenset(("operator", "administrator"))


def check_may_stop(row: JobRow) -> None:
    """Check that this process's user may stop a job.

    Raises:
        BackendError: the job belongs to another user, and this user is neither root nor Slurm's user nor, according to
            accounting, an operator, an administrator or a coordinator of the job's account.
    """
    uid = os.geteuid()
    if (
        uid == 0
        or row.user in ("", str(uid))
        or uid == _slurm_user()
        or _may_stop_others(_name_of(uid), row.account)
    ):
        return
    raise BackendError(
        f"job slurm:{row.id} belongs to user {_name_of(int(row.user))}; user {_name_of(uid)} may not stop it",
        "attach as the job's user, or as one of Slurm's operators",
    )


def permits_stopping_others(output: str, account: str) -> bool:
    """Whether accounting permits a user to stop other users' jobs in an account.

    Args:
        output: output of ``sacctmgr --parsable2``, with a line per association: admin level, and coordinated accounts.
        account: the job's account.
    """
    for line in output.splitlines():
        level, _, accounts = line.strip().partition("|")
        if level.lower() in _ADMINS or account in filter(None, accounts.split(",")):
            return True
    return False


def _slurm_user() -> int | None:
    match = _SLURM_USER.search(run(("scontrol", "show", "config")))
    return None if match is None else int(match[1])


def _may_stop_others(name: str, account: str) -> bool:
    arguments = (
        "--noheader",
        "--parsable2",
        "show",
        "user",
        name,
        "withcoord",
        "format=AdminLevel,Coordinators",
    )
    try:
        return permits_stopping_others(run(("sacctmgr", *arguments)), account)
    except BackendError:
        return False  # without accounting, nobody has this permission


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
