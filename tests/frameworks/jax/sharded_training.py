"""A training over four devices, in one process or in two. Run as a script.

Arguments: rank, number of processes, address of the coordinator, folder. It records into ``folder/store`` and writes ``rank.json``.
In one process it trains without and with recordings. In two, rank 0 writes ``host.npz`` and ``device.npz`` with the whole weights and gradients of each step.
"""

from __future__ import annotations

import collections
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

rank, processes = int(sys.argv[1]), int(sys.argv[2])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // processes}"
os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{sys.argv[4]}/cache{rank}"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

STEPS = 3
COLLECTIVES = re.compile(r"(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")

if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[3], processes, rank)
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def sharded(value: Any, *spec: Any) -> Any:
    value = np.asarray(value)
    return jax.make_array_from_callback(
        value.shape, NamedSharding(mesh, PartitionSpec(*spec)), value.__getitem__
    )


def parameters() -> Any:
    """Parameters on all devices, on those of one axis, and on each; stacks of layers by layer and within layers."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return (0.3 * generator.normal(size=shape)).astype(np.float32)

    return {
        "first": {
            "kernel": sharded(normal(6, 8), "data", "model"),
            "bias": sharded(np.zeros(8, np.float32), "model"),
        },
        "layers": {
            "kernel": sharded(normal(4, 8, 8), None, "model", "data"),
            "scale": sharded(1 + normal(4, 8), "data"),
        },
        "last": {
            "kernel": sharded(normal(8, 4), ("data", "model")),
            "bias": sharded(np.zeros(4, np.float32)),
        },
    }


def loss_of(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch @ params["first"]["kernel"] + params["first"]["bias"])

    def layer(hidden: Any, weights: Any) -> Any:
        return jnp.tanh(hidden @ weights["kernel"]) * weights["scale"], None

    hidden, _ = jax.lax.scan(layer, hidden, params["layers"])
    return jnp.mean((hidden @ params["last"]["kernel"] + params["last"]["bias"] - 1) ** 2)


def initial_state(params: Any) -> Any:
    """State of the optimizer, distributed as the parameters."""
    return jax.tree.map(lambda leaf: leaf if leaf.ndim else sharded(leaf), optimizer.init(params))


def updated(params: Any, state: Any, batch: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss, gradients


def step(params: Any, state: Any, batch: Any) -> Any:
    return updated(params, state, batch)[:3]


def several_steps(params: Any, state: Any, batches: Any) -> Any:
    def body(carry: Any, batch: Any) -> Any:
        params, state = carry
        params, state, loss = step(params, state, batch)
        return (params, state), loss

    (params, state), losses = jax.lax.scan(body, (params, state), batches)
    return params, state, losses


def data() -> Any:
    return np.random.default_rng(1).normal(size=(STEPS, 8, 6)).astype(np.float32)


def trained(compiled: Any, *, is_scanned: bool) -> dict[str, Any]:
    """Train. Returns the losses, the number of compiled programs, and that of collective operations of each kind in the first."""
    params = parameters()
    state = initial_state(params)
    batches = [sharded(batch, "data") for batch in data()]
    if is_scanned:
        batches = [sharded(data(), None, "data")] * 2
    losses: list[str] = []
    before = compiled._cache_size()  # JAX shares the programs of a function among all that compile it
    for batch in batches:
        params, state, loss = compiled(params, state, batch)
        losses.extend(float(number).hex() for number in np.asarray(loss).reshape(-1))
    programs = compiled._cache_size() - before
    step = getattr(compiled, "_recording", compiled)
    with recording_form(getattr(compiled, "_form", None) or RecordingForm()):
        params = parameters()
        text = step.lower(params, initial_state(params), batches[0]).compile().as_text()
    collectives = collections.Counter(COLLECTIVES.findall(text))
    return {"losses": losses, "programs": programs, "collectives": collectives}


def recorded(folder: Path, run: str, figures: str, train: Any) -> Any:
    """Train with a recording."""
    hook = Hook(folder / "store", run=run, config=CaptureConfig(overhead_budget=None))
    Recording(hook, figures=figures)  # type: ignore[arg-type]
    globals()["optimizer"] = optax.adamw(1e-2)
    result = train()
    hook.close()
    return {"result": result, "health": hook.health}


def compare(folder: Path) -> Any:
    """Train without and with recordings, with an update in each dispatch and with several."""
    functions = {"step": step, "scan": several_steps}

    def train(name: str) -> Any:
        return trained(jax.jit(functions[name], donate_argnums=(0, 1)), is_scanned=name == "scan")

    plain = {name: train(name) for name in functions}
    forms = (("step", "host"), ("step", "device"), ("scan", "device"))
    runs = {
        f"{name} {figures}": recorded(folder, f"{name}-{figures}", figures, lambda name=name: train(name))
        for name, figures in forms
    }
    return {"plain": plain, "recorded": runs}


def gathered() -> tuple[list[str], dict[str, Any]]:
    """Train. Returns the losses, and the whole weights and gradients of each step."""
    compiled = jax.jit(updated)
    gather = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))
    params = parameters()
    state = initial_state(params)
    whole: dict[str, Any] = {}
    losses = []
    batches = data()
    batches[-1, 0, 0] = np.nan
    for number, batch in enumerate(batches):
        before = params
        params, state, loss, gradients = compiled(params, state, sharded(batch, "data"))
        losses.append(float(loss).hex())
        for role, tree in (("weight", before), ("gradient", gradients)):
            for path, leaf in jax.tree_util.tree_flatten_with_path(gather(tree))[0]:
                name = ".".join(key.key for key in path)
                whole[f"{number}/{role}/{name}"] = np.asarray(leaf)
    return losses, whole


def record(folder: Path) -> Any:
    """Train with a recording of each kind, and gather the whole weights and gradients of each step."""
    reports = {}
    for figures in ("host", "device"):
        report = recorded(folder, figures, figures, gathered)
        losses, whole = report["result"]
        if rank == 0:
            np.savez(folder / f"{figures}.npz", **whole)
        reports[figures] = {**report, "result": losses}
    return reports


def main() -> None:
    folder = Path(sys.argv[4])
    report = record(folder) if processes > 1 else compare(folder)
    (folder / f"{rank}.json").write_text(json.dumps(report), encoding="utf-8")


from watchstep import CaptureConfig, Hook  # noqa: E402
from watchstep.jax import Recording  # noqa: E402
from watchstep.jax.traced_updates import RecordingForm, recording_form  # noqa: E402

optimizer: Any = optax.adamw(1e-2)

if __name__ == "__main__":
    main()
