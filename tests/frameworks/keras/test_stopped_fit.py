"""A ``fit`` on JAX that is stopped leaves the weights in the model. Each program needs a process of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment_of

PROGRAM = Path(__file__).with_name("stopped_fit.py")


@pytest.mark.release
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("keras", "jax")),
    reason="Keras or JAX is not installed",
)
@pytest.mark.parametrize("kind", ["before_first_step", "between_steps", "eager_before_first_step", "eager"])
def test_a_stopped_fit_leaves_the_weights_in_the_model(kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), kind],
        env=environment_of(tmp_path, KERAS_BACKEND="jax", JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()[-1].split(",")) == 5
