"""Confinement of the current process: files, processes, network and memory. It is called once, by the child, and is permanent."""

from __future__ import annotations

import os
import resource
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

import watchstep
from watchstep.errors import ConfigError
from watchstep_rules.custom.sandbox import kernel, seccomp
from watchstep_rules.custom.sandbox.kernel import drop_capabilities, no_new_privileges, not_dumpable

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


CPU_SECONDS = 600
"""Processor time of a child's whole life. It is replaced long before, so only one that is out of hand meets it."""

_FILES = 64
_THREADS = Path("/proc/self/task")
_SIZES = Path("/proc/self/statm")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")


@dataclass(frozen=True)
class AddressSpace:
    """How much address space this process uses: a file of ``/proc`` that was opened while it could be.

    Attributes:
        descriptor: of the open file; -1 where the system has none.
    """

    descriptor: int

    @classmethod
    def open(cls) -> AddressSpace:
        """Open the file; Landlock refuses it later."""
        try:
            return cls(os.open(_SIZES, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return cls(-1)

    def used(self) -> int | None:
        """Bytes in use, reservations of libraries included; None where the system does not say."""
        if self.descriptor < 0:
            return None
        return int(os.pread(self.descriptor, 128, 0).split()[0]) * resource.getpagesize()

    def close(self) -> None:
        """Close the file: `used` is None from then on."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


def shut_files(kept: tuple[int, ...], readable: Sequence[Path] = ()) -> tuple[int, AddressSpace]:
    """Give up all files but the interpreter's own, which may be read: before any thread is started, for good.

    Args:
        kept: file descriptors that stay open, besides 0, 1 and 2.
        readable: other files and folders that may be read.

    Returns:
        The version of Landlock that does it, 0 where none does; and what measures the address space.
    """
    _close_all_but(kept)
    space = AddressSpace.open()
    alone = (
        _THREADS.is_dir() and len(list(_THREADS.iterdir())) == 1
    )  # it does not hold threads that run already
    version = kernel.restrict([*_interpreters_own(), *readable]) if no_new_privileges() and alone else 0
    return version, space


def shut_in(memory_mb: int, landlock_abi: int, space: AddressSpace, *, threads: bool) -> Isolation:
    """Give up the rest but computing: processes, network, limits. Nothing that opens is loaded after it.

    Args:
        memory_mb: how much more memory may be taken, in MiB.
        landlock_abi: what `shut_files` gave.
        space: what `shut_files` gave; libraries have been loaded since, and what they reserve is not the program's.
        threads: whether more threads may be started.

    Returns:
        What was reached.
    """
    limited = _limit(memory_mb, space.used())
    not_dumpable()
    drop_capabilities()
    private = no_new_privileges()
    return Isolation(
        rlimits=limited,
        no_new_privs=private,
        landlock=landlock_abi,
        seccomp=private and seccomp.restrict(threads=threads),
    )


def _interpreters_own() -> list[Path]:
    """Where Python, its packages and the libraries that they load lie."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    packages = [Path(watchstep.__path__[0]), Path(__file__).parents[2]]
    own = [Path(sysconfig.get_path(name)) for name in names]
    shared = [Path(prefix) / "lib" / "python3" for prefix in (sys.prefix, sys.base_prefix)]
    return [folder for folder in (*own, *packages, *shared, *map(Path, _LIBRARIES)) if folder.is_dir()]


def _close_all_but(kept: tuple[int, ...]) -> None:
    start = 3
    for descriptor in sorted(kept):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, 65536)


def _limit(memory_mb: int, used: int | None) -> bool:
    """Whether all limits hold, that of memory among them: without a measure of what is in use it cannot be set."""
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_CPU: CPU_SECONDS,
        resource.RLIMIT_NPROC: 0,
    }
    if used is not None:
        bounds[resource.RLIMIT_AS] = used + memory_mb * 1024 * 1024
    try:
        for kind, most in bounds.items():
            resource.setrlimit(kind, (most, most))
    except (OSError, ValueError):
        return False
    return used is not None
