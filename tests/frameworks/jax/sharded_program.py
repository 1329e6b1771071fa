"""A program over four devices, in one process or in two, which measures its shards. Run as a script.

Arguments: rank, number of processes, address of the coordinator, output file. It writes the rows of its shards, and a count of collective operations.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import numpy as np

rank, processes = int(sys.argv[1]), int(sys.argv[2])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // processes}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from watchstep.jax.sharding.shard_rows import finite_shards, measure_shards, shard_statistics  # noqa: E402

COLLECTIVES = re.compile(r"(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(-start)?\(")


def main() -> None:
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(sys.argv[3], processes, rank)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = (("data", "model"), (None, "model"), (), ("data",), (("data", "model"),))
    shardings = tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)
    stacked = (False, False, False, True, False)
    arrays = [
        jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
        for value, sharding in zip(values(), shardings, strict=True)
    ]

    def step(*tensors: Any) -> Any:
        return tuple(tensor * 2 for tensor in tensors)

    def measured_step(*tensors: Any) -> Any:
        updated = step(*tensors)
        return updated, measure_shards(updated, shardings, stacked=stacked), finite_shards(updated, shardings)

    compiled = [jax.jit(function).lower(*arrays).compile() for function in (step, measured_step)]
    _, words, flags = compiled[1](*arrays)
    found = shard_statistics(words)
    batch = found.statistics
    data = {
        "collectives": [len(COLLECTIVES.findall(program.as_text())) for program in compiled],
        "flags": [bool(np.asarray(shard.data)[0]) for shard in flags.addressable_shards],
        "rows": found.rows.tolist(),
        "placements": [[place.shard_index, place.shard_count, place.replica] for place in found.placements],
        "columns": {
            name: getattr(batch, name).tolist() for name in batch.__dataclass_fields__ if name != "histogram"
        },
        "histogram": [getattr(batch.histogram, name).tolist() for name in ("offsets", "bins", "counts")],
    }
    with open(f"{sys.argv[4]}/{rank}.json", "w", encoding="utf-8") as file:  # noqa: PTH123 - a script
        json.dump(data, file)


def values() -> list[Any]:
    """Arrays before they are doubled, the same on each process."""
    generator = np.random.default_rng(0)
    arrays = [
        generator.standard_normal(shape).astype(np.float32)
        for shape in ((8, 6), (3, 4), (5,), (4, 3, 2), (8,))
    ]
    arrays[1][0, 0] = np.inf
    arrays[0] = np.asarray(jnp.asarray(arrays[0], jnp.bfloat16))
    return arrays


if __name__ == "__main__":
    main()
