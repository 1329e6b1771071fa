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


_SLURM_USER = re.compile(r"^SlurmUser\s*=\s*.*\((\d+)\)\s*$", re.MULTILINE)
_ADMINS = frozenset(("operator", "administrator"))


def check_may_stop(row: JobRow) -> None:
    """See that this process's user may stop a job.

    Raises:
        BackendError: it is another user's, and this one is neither root nor Slurm's user, nor, by accounting, an operator,
            an administrator or a coordinator of the job's account.
    """
    me = os.geteuid()
    if (
        me == 0
        or row.user in ("", str(me))
        or me == _slurm_user()
        or _is_over_others(_name_of(me), row.account)
    ):
        return
    raise BackendError(
        f"job slurm:{row.id}: is user {_name_of(int(row.user))}'s, and {_name_of(me)} may not stop it",
        "attach as the user that it runs as, or as one of Slurm's operators",
    )


def reads_as_over_others(said: str, account: str) -> bool:
    """Whether accounting tells of a user that may stop others' jobs in an account.

    Args:
        said: a line for each of its rows: level, and accounts that it coordinates, as ``sacctmgr --parsable2`` writes them.
        account: the job's.
    """
    for line in said.splitlines():
        level, _, accounts = line.strip().partition("|")
        if level.lower() in _ADMINS or account in filter(None, accounts.split(",")):
            return True
    return False


def _slurm_user() -> int | None:
    found = _SLURM_USER.search(run(("scontrol", "show", "config")))
    return None if found is None else int(found[1])


def _is_over_others(name: str, account: str) -> bool:
    asked = ("--noheader", "--parsable2", "show", "user", name, "withcoord", "format=AdminLevel,Coordinators")
    try:
        return reads_as_over_others(run(("sacctmgr", *asked)), account)
    except BackendError:
        return False  # there is no accounting, or it does not say: nobody is known to be one


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
