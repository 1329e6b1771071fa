"""The body of a ``shard_map``, operation by operation on all devices of its mesh.

A value of the body is an array of shape ``(devices, *local)``, whose first dimension is divided among the devices. Each operation is
a ``shard_map`` of its own over it, so collectives and ``axis_index`` are as in the program. Elementwise operations need none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from watchstep.jax.replay.primitive_kinds import ELEMENTWISE


def bind_local(equation: Any, arrays: Sequence[Any], bind: Callable[..., list[Any]]) -> list[Any]:
    """Evaluate an operation for the values of one shard, without the types of varying and replicated values that JAX checks.

    Args:
        equation: The equation.
        arrays: Local values.
        bind: Evaluates any other operation, given the equation and the values.
    """
    parameters = equation.params
    if equation.primitive.name == "psum_invariant":
        groups = parameters.get("axis_index_groups")
        return [jax.lax.psum(array, parameters["axes"], axis_index_groups=groups) for array in arrays]
    if equation.primitive.name == "all_gather_invariant":
        (array,) = arrays
        axis, tiled = parameters["all_gather_dimension"], parameters["tiled"]
        return [jax.lax.all_gather(array, parameters["axis_name"], axis=axis, tiled=tiled)]
    return bind(equation, arrays)


class ShardedBody:
    """The devices of a ``shard_map`` and the compiled operations of its body."""

    def __init__(self, mesh: Any) -> None:
        """Create it.

        Args:
            mesh: The concrete mesh, all axes of which are manual.
        """
        self._mesh = mesh
        self._spec = PartitionSpec(tuple(mesh.axis_names))
        self._compiled: dict[tuple[int, tuple[bool, ...]], tuple[Any, Callable[..., Any]]] = {}
        self.devices = int(mesh.size)

    def split(self, array: Any, spec: Any) -> Any:
        """Divide a global array, of the shape that the program passes, into its local values."""
        return self._mapped(lambda local: local[None], spec, self._spec)(array)

    def join(self, array: Any, spec: Any) -> Any:
        """Return the global array of local values."""
        return self._mapped(lambda local: local[0], self._spec, spec)(array)

    def repeat(self, array: Any) -> Any:
        """Return the local values of a constant of the body."""
        array = jnp.asarray(array)
        return self.split(array, PartitionSpec())

    def evaluate(self, equation: Any, bind: Callable[..., Any], arrays: Sequence[Any]) -> list[Any]:
        """Evaluate one operation on all devices.

        Args:
            equation: The equation of the jaxpr.
            bind: Evaluates it for the values of one shard, and returns a list.
            arrays: Local values, or literals.
        """
        is_bound = any(hasattr(value, "mesh") for value in equation.params.values())
        if equation.primitive.name in ELEMENTWISE and not is_bound and self._are_alike(arrays):
            return list(bind(*self._broadcast(equation, arrays)))
        # A number of the program has no dimension, and belongs to all devices.
        is_local = tuple(getattr(array, "ndim", 0) > 0 for array in arrays)
        key = id(equation), is_local
        if key not in self._compiled:

            def run(*stacked: Any) -> Any:
                local = [
                    array[0] if divided else array for array, divided in zip(stacked, is_local, strict=True)
                ]
                return [output[None] for output in bind(*local)]

            specs = tuple(self._spec if divided else PartitionSpec() for divided in is_local)
            # The equation is stored too, so that its id is not used again.
            self._compiled[key] = (equation, self._mapped(run, specs, self._spec))
        return list(self._compiled[key][1](*arrays))

    def _broadcast(self, equation: Any, arrays: Sequence[Any]) -> list[Any]:
        """Give literals the shape of the other operands."""
        shape = next(array.shape for array in arrays if getattr(array, "ndim", 0) > 0)
        return [
            array
            if getattr(array, "ndim", 0) > 0
            else np.broadcast_to(np.asarray(array, variable.aval.dtype), shape)
            for array, variable in zip(arrays, equation.invars, strict=True)
        ]

    def _mapped(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        mapped = jax.shard_map(function, mesh=self._mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        compiled: Callable[..., Any] = jax.jit(mapped)
        return compiled

    def _are_alike(self, arrays: Sequence[Any]) -> bool:
        """Whether all operands that are no literals have one shape."""
        shapes = {array.shape for array in arrays if getattr(array, "ndim", 0) > 0}
        return len(shapes) == 1
