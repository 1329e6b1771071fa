"""Calls of a compiled function inside of a trace as the function that was written, with the conversions of values that `jax.jit` makes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class StaticArguments:
    """Which arguments of a compiled function are constants.

    Attributes:
        positions: positions, negative ones from the end of a call's positional arguments.
        names: names.
    """

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, function: Callable[..., Any], options: Mapping[str, Any]) -> StaticArguments:
        """Return those of ``jax.jit(function, **options)``. If only positions or only names are specified, JAX infers the others."""
        positions, names = options.get("static_argnums"), options.get("static_argnames")
        if positions is None and names is None:
            return cls()
        chosen = {positions} if isinstance(positions, int) else set(positions or ())
        chosen_names = {names} if isinstance(names, str) else set(names or ())
        if positions is None or names is None:
            parameters = _positional_parameters(function)
            count = len(parameters)
            chosen_names |= {parameters[place] for place in chosen if -count <= place < count}
            chosen |= {parameters.index(name) for name in chosen_names if name in parameters}
        return cls(frozenset(chosen), frozenset(chosen_names))

    def is_static(self, position: int, count: int) -> bool:
        """Return whether a positional argument is a constant.

        Args:
            position: its position.
            count: number of positional arguments of the call.
        """
        return position in self.positions or position - count in self.positions

    def values(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Hashable:
        """Return the constants of a call, which JAX requires to be hashable."""
        count = len(arguments)
        chosen = tuple(value for place, value in enumerate(arguments) if self.is_static(place, count))
        return chosen, tuple(sorted((name, keywords[name]) for name in self.names & keywords.keys()))


def _positional_parameters(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def call_inline(
    function: Callable[..., Any],
    static: StaticArguments,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
) -> Any:
    """Call a function as part of the current trace.

    As with `jax.jit`, the function receives arrays and containers of its own, and its caller arrays: numbers and arrays of NumPy
    are converted, and a dict that the function changes is not the caller's.

    Args:
        function: the function that was compiled.
        static: its constants, which are passed as they are.
        arguments: positional arguments.
        keywords: keyword arguments.
    """
    count = len(arguments)
    positional = [
        value if static.is_static(place, count) else _converted(value)
        for place, value in enumerate(arguments)
    ]
    by_name = {name: value if name in static.names else _converted(value) for name, value in keywords.items()}
    return _converted(function(*positional, **by_name))


def _converted(tree: Any) -> Any:
    return jax.tree_util.tree_map(_array, tree)


def _array(leaf: Any) -> Any:
    return (
        jnp.asarray(leaf) if isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)) else leaf
    )
