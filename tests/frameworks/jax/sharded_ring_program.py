"""Steps over several devices of one process, recorded by a ring without and with a sharding. Run as a script; it prints what was read."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from watchstep.jax.ring.step_ring import StepRing

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))


def recorded(sharding: NamedSharding | None) -> list[Any]:
    ring = StepRing(every=2, sharding=sharding)

    def update(weight: Any, bias: Any) -> tuple[Any, Any]:
        ring.record([weight, bias], [weight, bias], (weight**2).sum())
        return weight * 0.9, bias * 0.5

    step = jax.jit(update, donate_argnums=0)
    weight = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, PartitionSpec("x")))
    bias = jax.device_put(jnp.ones(8), NamedSharding(mesh, PartitionSpec()))
    for _ in range(4):
        ring.check()
        weight, bias = step(weight, bias)
    steps = ring.read(ring.snapshot())
    with_rows = [item.number for item in steps if item.gradients is not None]
    return [[item.number for item in steps], with_rows, step._cache_size()]


def moved() -> list[Any]:
    """One compiled step on one device, on meshes, and on other devices; then a step of its own for each."""
    ring = StepRing(every=0)
    small = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[2:])
    places: list[Any] = [
        None,
        NamedSharding(mesh, PartitionSpec("x")),
        None,
        jax.devices()[2],
        NamedSharding(small, PartitionSpec("x")),
        jax.devices()[0],
        NamedSharding(mesh, PartitionSpec("x")),
    ]

    def compiled() -> Any:
        def update(weight: Any) -> Any:
            ring.record([weight], [weight], weight.sum())
            return weight * 0.5

        return jax.jit(update, donate_argnums=0)

    shared = compiled()
    devices: list[Any] = []
    losses: list[Any] = []
    for step in (shared, None):
        for place in places:
            weight = jnp.ones((8, 4)) if place is None else jax.device_put(jnp.ones((8, 4)), place)
            program = compiled() if step is None else step
            for _ in range(2):
                ring.check()
                weight = program(weight)
            devices.append((len(weight.devices()), weight.committed))
            losses.extend(item.loss for item in ring.read(ring.snapshot()))
    return [
        devices == [(1, False), (4, True), (1, False), (1, True), (2, True), (1, True), (4, True)] * 2,
        losses,
    ]


print(json.dumps([recorded(None), recorded(NamedSharding(mesh, PartitionSpec())), moved()]))  # noqa: T201 - its output
