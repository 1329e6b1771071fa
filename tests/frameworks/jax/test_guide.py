"""The examples of the guide, as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "optax", reason="OPTAX IS NOT INSTALLED: the examples of the guide of JAX are not proven by this run"
)

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "jax.md"
EXAMPLES = re.findall(r"```\{ \.python \.no-run \}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(3))
def test_an_example_runs(tmp_path: Path, number: int) -> None:
    program = tmp_path / "train.py"
    program.write_text(EXAMPLES[number])
    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(EXAMPLES) == 3
