"""The examples of the guide, as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "keras", reason="KERAS IS NOT INSTALLED: the examples of its guide are not proven by this run"
)
pytest.importorskip("tensorflow", reason="TENSORFLOW IS NOT INSTALLED: as above")

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "keras.md"
EXAMPLES = re.findall(r"```\{ \.python \.no-run \}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_an_example_runs(tmp_path: Path, number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLES[number]],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(EXAMPLES) == 2
