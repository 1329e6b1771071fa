"""Confines the current process: files, processes, network and memory. The child calls it once; the confinement is permanent."""

from __future__ import annotations

import contextlib
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
    """The isolation reached on this machine, as the child reports it before it receives the program.

    Attributes:
        rlimits: memory, CPU time, number of processes, number of files and file size are limited.
        no_new_privs: no program that the process starts gains privileges.
        landlock: Landlock version that restricts file access; 0 if the kernel has none.
        seccomp: a filter checks system calls: no sockets, processes, programs or tracing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rlimits: bool = False
    no_new_privs: bool = False
    landlock: int = Field(0, ge=0)
    seccomp: bool = False

    @property
    def full(self) -> bool:
        """Whether every kind of isolation was reached."""
        return self.rlimits and self.no_new_privs and self.landlock > 0 and self.seccomp

    def __str__(self) -> str:
        missing = [name for name, reached in self if not reached]
        return "full" if self.full else f"partial, without {', '.join(missing)}"


def demand() -> Demand:
    """Return the isolation that this process requires: from `set_demand`, else from the environment.

    Raises:
        ConfigError: the environment variable has another value.
    """
    if _demanded is not None:
        return _demanded
    value = os.environ.get(VARIABLE) or DEFAULT
    for choice in get_args(Demand):
        if value == choice:
            return choice  # type: ignore[no-any-return]  # an element of the literal
    raise ConfigError(f"{VARIABLE} = {value!r}: not known", f"use one of {', '.join(get_args(Demand))}")


def set_demand(value: Demand | None) -> None:
    """Set the required isolation of this process; None uses the environment."""
    global _demanded  # noqa: PLW0603 - one setting of the process
    _demanded = value


def why_not(isolation: Isolation) -> str:
    """Return why a program must not run under this isolation; empty if it may run."""
    required = demand()
    if required == "refuse":
        return f"Python rules are refused here ({VARIABLE}=refuse)"
    if required == "full_only" and not isolation.full:
        return f"this machine isolates only in part ({isolation}), and {VARIABLE} is full_only"
    return ""


CPU_SECONDS = 600
"""CPU time of a child over its lifetime. Children are replaced long before, so only a runaway child reaches it."""

_FILES = 64
_THREADS = Path("/proc/self/task")
_SIZES = Path("/proc/self/statm")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")


@dataclass(frozen=True)
class AddressSpace:
    """The address space in use by this process, from a file of ``/proc`` that was opened before confinement.

    Attributes:
        descriptor: descriptor of the open file; -1 if the system has no such file.
    """

    descriptor: int

    @classmethod
    def open(cls) -> AddressSpace:
        """Open the file. Landlock refuses this later."""
        try:
            return cls(os.open(_SIZES, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            return cls(-1)

    def used(self) -> int | None:
        """Return the bytes in use, including reservations of libraries; None if unknown."""
        if self.descriptor < 0:
            return None
        return int(os.pread(self.descriptor, 128, 0).split()[0]) * resource.getpagesize()

    def close(self) -> None:
        """Close the file. `used` returns None afterwards."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


def shut_files(kept: tuple[int, ...], readable: Sequence[Path] = ()) -> tuple[int, AddressSpace]:
    """Permanently drop access to all files, except reading the interpreter's own. Call it before any thread starts.

    Args:
        kept: file descriptors that stay open, in addition to 0, 1 and 2.
        readable: additional readable files and folders.

    Returns:
        The Landlock version in use, 0 if none; and the measurement of the address space.
    """
    _close_all_but(kept)
    space = AddressSpace.open()
    single_threaded = (
        _THREADS.is_dir() and len(list(_THREADS.iterdir())) == 1
    )  # Landlock does not restrict threads that already run
    _pin(readable)
    version = (
        kernel.restrict([*_interpreters_own(), *readable]) if no_new_privileges() and single_threaded else 0
    )
    return version, space


def _pin(paths: Sequence[Path]) -> None:
    """Keep the entries of these paths in the kernel's cache until the process ends, by descriptors that are never closed.

    Landlock permits inodes. Files of ``/proc`` get a new inode, which is not permitted, once memory is scarce and the kernel has
    dropped their entry.
    """
    for path in paths:
        with contextlib.suppress(OSError):
            os.open(path, os.O_PATH | os.O_CLOEXEC)


def shut_in(memory_mb: int, landlock_abi: int, space: AddressSpace, *, threads: bool) -> Isolation:
    """Permanently drop everything else except computing: processes, network, limits. Load nothing that opens files afterwards.

    Args:
        memory_mb: additional memory that the process may use, in MiB.
        landlock_abi: Landlock version from `shut_files`.
        space: measurement from `shut_files`. Libraries loaded since then do not count against the program.
        threads: whether more threads may be started.

    Returns:
        The isolation that was reached.
    """
    limited = _limit(memory_mb, space.used())
    not_dumpable()
    drop_capabilities()
    unprivileged = no_new_privileges()
    return Isolation(
        rlimits=limited,
        no_new_privs=unprivileged,
        landlock=landlock_abi,
        seccomp=unprivileged and seccomp.restrict(threads=threads),
    )


def _interpreters_own() -> list[Path]:
    """Return the folders of Python, its packages and the libraries that they load."""
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
    """Set the limits; return whether all are set. The memory limit needs a measurement of the memory in use."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_CPU: CPU_SECONDS,
        resource.RLIMIT_NPROC: 0,
    }
    if used is not None:
        limits[resource.RLIMIT_AS] = used + memory_mb * 1024 * 1024
    try:
        for kind, limit in limits.items():
            resource.setrlimit(kind, (limit, limit))
    except (OSError, ValueError):
        return False
    return used is not None
