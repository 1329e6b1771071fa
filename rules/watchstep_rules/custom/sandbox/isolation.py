"""How far a program is shut off, and how far it must be."""

from __future__ import annotations

import os
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from watchstep.errors import ConfigError

VARIABLE = "WATCHSTEP_PYTHON_RULES"
Demand = Literal["refuse", "allow_partial", "full_only"]
DEFAULT: Demand = "full_only"

_demanded: Demand | None = None


class Isolation(BaseModel):
    """What was reached on this machine, as the child says before it sees a line of the program.

    Attributes:
        rlimits: memory, processor time, processes, files and their size are bounded.
        no_new_privs: nothing that it could start would gain rights.
        landlock: version of Landlock that shuts off files; 0 where the kernel has none.
        seccomp: system calls go through a filter: no sockets, processes, programs, tracing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rlimits: bool = False
    no_new_privs: bool = False
    landlock: int = Field(0, ge=0)
    seccomp: bool = False

    @property
    def full(self) -> bool:
        """Whether nothing is missing."""
        return self.rlimits and self.no_new_privs and self.landlock > 0 and self.seccomp

    def __str__(self) -> str:
        missing = [name for name, reached in self if not reached]
        return "full" if self.full else f"partial, without {', '.join(missing)}"


def demand() -> Demand:
    """What is asked for in this process: by `set_demand`, else by the environment.

    Raises:
        ConfigError: the environment says something else.
    """
    if _demanded is not None:
        return _demanded
    value = os.environ.get(VARIABLE) or DEFAULT
    for known in get_args(Demand):
        if value == known:
            return known  # type: ignore[no-any-return]  # an element of the literal
    raise ConfigError(f"{VARIABLE} = {value!r}: not known", f"use one of {', '.join(get_args(Demand))}")


def set_demand(value: Demand | None) -> None:
    """Ask for it in this process, whatever the environment says; None for what that says."""
    global _demanded  # noqa: PLW0603 - one setting of the process
    _demanded = value


def why_not(isolation: Isolation) -> str:
    """Why a program must not run under this isolation; empty where it may."""
    asked = demand()
    if asked == "refuse":
        return f"Python rules are refused here ({VARIABLE}=refuse)"
    if asked == "full_only" and not isolation.full:
        return f"this machine isolates only in part ({isolation}), and {VARIABLE} is full_only"
    return ""
