"""The example of the guide runs on a dump of TensorFlow."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.sdk.trace.debugger_v2.dumps import dump
from watchstep.trace import read_trace

GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "debugger-v2.md"


def test_the_example_runs(tmp_path: Path) -> None:
    _, example = re.findall(r"```py\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "tensorflow-dump").symlink_to(dump("graph-concise_health"))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Log /tmp/watchstep-dumps/dumped_program.py:")
    assert len(done.stdout.splitlines()) == 11
    assert read_trace(tmp_path / "tensorflow.trace").operations
