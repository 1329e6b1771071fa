"""The memory of `jax.Ref` that programs close over: who may use it, and its repair."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from numpy.typing import NDArray

from watchstep.errors import ConfigError
from watchstep.jax.internals import jax_names

_UNCOMMITTED = "_watchstep_uncommitted"


def _respect_uncommitted_marks() -> None:
    """Let the Refs of rings without a sharding be uncommitted, as arrays are that were not placed on a device.

    JAX states that every Ref is committed. A program with such a Ref returns committed arrays, and compiles a second time when they are
    its arguments; a program over several devices raises. Refs without the mark are as before.
    """
    kind = jax_names.find("ref")
    if hasattr(kind, _UNCOMMITTED):
        return
    if not isinstance(jax_names.find("ref_is_committed"), property):
        jax_names.lacks("ref_is_committed")
        raise ConfigError(f"jax {jax.__version__} has other Refs", "use another version of jax")
    setattr(kind, _UNCOMMITTED, False)
    for key in ("ref_is_committed", "ref_is_committed_inside"):
        setattr(kind, jax_names.attribute(key), property(_is_committed))


def _is_committed(ref: Any) -> bool:
    return not getattr(ref, _UNCOMMITTED) or ref.sharding.num_devices > 1


def new_ref(array: NDArray[Any], sharding: Any) -> Any:
    """Return a Ref, outside of the trace in progress.

    Args:
        array: Its first content.
        sharding: Where it is, for programs over these devices only; None for programs on any device.
    """
    if sharding is not None:
        return jax_names.find("new_ref")(_placed(array, sharding))
    _respect_uncommitted_marks()
    ref = jax_names.find("new_ref")(jnp.asarray(array))
    setattr(ref, _UNCOMMITTED, True)
    return ref


def new_memory(array: NDArray[Any], sharding: Any) -> Any:
    """Return new memory for a Ref. Arguments are those of `new_ref`."""
    if sharding is not None:
        return _placed(array, sharding)
    if array.dtype.itemsize > 4 and not jax.config.jax_enable_x64:
        with jax_names.find("wide_numbers")(True):
            return jnp.array(array)
    return jnp.array(array)


def _placed(array: NDArray[Any], sharding: Any) -> Any:
    """Return an array of JAX, without communication between processes."""
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def buffer_of(ref: Any) -> Any:
    """Return the array that is the memory of a Ref; None if this JAX has another way."""
    buffer = jax_names.of(ref, "ref_memory")
    return buffer if isinstance(buffer, jax.Array) else None


def set_buffer(ref: Any, array: Any) -> None:
    """Let an array be the memory of a Ref.

    Raises:
        ConfigError: It has another shape or dtype.
    """
    if (array.shape, array.dtype) != (ref.shape, ref.dtype):
        raise ConfigError(f"memory of {array.shape} {array.dtype} for a Ref of {ref.shape} {ref.dtype}", "")
    jax_names.put(ref, "ref_memory", array)  # JAX does the same after each dispatch


def copy_of(ref: Any) -> Any:
    """Start a copy of the memory of a Ref."""
    sharding = getattr(jax.typeof(ref), "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return ref[...]
    buffer = buffer_of(ref)  # the Ref itself can be read in programs over the mesh of its type only
    return jax.device_put(buffer, buffer.sharding, may_alias=False)


def local_copies_of(ref: Any) -> list[Any]:
    """Start a copy of what each device of this process has of the memory of a Ref, in the order of the devices."""
    shards = sorted(_shards_of(buffer_of(ref)), key=lambda shard: int(shard.device.id))
    return [jax.device_put(shard.data, shard.device, may_alias=False) for shard in shards]


def write_locally(ref: Any, index: tuple[int, ...], value: Any) -> None:
    """Change an element of a Ref whose memory has a copy on each device, without a program over all of them."""
    buffer = buffer_of(ref)
    shards = [shard.data.at[index].set(value) for shard in _shards_of(buffer)]
    set_buffer(ref, jax.make_array_from_single_device_arrays(buffer.shape, buffer.sharding, shards))


def _shards_of(buffer: Any) -> Any:
    # A dispatch exchanges the memory of the array of a Ref, and not the shards that it has cached.
    vars(buffer).pop("addressable_shards", None)
    return buffer.addressable_shards


def has_failed(buffer: Any) -> bool:
    """Return whether an array was deleted, or the dispatch failed that has computed it. Does not wait for one that is being computed."""
    try:
        if buffer.is_deleted():
            return True
        if buffer.is_ready():
            jax.block_until_ready(buffer)
    except Exception:  # noqa: BLE001 - the error of the dispatch
        return True
    return False


def context_mesh() -> Any:
    """Return the mesh of the context, which is part of the type of a Ref."""
    return jax_names.find("context_mesh")()
