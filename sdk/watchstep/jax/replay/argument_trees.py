"""The leaves of the arguments of a step: their names, and which of them are values and not constants."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from watchstep.errors import ConfigError
from watchstep.jax.internals import jax_names
from watchstep.jax.replay.value_health import is_reference


@dataclass(frozen=True)
class LostLeaf:
    """Takes the place of a leaf whose value is gone.

    Attributes:
        reason: why.
    """

    reason: str


@dataclass(frozen=True)
class ArgumentTree:
    """The arguments of a call as leaves.

    Attributes:
        leaves: all leaves.
        paths: the keys of each leaf: positional or keyword, argument, keys in it.
        dynamic: places of the leaves that are values.
    """

    leaves: tuple[Any, ...]
    paths: tuple[Any, ...]
    dynamic: tuple[int, ...]
    _structure: Any

    @classmethod
    def of(
        cls, arguments: Sequence[Any], keywords: Mapping[str, Any], static_argnums: int | Sequence[int] = ()
    ) -> ArgumentTree:
        """Take the leaves of a call's arguments.

        Args:
            arguments: Positional arguments.
            keywords: Keyword arguments.
            static_argnums: Positions of arguments that are constants.
        """
        flat, structure = jax.tree_util.tree_flatten_with_path((tuple(arguments), dict(keywords)))
        paths, leaves = tuple(path for path, _ in flat), tuple(leaf for _, leaf in flat)
        return cls(leaves, paths, _dynamic(paths, leaves, static_argnums), structure)

    def with_leaves(self, leaves: Sequence[Any], static_argnums: int | Sequence[int] = ()) -> ArgumentTree:
        """Return a tree with other leaves in all places, without a call of the program's own classes.

        Args:
            leaves: The leaves; `LostLeaf` for those whose value is gone.
            static_argnums: Positions of arguments that are constants.
        """
        dynamic = _dynamic(self.paths, leaves, static_argnums)
        return ArgumentTree(tuple(leaves), self.paths, dynamic, self._structure)

    @property
    def values(self) -> list[Any]:
        """The leaves that are values."""
        return [self.leaves[place] for place in self.dynamic]

    def with_values(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with other values in the places of the dynamic leaves."""
        complete = list(self.leaves)
        for place, value in zip(self.dynamic, values, strict=True):
            complete[place] = value
        positional, keywords = jax.tree_util.tree_unflatten(self._structure, complete)
        return positional, keywords

    def names(self, parameters: Sequence[str] = ()) -> list[str]:
        """Return the names of the dynamic leaves, as ``params.layer.kernel``, or ``arguments[0].layer.kernel`` without names of parameters."""
        return [self.name(place, parameters) for place in self.dynamic]

    def name(self, place: int, parameters: Sequence[str] = ()) -> str:
        """Return the name of a leaf, as `names` does."""
        path = self.paths[place]
        if path[0].idx == 1:
            return suffix(path[1:]).lstrip(".")
        position = path[1].idx
        argument = parameters[position] if position < len(parameters) else f"arguments[{position}]"
        return f"{argument}{suffix(path[2:])}"

    def check_present(self, parameters: Sequence[str] = ()) -> None:
        """Check that no value was donated.

        Raises:
            ConfigError: one has been deleted.
        """
        for leaf, name in zip(self.values, self.names(parameters), strict=True):
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ConfigError(
                    f"argument {name} has been deleted: the program donated it to an earlier call",
                    "pass the values from before that call, e.g. a copy or a checkpoint",
                )


def parameter_names(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> list[str]:
    """Return the names of the positional arguments by a function's signature; an empty list if it has none."""
    try:
        bound = inspect.signature(function).bind(*arguments, **keywords)
    except (TypeError, ValueError):
        return []
    names: list[str] = []
    for parameter in bound.signature.parameters.values():
        if parameter.kind in {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}:
            names.append(parameter.name)
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names.extend(f"{parameter.name}[{place}]" for place in range(len(arguments) - len(names)))
    return names[: len(arguments)]


def suffix(path: Sequence[Any]) -> str:
    """Return the keys of a leaf as ``.layer.kernel`` or ``[0]``."""
    text = ""
    for key in path:
        if hasattr(key, "idx"):
            text += f"[{key.idx}]"
        else:
            text += f".{getattr(key, 'key', getattr(key, 'name', key))}"
    return text


def own_array(leaf: Any) -> Any:
    """Return an array for a leaf; a copy of a reference, because an evaluation changes it."""
    if is_reference(leaf):
        return jax_names.require("new_ref")(leaf[...])
    return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)


def _dynamic(
    paths: Sequence[Any], leaves: Sequence[Any], static_argnums: int | Sequence[int]
) -> tuple[int, ...]:
    static = {static_argnums} if isinstance(static_argnums, int) else set(static_argnums)
    return tuple(
        place
        for place, (path, leaf) in enumerate(zip(paths, leaves, strict=True))
        if _is_dynamic(leaf) and not (path[0].idx == 0 and path[1].idx in static)
    )


def _is_dynamic(leaf: Any) -> bool:
    if is_reference(leaf) or isinstance(leaf, (jax.Array, bool, int, float, complex, np.generic, LostLeaf)):
        return True
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "OSUmM"
