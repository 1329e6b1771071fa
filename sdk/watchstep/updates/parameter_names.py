"""Dotted names of parameters, from the paths that frameworks name their variables by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from watchstep.format.tensors import TensorInfo

_BIASES = frozenset({"bias", "beta", "b"})


def parameter_words(paths: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the words of the dotted name of each variable, by its path with slashes.

    The name of the model is left out where all paths begin with it. Equal paths get a number: ``kernel``, ``kernel_2``.
    """
    words = [tuple(filter(None, path.split("/"))) or ("variable",) for path in paths]
    first = {names[0] for names in words}
    if len(first) == 1 and all(len(names) > 2 for names in words):  # the model, a layer, and a variable
        words = [names[1:] for names in words]
    used: dict[tuple[str, ...], int] = {}
    distinct = []
    for names in words:
        used[names] = used.get(names, 0) + 1
        number = used[names]
        distinct.append(names if number == 1 else (*names[:-1], f"{names[-1]}_{number}"))
    return distinct


def role_of(words: Sequence[str]) -> str:
    """Return the role of a parameter, by the words of its name."""
    return "bias" if words[-1] in _BIASES or words[-1].endswith("_bias") else "weight"


def kind_of(module: Sequence[str]) -> str:
    """Return a name for the class of a module that is not known: the last word of its name that is not a number, without digits at the end.

    It is never empty. Rules recognize by it that the recorder has observed the updates of the tensor.

    Args:
        module: the words of the module's name; none for the outermost one.
    """
    words = [stem for word in module if (stem := word.rstrip("0123456789_"))]
    return words[-1] if words else "parameters"


def describe_variables(
    variables: Sequence[Any], types: Mapping[int, str] | None = None
) -> tuple[TensorInfo, ...]:
    """Describe variables of Keras or TensorFlow, without collections.

    Args:
        variables: the variables. Those of Keras have a path; names of TensorFlow's end with ``:0``.
        types: class of the layer of each, by the variable's id, if it is known.
    """
    paths = [
        str(getattr(variable, "path", None) or getattr(variable, "name", "")).partition(":")[0]
        for variable in variables
    ]
    words = parameter_words(paths)
    orders: dict[tuple[str, ...], int] = {}
    for names in words:
        orders.setdefault(names[:-1], len(orders))
    return tuple(
        TensorInfo(
            name=".".join(names),
            collections=(),
            role=role_of(names),
            module=".".join(names[:-1]),
            module_type=(types or {}).get(id(variable)) or kind_of(names[:-1]),
            order=orders[names[:-1]],
            shape=tuple(int(size) for size in variable.shape),
            dtype=str(getattr(variable.dtype, "name", variable.dtype)),
        )
        for names, variable in zip(words, variables, strict=True)
    )


def prefixed(infos: Sequence[TensorInfo], prefix: str) -> tuple[TensorInfo, ...]:
    """Return descriptions with a prefix before their names and modules."""
    return tuple(
        replace(
            info,
            name=f"{prefix}.{info.name}",
            module=f"{prefix}.{info.module}" if info.module else prefix,
        )
        for info in infos
    )
