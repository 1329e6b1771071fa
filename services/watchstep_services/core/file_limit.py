"""The limit of open files of a process: raised at its start, and shared between connections and everything else."""

from __future__ import annotations

import contextlib
import resource

_MOST = 65_536
"""Not the hard limit itself, which may be a billion: programs that close all descriptors one by one would take minutes."""

_RESERVE = 256
"""Descriptors for databases, stores, rule processes and logs, which connections never take."""

_LEAST = 32


def raise_file_limit() -> None:
    """Raise the soft limit of this process to the hard one, up to 65,536. Many systems start processes with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # forbidden by a container: the limit stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """How many connections this process may keep open at a time, such that 256 files are left for other work."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(_LEAST, min(soft, _MOST) - _RESERVE)
