"""How the arguments of a call are distributed over devices: under automatic sharding, tracers do not have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from watchstep.jax.internals import jax_names

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ArgumentShardings:
    """The leaves of a call's arguments. Part of the key of its trace.

    Attributes:
        shapes: shape of each leaf; None for one that is no array.
        shardings: how each is distributed; None for one that is no array on several devices of a mesh.
    """

    shapes: tuple[Shape | None, ...]
    shardings: tuple[NamedSharding | None, ...]

    def of_parameters(self, shapes: Sequence[Shape]) -> tuple[NamedSharding, ...] | None:
        """Return how parameters are distributed, by the first leaves in a row that have their shapes.

        Args:
            shapes: shape of each parameter.

        Returns:
            The sharding of each; None if there are no such leaves, or they are not on one mesh with automatic axes, or each device of this process has all
            of them.
        """
        wanted, count = tuple(shapes), len(shapes)
        for start in range(len(self.shapes) - count + 1 if count else 0):
            if self.shapes[start : start + count] == wanted:
                return _on_one_mesh(self.shardings[start : start + count])
        return None


def _on_one_mesh(shardings: Sequence[NamedSharding | None]) -> tuple[NamedSharding, ...] | None:
    """Return shardings over one mesh. An array that is not on several devices is copied to all of them by the program."""
    meshes = {sharding.mesh for sharding in shardings if sharding is not None}
    if len(meshes) != 1:
        return None
    (mesh,) = meshes
    kinds = jax_names.find("axis_type")
    if kinds is None or any(kind != kinds.Auto for kind in mesh.axis_types):
        return None
    if (
        all(sharding is None or sharding.is_fully_replicated for sharding in shardings)
        and jax.process_count() == 1
    ):
        return None
    whole = NamedSharding(mesh, PartitionSpec())
    return tuple(sharding or whole for sharding in shardings)


def argument_shardings(arguments: Any, before: ArgumentShardings | None = None) -> ArgumentShardings | None:
    """Return how the arguments of a call are distributed; None if no array is on several devices.

    Args:
        arguments: pytree of the arguments.
        before: the result for an earlier call, which is returned if it is the same.
    """
    if jax.device_count() == 1:
        return None
    leaves = jax.tree_util.tree_leaves(arguments)
    shardings = tuple(_sharding_of(leaf) for leaf in leaves)
    if not any(shardings):
        return None
    shapes = tuple(getattr(leaf, "shape", None) for leaf in leaves)
    if before is not None and (before.shardings, before.shapes) == (shardings, shapes):
        return before
    return ArgumentShardings(shapes, shardings)


def _sharding_of(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.num_devices > 1 else None
