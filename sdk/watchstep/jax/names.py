"""Names, roles and order of the parameters of a JAX program, from the paths of their pytree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from watchstep.format.tensors import TensorInfo
from watchstep.jax.stacked_layers import MAX_LAYERS
from watchstep.updates.parameter_names import kind_of, role_of

_DIGITS = re.compile(r"(\d+)")
_MAX_PARAMETERS = 100_000

Path = tuple[Any, ...]


def path_words(path: Path) -> tuple[str, ...]:
    """Return the words of a key path of `jax.tree_util.tree_flatten_with_path`.

    A leading ``params``, which Flax linen adds, and a trailing ``value``, which variables of Flax NNX add, are left out.
    """
    words = [_word(key) for key in path]
    if len(words) > 1 and words[0] == "params":
        words = words[1:]
    if len(words) > 1 and words[-1] in {"value", "raw_value"}:
        words = words[:-1]
    return tuple(words)


def _word(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        value = getattr(key, attribute, None)
        if value is not None:
            return str(value)
    return str(key).strip(".[]'\"")


def _natural(words: tuple[str, ...]) -> tuple[tuple[tuple[int, int | str], ...], ...]:
    """Return a key by which ``layer_2`` is before ``layer_10``."""
    return tuple(
        tuple((0, int(part)) if part.isdigit() else (1, part) for part in _DIGITS.split(word) if part)
        for word in words
    )


def describe(
    paths: Sequence[Path], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> tuple[TensorInfo, ...]:
    """Describe parameters.

    Args:
        paths: key path of each parameter.
        shapes: shape of each.
        dtypes: dtype of each, by NumPy's name.

    Returns:
        Descriptions without collections, in the same order. ``order`` is the rank of the module among the modules, by name.
        ``module_type`` is the name of the module without its number, which is its class if Flax linen has named it.
    """
    words = [path_words(path) or ("parameter",) for path in paths[:_MAX_PARAMETERS]]
    modules = sorted({names[:-1] for names in words}, key=_natural)
    orders = {module: order for order, module in enumerate(modules)}
    return tuple(
        TensorInfo(
            name=".".join(names),
            collections=(),
            role=role_of(names),
            module=".".join(names[:-1]),
            module_type=kind_of(names[:-1]),
            order=orders[names[:-1]],
            shape=tuple(shape),
            dtype=dtype,
        )
        for names, shape, dtype in zip(words, shapes, dtypes, strict=True)
    )


def layer_descriptions(
    infos: Sequence[TensorInfo], stacked: Sequence[bool]
) -> tuple[tuple[TensorInfo, ...], tuple[int, ...]]:
    """Describe each layer of parameters that are stacks of layers.

    Args:
        infos: descriptions of the parameters.
        stacked: which of them are stacks.

    Returns:
        Descriptions, those of a stack one for each index of its first dimension, named ``module.3.kernel``; and how many each parameter has.
    """
    described: list[TensorInfo] = []
    counts: list[int] = []
    for info, is_stack in zip(infos, stacked, strict=True):
        layers = info.shape[0] if is_stack and info.shape else 0
        if not 0 < layers <= MAX_LAYERS:
            described.append(info)
            counts.append(1)
            continue
        leaf = info.name[len(info.module) + 1 :] if info.module else info.name
        for layer in range(layers):
            module = f"{info.module}.{layer}" if info.module else str(layer)
            described.append(
                replace(
                    info,
                    name=f"{module}.{leaf}",
                    module=module,
                    order=info.order + layer,
                    shape=info.shape[1:],
                )
            )
        counts.append(layers)
    return tuple(described), tuple(counts)
