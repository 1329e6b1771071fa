"""Programs that tests run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


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
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": paths, **quiet, **variables}
