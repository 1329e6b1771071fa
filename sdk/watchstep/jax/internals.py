"""Names of JAX, optax, Flax and Equinox that are private, or that another version may lack: the one place where they are looked up."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np

from watchstep.capture.framework_names import FrameworkName, FrameworkNames

_UPDATES = "updates"
_INNER = "updates inside of scans, and figures that a device measures"
_ACTIVATIONS = "activations"
_FUNCTIONS = "activation functions"
_ACCUMULATED = "updates of optax.MultiSteps"
_PARTS = "optax transformations that a program applies one by one, with operations of its own between them"
_REPLAY = "evaluating a step operation by operation"

at = FrameworkName.at
jax_names = FrameworkNames(
    "JAX",
    {
        "trace_state": at(
            _UPDATES, "jax.extend.core:get_opaque_trace_state", "jax.core:get_opaque_trace_state"
        ),
        "debug_nans": at(_UPDATES, "jax:*.jax_debug_nans"),
        "debug_infs": at(_UPDATES, "jax:*.jax_debug_infs"),
        "check_tracer_leaks": at(_UPDATES, "jax:*.jax_check_tracer_leaks"),
        "axis_type": at(_INNER, "jax.sharding:AxisType"),
        "user_context": at(_INNER, "jax:make_user_context"),
        "user_context_value": at(_INNER, "jax:*.value"),
        # Memory that programs close over.
        "new_ref": at(_INNER, "jax:new_ref"),
        "ref": at(_INNER, "jax:Ref", "jax.ref:Ref"),
        "ref_is_committed": at(_INNER, "jax:Ref.committed"),
        "ref_is_committed_inside": at(_INNER, "jax:Ref._committed"),
        "ref_memory": at(_INNER, "jax:*._refs._buf"),
        "ref_exchange": at(_INNER, "jax:*._replace_with"),
        "context_mesh": at(_INNER, "jax.sharding:get_abstract_mesh"),
        "wide_numbers": at(_INNER, "jax:enable_x64", "jax.experimental:enable_x64"),
        # Modules of JAX whose functions are among the callers while they trace.
        "vmap": at(_INNER, "jax._src.interpreters.batching"),
        "pmap": at(_INNER, "jax._src.pmap"),
        "shard_map": at(_INNER, "jax._src.shard_map"),
        "export": at(_INNER, "jax._src.export._export"),
        "differentiation": at(_INNER, "jax._src.interpreters.ad"),
        "checkpoint": at(_INNER, "jax._src.ad_checkpoint"),
        "loops": at(_INNER, "jax._src.lax.control_flow.loops"),
        # Activations.
        "outside_of_traces": at(_ACTIVATIONS, "jax.core:eval_context"),
        "vmap_function": at(_ACTIVATIONS, "jax._src.interpreters.batching:_batch_inner"),
        "batched_value": at(_ACTIVATIONS, "jax._src.interpreters.batching:BatchTracer"),
        "function_parts": at(_FUNCTIONS, "jax._src.nn.functions"),
        "derivative_parts": at(_FUNCTIONS, "jax._src.custom_derivatives"),
        "nnx_modules": at("activations of Flax NNX", "flax.nnx:iter_modules"),
        "linen_calls": at("activations of Flax linen", "flax.linen:intercept_methods"),
        # Optimizers.
        "multi_steps_sum": at(_ACCUMULATED, "optax:*._acc_update"),
        "traced_value": at(_PARTS, "jax._src.interpreters.partial_eval:DynamicJaxprTracer"),
        "traced_equation": at(_PARTS, "jax:*.parent"),
        "traced_inputs": at(_PARTS, "jax:*.in_tracers"),
        # What programs ask compiled functions for.
        "cache_size": at("the number of compiled programs", "jax:*._cache_size"),
        # Replay, outside of trainings.
        "programs": at(_REPLAY, "jax.extend.core"),
        "source_info": at(_REPLAY, "jax.extend.source_info_util"),
        "source_lines": at("exact source lines", "jax._src.source_info_util:current"),
        "source_context": at("exact source lines", "jax._src.source_info_util:_source_info_context"),
        "tracebacks": at("exact source lines", "jax._src.source_info_util:xla_client.Traceback"),
    },
)

_OBSTACLES = {
    "vmap": "vmap",
    "pmap": "pmap",
    "shard_map": "shard_map",
    "export": "export",
    "differentiation": "a differentiated function",
    "checkpoint": "a differentiated function",
}
"""Transformations that trace programs in which a closed-over Ref may raise, by the key of their module."""

_SCANS = frozenset({"scan", "scan3", "scan_nocarry"})


def has_rings() -> bool:
    """Return whether this JAX has all that recording updates in device memory needs."""
    has_names = jax_names.has(
        "new_ref",
        "ref",
        "ref_is_committed",
        "ref_is_committed_inside",
        "user_context",
        "context_mesh",
        "wide_numbers",
        "axis_type",
        "loops",
        *_OBSTACLES,
    )
    return has_names and _exchanges_memory()


@functools.cache
def _exchanges_memory() -> bool:
    """Return whether a dispatch may exchange the memory of a Ref for an array that has been placed on a device.

    A program with rings has the outputs of one without them. JAX 0.12 raises after such a dispatch if the memory was not placed before.
    """
    import jax

    with jax.ensure_compile_time_eval():
        memory = jax.numpy.asarray(np.zeros(1, np.float32))
        placed = jax.device_put(np.zeros(1, np.float32), jax.local_devices()[0])
        exchange = jax_names.of(memory, "ref_exchange")
        if exchange is None:
            return False
        try:
            exchange(placed)
        except Exception as error:  # noqa: BLE001 - whatever this JAX raises
            jax_names.lacks(
                "ref_exchange", f"jax {jax.__version__} raises {str(error).splitlines()[0][:100]!r}"
            )
            return False
    return True


def has_activations() -> bool:
    """Return whether this JAX has all that recording activations needs."""
    return jax_names.has("outside_of_traces", "vmap_function", "batched_value") and has_rings()


def callers() -> Iterator[tuple[str, FrameType]]:
    """Return the frames of the callers, innermost first, each with the key of its module in the table; empty for other modules.

    JAX has no public way to learn which transformations trace the current code.
    """
    keys = {jax_names.table[key].paths[0]: key for key in (*_OBSTACLES, "loops")}
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - its public form reads source files
    while frame is not None:
        yield keys.get(str(frame.f_globals.get("__name__")), ""), frame
        frame = frame.f_back


def surroundings() -> tuple[str | None, int]:
    """Return the transformation that traces the current code and admits no closed-over Ref, and the number of iterations of the scans around it.

    A ``jit`` inside of a ``vmap`` is traced without its batch dimension, so that this is found among the callers.
    """
    length = 1
    for key, frame in callers():
        if key in _OBSTACLES:
            return _OBSTACLES[key], length
        if key == "loops" and frame.f_code.co_name in _SCANS:
            own = frame.f_locals.get("length")
            length *= own if isinstance(own, int) and own > 0 else 1
    return None, length


def is_differentiated() -> bool:
    """Return whether the current code is part of a function that is differentiated."""
    return any(key == "differentiation" for key, _ in callers())


def obstacle_of_activations() -> str | None:
    """Return the transformation around the current code in which no Ref is written that is differentiated."""
    names = {"pmap", "shard_map", "export"}
    return next((_OBSTACLES[key] for key, _ in callers() if key in names), None)


def is_vmap_function(key: str, frame: FrameType) -> bool:
    """Return whether a frame of `callers` is the function of JAX that calls what a ``vmap`` traces."""
    name = jax_names.table["vmap_function"].paths[0].rpartition(":")[2]
    return key == "vmap" and frame.f_code.co_name == name


def is_part_of_function(caller: FrameType) -> bool:
    """Return whether a caller of an activation function is another one of JAX, or its derivative."""
    modules = [jax_names.table[key].paths[0] for key in ("function_parts", "derivative_parts")]
    return caller.f_globals.get("__name__") in modules


def is_batched(array: Any) -> bool:
    """Return whether a value is that of all examples of a ``vmap``."""
    kind = jax_names.find("batched_value")
    return kind is not None and isinstance(array, kind)
