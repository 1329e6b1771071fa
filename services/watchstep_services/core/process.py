"""Settings of a service process: the garbage collector, the limit of open files, and the folder of its metrics.

The collector of reference cycles holds the interpreter's lock while it traverses the process's objects. The limit of open files is raised
at the start, and shared between connections and everything else. The processes of one service share a folder of metrics, so that
they can be summed. This module is separate from `metrics`, because the folder must be set before prometheus_client is imported.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import tempfile

_THRESHOLDS = (50_000, 20, 100)
"""Thresholds of CPython's three generations; 700, 10 and 10 by default. Parsing one long request creates tens of thousands of objects."""


def settle_collector() -> None:
    """Exclude the objects loaded so far from later collections, and collect less often. Called once after a process has started.

    A process of the service has some 600,000 objects of modules. A body of 1 MiB with 8,600 lists took 0.84 s to parse, most of it in
    collections, and takes 0.1 s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


_MOST = 65_536
"""Not the hard limit itself, which may be a billion: programs that close all descriptors one by one would take minutes."""

_RESERVE = 256
"""Descriptors reserved for databases, stores, rule processes and logs."""

_LEAST = 32


def raise_file_limit() -> None:
    """Raise the soft limit of this process to the hard one, up to 65,536. Many systems start processes with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # forbidden by a container: the limit is unchanged
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """Limit of simultaneous connections of this process, which leaves 256 files for other work."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(_LEAST, min(soft, _MOST) - _RESERVE)


FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def share_figures() -> None:
    """Have this process and its child processes share their metrics, in a new folder."""
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="watchstep-figures-")


def forget_folder() -> None:
    """Remove the folder, at the end of the process that created it."""
    if folder := os.environ.pop(FOLDER, ""):
        shutil.rmtree(folder, ignore_errors=True)
