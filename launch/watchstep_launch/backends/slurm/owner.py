"""Whose a job of Slurm's is, and whether another user may stop it: as slurmctld decides it, without a signal that tries it."""

from __future__ import annotations

import os
import pwd
import re

from watchstep_launch.backends.slurm.accounting import JobRow
from watchstep_launch.backends.slurm.commands import run
from watchstep_launch.errors import BackendError

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
