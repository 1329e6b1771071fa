"""Bundles of JAX steps: the arguments of one step, in one safetensors file that ``watchstep replay`` reads.

The file is a bundle as of `watchstep.format.bundle`, with the values of all leaves of the arguments and their names. The structure of the
arguments is that of the program, which builds it for a replay. Nothing in the file is code, and nothing of it is executed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
from jax import numpy as jnp
from numpy.typing import NDArray

from watchstep.capture.provenance import program_data
from watchstep.errors import ConfigError, FormatError
from watchstep.format.bundle import DOCUMENT, MAX_DOCUMENT, VALUES, Bundle, BundleDocument, LostValue
from watchstep.format.snapshot import DTYPES, NARROW_FLOATS, Described, TensorLocation, header
from watchstep.jax.internals import jax_names
from watchstep.jax.replay.argument_trees import ArgumentTree, LostLeaf
from watchstep.jax.replay.value_health import contents, is_reference

FRAMEWORK = "jax"
"""The framework in the ``program`` of a bundle's document."""

_NARROW = {
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
_NAMES = {dtype.name: name for name, dtype in DTYPES.items() if name not in NARROW_FLOATS}
_HINT = "use another bundle, or build the arguments as the recorded program did"


@dataclass(frozen=True)
class JaxStep:
    """A program's training step in JAX, for a replay.

    Attributes:
        function: the step, compiled or not.
        arguments: its positional arguments as the program builds them, with any values: those of the bundle replace them.
        keywords: its keyword arguments.
        static_argnums: positions of arguments that are constants.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    static_argnums: int | Sequence[int] = ()


def save_bundle(
    path: str | os.PathLike[str],
    *arguments: Any,
    step: int = 0,
    static_argnums: int | Sequence[int] = (),
    **keywords: Any,
) -> None:
    """Write the arguments of a step to a file. Waits for the device.

    Call it before the step if the step donates its arguments. Values without a representation are named as lost.

    Args:
        path: The file, which ends in ``.safetensors``.
        arguments: The arguments of the step, as in the call.
        step: The number of the step.
        static_argnums: Positions of arguments that are constants.
        keywords: The keyword arguments of the step.

    Raises:
        ConfigError: the path has another ending, or a value was donated.
        OSError: the file cannot be written.
    """
    file = Path(path)
    if file.suffix != ".safetensors":
        raise ConfigError(f"bundle {str(path)!r} does not end in .safetensors", "choose such a name")
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}", delete=False) as written:
        try:
            write_bundle(written, ArgumentTree.of(arguments, keywords, static_argnums), step=step)
            written.flush()
            Path(written.name).replace(file)
        except BaseException:
            Path(written.name).unlink(missing_ok=True)
            raise


def write_bundle(
    file: IO[bytes],
    tree: ArgumentTree,
    *,
    step: int,
    reason: str = "program",
    run: Mapping[str, Any] | None = None,
) -> None:
    """Write a bundle to an open file, one value after another. Waits for the device. See `save_bundle`.

    Args:
        file: A file for writing, at its beginning.
        tree: The arguments of the step.
        step: The number of the step.
        reason: As in `BundleDocument`.
        run: As in `BundleDocument`; None for a step of no recorded run.

    Raises:
        ConfigError: a value was donated, or there are too many leaves for one bundle.
    """
    tree.check_present()
    leaves: list[dict[str, Any]] = []
    stored: list[tuple[Described, Any]] = []
    lost: list[LostValue] = []
    for name, leaf in zip(tree.names(), tree.values, strict=True):
        if (obstacle := _obstacle(leaf)) is not None:
            lost.append(LostValue(f"arguments/{name}", obstacle))
            continue
        dtype, shape = _type_of(leaf)
        described = Described(f"{VALUES}{len(stored)}", _format_of(dtype) or "", shape)
        leaves.append({"name": name, "tensor": described.name})
        stored.append((described, leaf))
    document = BundleDocument(
        run=run or {},
        step=step,
        time_ns=time.time_ns(),
        reason=reason,
        program={"framework": FRAMEWORK, **program_data()},
        micro_batches=({"leaves": leaves},),
        lost=tuple(lost),
    ).encode()
    if len(document) > MAX_DOCUMENT:
        raise ConfigError(
            f"the names of {len(leaves)} leaves take {len(document)} bytes; the limit is {MAX_DOCUMENT}",
            "pass fewer arguments",
        )
    stored.sort(key=lambda each: -each[0].itemsize)
    tensors = [*(described for described, _ in stored), Described(DOCUMENT, "U8", (len(document),))]
    file.write(header(tensors, {"format": "watchstep.bundle"}))
    for _, leaf in stored:
        file.write(_bytes_of(_data_of(leaf)))
    file.write(document)


def load_arguments(bundle: Bundle, step: JaxStep) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the recorded arguments in the structure that the program builds. In place of a lost value is the one that the program builds.

    Raises:
        ConfigError: the bundle is not of a JAX step, or has other values than the program's arguments.
        FormatError: the bundle is damaged.
    """
    document = bundle.document
    if document.program.get("framework") != FRAMEWORK:
        raise ConfigError(f"bundle {bundle.name} is not of a JAX step", "write one by save_bundle")
    recorded = _recorded(bundle)
    lost = {each.path.removeprefix("arguments/") for each in document.lost}
    tree = ArgumentTree.of(step.arguments, step.keywords, step.static_argnums)
    names = tree.names()
    if unknown := sorted(set(recorded) - set(names)):
        raise ConfigError(f"bundle {bundle.name}: the program's step has no {unknown[0]}", _HINT)
    values = []
    for name, template in zip(names, tree.values, strict=True):
        if name in lost:
            values.append(template)
        elif name in recorded:
            values.append(_restored(bundle, name, recorded[name], template))
        else:
            raise ConfigError(f"bundle {bundle.name} has no {name}", _HINT)
    return tree.with_values(values)


def _recorded(bundle: Bundle) -> dict[str, str]:
    """The tensors of the leaves, by name."""
    batches = bundle.document.micro_batches
    leaves = batches[0].get("leaves") if len(batches) == 1 else None
    if not isinstance(leaves, list):
        raise FormatError(f"bundle {bundle.name} has no arguments", _HINT)
    recorded = {}
    for leaf in leaves:
        name, tensor = (leaf.get("name"), leaf.get("tensor")) if isinstance(leaf, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(tensor, str) or tensor not in bundle.tensors:
            raise FormatError(f"bundle {bundle.name}: {str(leaf)[:80]!r} is not a leaf", _HINT)
        recorded[name] = tensor
    return recorded


def _restored(bundle: Bundle, name: str, tensor: str, template: Any) -> Any:
    dtype, shape = _type_of(template)
    location = bundle.tensors[tensor]
    if isinstance(template, (bool, int, float, complex)) and _is_number_like(location, dtype):
        # A step returns an array for a number, such as the count of steps that a state begins with.
        return jnp.asarray(bundle.read(tensor)[0])
    if (_format_of(dtype), shape) != (location.dtype, location.shape):
        raise ConfigError(
            f"bundle {bundle.name}: {name} is {location.dtype} {location.shape}, the program's is {dtype} {shape}",
            _HINT,
        )
    bits, _ = bundle.read(tensor)
    array = bits.view(dtype).reshape(shape)
    if isinstance(template, (bool, int, float, complex)):
        return type(template)(array.item())
    if is_reference(template):
        return jax_names.require("new_ref")(jnp.asarray(array))
    if _is_key(template):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(template))
    if isinstance(template, jax.Array):
        return jax.device_put(array, template.sharding)
    return array


def _is_number_like(location: TensorLocation, dtype: np.dtype[Any]) -> bool:
    """Return whether a recorded value is a number of the same kind as one of Python, and has another width."""
    recorded = DTYPES[location.dtype]
    kinds = "iu" if dtype.kind == "i" else dtype.kind
    is_of_kind = recorded.kind in kinds and location.dtype not in NARROW_FLOATS
    return location.shape == () and is_of_kind and recorded != dtype


def _obstacle(leaf: Any) -> str | None:
    """Why a leaf cannot be stored; None if it can."""
    if isinstance(leaf, LostLeaf):
        return leaf.reason
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return "parts of it are in other processes"
    if isinstance(leaf, int) and not isinstance(leaf, bool) and not -(2**63) <= leaf < 2**63:
        return "it does not fit into 64 bits"
    dtype, _ = _type_of(leaf)
    return None if _format_of(dtype) is not None else f"elements of type {dtype} have no representation"


def _type_of(leaf: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype and shape of a leaf's elements; of random keys those of their data."""
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return np.dtype(data.dtype), tuple(data.shape)
    array = np.asarray(leaf) if isinstance(leaf, (bool, int, float, complex, np.generic)) else leaf
    return np.dtype(array.dtype), tuple(array.shape)


def _data_of(leaf: Any) -> NDArray[Any]:
    """The elements of a leaf in host memory; of random keys their data."""
    if _is_key(leaf):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(contents(leaf))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _format_of(dtype: Any) -> str | None:
    """The name of a dtype in the file; None if it has none."""
    return _NAMES.get(dtype.name) or _NARROW.get(dtype.name)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
