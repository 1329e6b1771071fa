"""Parameters of layers that a program stacks in one array and scans over.

A statistic of the stack does not show which layer is at fault, so that each layer has rows of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

MAX_LAYERS = 1024


def stacked_arguments(traced: Any, arguments: Any, keywords: Any) -> frozenset[int]:
    """Return which leaves of a step's arguments are scanned over their first dimension.

    Args:
        traced: the trace of the step for these arguments, as its ``trace`` method returns it.
        arguments: positional arguments of the call. They may have been donated.
        keywords: keyword arguments of the call.

    Returns:
        Indices among the leaves of ``(arguments, keywords)``; empty if the leaves cannot be matched to the inputs of the trace.
    """
    jaxpr = traced.jaxpr.jaxpr
    places = places_of_inputs(traced, arguments, keywords)
    if places is None:
        return frozenset()
    by_variable = dict(zip(map(id, jaxpr.invars), places, strict=True))
    return frozenset(by_variable[identity] for identity in _scanned(jaxpr) if identity in by_variable)


def places_of_inputs(traced: Any, arguments: Any, keywords: Any) -> list[int] | None:
    """Return the place of each input of a trace among the leaves of the arguments; None if they cannot be matched. Arguments as above."""
    inputs = jax.tree_util.tree_leaves(traced.args_info)
    places = _places(jax.tree_util.tree_leaves((arguments, keywords)), inputs)
    return places if len(inputs) == len(traced.jaxpr.jaxpr.invars) else None


def _places(leaves: list[Any], inputs: list[Any]) -> list[int] | None:
    """Return the index of the leaf of each input: constants are leaves that are no input. None if they cannot be matched."""
    if len(leaves) == len(inputs):
        return list(range(len(leaves)))
    places: list[int] = []
    remaining = iter(enumerate(leaves))
    for info in inputs:
        place = next((place for place, leaf in remaining if _is_like(leaf, info)), None)
        if place is None:
            return None
        places.append(place)
    return places


def _is_like(leaf: Any, info: Any) -> bool:
    """Return whether a leaf may be an input of this shape and dtype."""
    shape = getattr(leaf, "shape", ()) if not isinstance(leaf, type) else None
    return shape == tuple(info.shape)


def _scanned(jaxpr: Any) -> Iterator[int]:
    """Yield ids of the variables of a jaxpr that a scan takes one slice of in each iteration, also inside of calls."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "scan":
            first = equation.params["num_consts"] + equation.params["num_carry"]
            yield from map(id, equation.invars[first:])
        inner = body_of(equation) if name != "scan" else None
        if inner is not None and len(inner.invars) == len(equation.invars):
            outer = dict(zip(map(id, inner.invars), equation.invars, strict=True))
            yield from (id(outer[identity]) for identity in _scanned(inner) if identity in outer)


def body_of(equation: Any) -> Any:
    """Return the jaxpr that a call evaluates once; None for any other operation."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = equation.params.get(name)
        if inner is not None:
            return getattr(inner, "jaxpr", inner)
    return None
