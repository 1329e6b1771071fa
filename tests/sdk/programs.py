"""Programs of tests that run in processes of their own."""

from __future__ import annotations

import os
from pathlib import Path

from tests.warmed import warmed

ROOT = Path(__file__).parents[2]


def run_program(folder: Path, source: str, *arguments: str | Path, ranks: int = 0, **environment: str) -> str:
    """Run a Python program, in ranks as torchrun starts them where a number is given. It must succeed. Returns its output."""
    program = folder / "train.py"
    program.write_text(source)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return warmed().run(program, *arguments, folder=ROOT, environment=variables, ranks=ranks)
