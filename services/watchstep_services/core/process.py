"""Python's collector of cycles in the processes of a service: it holds the interpreter's lock while it walks their objects.

The limit of open files of a process: raised at its start, and shared between connections and everything else.

The folder in which the processes of one service keep their metrics, so that they can be summed.

Separate from `exposition`, because the folder must be named before prometheus_client is imported: the library decides then, once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import tempfile

_THRESHOLDS = (50_000, 20, 100)
"""Of CPython's three generations; 700, 10 and 10 by default. A request that parses a long text makes tens of thousands of objects."""


def settle_collector() -> None:
    """Leave what has been loaded by now out of later collections, and collect less often. Called once a process has started.

    A process of the service has some 600,000 objects of modules. A body of 1 MiB with 8,600 lists took 0.84 s to parse, most of it in
    collections, and takes 0.1 s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


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


FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def share_figures() -> None:
    """Have this process and those that it starts keep their figures together, in a new folder."""
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="watchstep-figures-")


def forget_folder() -> None:
    """Remove the folder; at the end of the process that made it."""
    if folder := os.environ.pop(FOLDER, ""):
        shutil.rmtree(folder, ignore_errors=True)
