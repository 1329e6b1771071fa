"""A step over four devices of one process, recorded by a ring without and with a sharding. Run as a script; it prints what was read."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from watchstep.jax.step_ring import StepRing

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
        weight, bias = step(weight, bias)
    steps = ring.read(ring.snapshot())
    with_rows = [item.number for item in steps if item.gradients is not None]
    return [[item.number for item in steps], with_rows, step._cache_size()]


print(json.dumps([recorded(None), recorded(NamedSharding(mesh, PartitionSpec()))]))  # noqa: T201 - its output
