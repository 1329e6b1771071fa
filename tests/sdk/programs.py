"""Programs of tests that run in processes of their own."""

from __future__ import annotations

import os
from pathlib import Path

from tests.processes import run_python

ROOT = Path(__file__).parents[2]


def run_program(
    folder: Path,
    source: str,
    *arguments: str | Path,
    ranks: int = 0,
    timeout: float = 900,
    **environment: str,
) -> str:
    """Run a Python program, under torchrun where a number of ranks is given. It must succeed. Returns its output."""
    program = folder / "train.py"
    program.write_text(source)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run_python(
        *(torchrun if ranks else []),
        program,
        *arguments,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        timeout=timeout,
    )
