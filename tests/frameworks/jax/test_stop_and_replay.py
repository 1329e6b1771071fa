"""An unmodified program whose scanned layer overflows is stopped, and a replay of its run names iteration, operation and line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")

from watchstep import open_run

PROGRAM = """
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

optimizer = optax.adam(1e-2)


def layer(x, inputs):
    weights, scale = inputs
    hidden = x @ weights
    return hidden / scale, None


def loss(weights, x, scales):
    x, _ = jax.lax.scan(layer, x, (weights, scales))
    return (x**2).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(weights, state, x, scales):
    value, gradients = jax.value_and_grad(loss)(weights, x, scales)
    updates, state = optimizer.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, value


def build():
    weights = jnp.stack([jnp.eye(4)] * 6)
    return weights, optimizer.init(weights), np.ones((8, 4), np.float32), np.ones(6, np.float32)


def replay():
    from watchstep.jax import JaxStep

    return JaxStep(step, build())


if __name__ == "__main__":
    weights, state, x, scales = build()
    for number in range(20):
        given = scales.copy()
        if number == 7:
            given[2] = 0.0
        weights, state, value = step(weights, state, x * (1 + number), given)
    print(float(value))
"""


def watchstep(folder: Path, *arguments: str, **environment: str) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "watchstep.command", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "JAX_PLATFORMS": "cpu",
            **environment,
        },
    )


@pytest.mark.parametrize("policy", ["stop", "explain", pytest.param("skip", marks=pytest.mark.release)])
def test_a_bad_step_is_bundled_before_its_state_is_gone(policy: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    options = ("--explain",) if policy == "explain" else ("--on-nonfinite", policy)
    run = ("run", "--store", "store", "--run", "r", *options, "--", sys.executable, "train.py")
    done = watchstep(tmp_path, *run)
    assert done.returncode == (0 if policy == "skip" else 86), done.stderr
    recorded = open_run(tmp_path / "store" / "default" / "r")
    assert recorded.state() == ("completed" if policy == "skip" else "stopped")
    assert recorded.tensor("loss").steps()[-1] == (19 if policy == "skip" else 7)
    line = PROGRAM.splitlines().index("    return hidden / scale, None") + 1
    if policy == "explain":
        assert "watchstep: first bad operation: scan[2]/div" in done.stderr
        reason = recorded.outcome().reason
        assert "scan[2]/div made the first NaN or infinity" in reason
        assert reason.endswith(f"train.py:{line} in layer: return hidden / scale, None")
        return

    command = ["replay", "store/default/r", "--step", "7", "--program", "train.py"]
    replay = watchstep(tmp_path, *command, *(["--json"] if policy == "skip" else []))
    assert replay.returncode == 0, replay.stderr
    if policy == "skip":
        assert "scan[2]/div" in json.dumps(json.loads(replay.stdout))
        return
    text = replay.stdout
    assert "scan[2]/div" in text
    assert f"train.py:{line} in layer" in text
    assert "return hidden / scale, None" in text


UNOBSERVED = """
import sys

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

optimizer = optax.sgd(0.1)


def update(weight, state, x):
    loss, gradient = jax.value_and_grad(lambda weight: ((x @ weight) ** 2).mean())(weight)
    updates, state = optimizer.update(gradient, state, weight)
    return optax.apply_updates(weight, updates), state, loss


weight, x = jnp.ones(4), jnp.full((2, 4), jnp.nan)
state = optimizer.init(weight)
everywhere = PartitionSpec()


def repeated(weight, state, x):
    for _ in range(65):
        weight, state, loss = update(weight, state, x)
    return weight, state, loss


def mapped(function, weight, state, x):
    weight, state, loss = jax.vmap(function, in_axes=(0, 0, None))(weight[None], state, x)
    return weight[0], state, loss


steps = {
    "ahead of time": lambda: jax.jit(update).lower(weight, state, x).compile(),
    "vmap": lambda: jax.jit(lambda *arguments: mapped(update, *arguments)),
    "shard_map": lambda: jax.jit(
        jax.shard_map(update, mesh=jax.make_mesh((1,), ("d",)), in_specs=everywhere, out_specs=everywhere)
    ),
    "first 64": lambda: jax.jit(repeated),
}
if "later" in sys.argv:
    jax.jit(update)(weight, state, jnp.ones((2, 4)))
step = steps[sys.argv[1]]()
for _ in range(3):
    weight, state, loss = step(weight, state, x)
"""


@pytest.mark.parametrize(
    ("how", "when"),
    [
        ("ahead of time", "first"),
        ("vmap", "first"),
        ("vmap", "later"),
        ("shard_map", "first"),
        ("first 64", "first"),
    ],
)
def test_a_program_whose_update_is_not_observed_is_told_at_once(how: str, when: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNOBSERVED, encoding="utf-8")
    run = (
        "run",
        "--store",
        "store",
        "--run",
        "r",
        "--on-nonfinite",
        "stop",
        "--",
        sys.executable,
        "train.py",
        how,
        when,
    )
    done = watchstep(tmp_path, *run)
    assert done.returncode == (86 if how == "first 64" else 0)
    (line,) = (line for line in done.stderr.splitlines() if "not observed" in line)
    assert how in line
    assert "NaN in it stops nothing" in line
    recorded = open_run(tmp_path / "store" / "default" / "r")
    assert recorded.state() == ("stopped" if how == "first 64" else "completed")
    (health,) = (end.health for end in recorded.ends())
    assert "not observed" in health["notes"]["jax"]
