"""The demo, as a user runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.release

WATCHSTEP = Path(sys.executable).with_name("watchstep")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [WATCHSTEP, "demo", "--json", "--seed", "3", "--folder", folder],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder


def test_the_faulty_run_is_stopped_and_the_healthy_one_left_alone(shown: tuple[str, Path]) -> None:
    healthy, faulty = json.loads(shown[0].splitlines()[-1])["runs"]
    assert (healthy["state"], healthy["steps"], healthy["alerts"]) == ("completed", 300, [])
    assert healthy["stopped_at_step"] is None
    (alert,) = faulty["alerts"]
    assert faulty["state"] == "stopped"
    assert (alert["rule"], alert["severity"]) == ("training_stopped", "critical")
    assert 150 <= alert["step"] == faulty["stopped_at_step"] < 300
    assert set(faulty) == {"run_id", "state", "steps", "alerts", "stopped_at_step"}
    assert set(alert) == {"rule", "tensor", "step", "value", "threshold", "severity"}


def test_it_explains_with_a_picture(shown: tuple[str, Path]) -> None:
    text, folder = shown
    for part in (
        "rule ",
        "line ",
        "read it first at ",
        "model(images[batch])",
        "ended ",
        "of the loss by step",
    ):
        assert part in text
    (picture,) = folder.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_three_lines_fetch_the_evidence(shown: tuple[str, Path]) -> None:
    lines = [line.strip() for line in shown[0].splitlines() if re.match(r"    (import|run =|print)", line)]
    assert len(lines) == 3
    assert "(it needs pandas: pip install -e '.[pandas]' in the clone):" in shown[0]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True, timeout=600
    )
    (alert,) = json.loads(shown[0].splitlines()[-1])["runs"][1]["alerts"]
    assert int(done.stdout.splitlines()[1].split()[1]) == alert["step"]
