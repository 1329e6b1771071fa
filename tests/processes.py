"""Programs that tests run in a process of their own, and the memory that a part of a test takes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Memory:
    """Bytes that Python has taken at the end of a block, and at most."""

    size: int = 0
    peak: int = 0


@contextmanager
def traced_memory(limit: float = math.inf) -> Iterator[Memory]:
    """Trace what a block takes, which must be less than a limit in bytes."""
    memory = Memory()
    tracemalloc.start()
    try:
        yield memory
        memory.size, memory.peak = tracemalloc.get_traced_memory()
        assert memory.peak < limit
    finally:
        tracemalloc.stop()


def run_python(
    *arguments: object,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 900,
) -> str:
    """Run Python with these arguments, and return what it prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment_of(home: Path, first: Path | str = "", **variables: str) -> dict[str, str]:
    """An environment of only what a program needs: this process's modules, after those in a folder that comes first."""
    paths = os.pathsep.join(filter(None, [str(first), *sys.path]))
    quiet = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": paths, **quiet, **variables}
