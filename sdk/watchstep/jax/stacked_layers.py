"""Parameters of layers that a program stacks in one array and scans over.

A statistic of the stack does not show which layer is at fault, so that each layer has rows of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

MAX_LAYERS = 1024


def stacked_arguments(compiled: Any, arguments: Any, keywords: Any) -> frozenset[int]:
    """Return which leaves of a step's arguments are scanned over their first dimension.

    Args:
        compiled: the step, as `jax.jit` returns it, after a call with these arguments. Its trace is cached.
        arguments: positional arguments of the call. They may have been donated.
        keywords: keyword arguments of the call.

    Returns:
        Indices among the leaves of ``(arguments, keywords)``; empty if the leaves cannot be matched to the inputs of the trace.
    """
    jaxpr = compiled.trace(*arguments, **keywords).jaxpr.jaxpr
    leaves = jax.tree_util.tree_leaves((arguments, keywords))
    arrays = [place for place, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]
    if len(arrays) != len(jaxpr.invars):
        return frozenset()
    places = dict(zip(map(id, jaxpr.invars), arrays, strict=True))
    return frozenset(places[identity] for identity in _scanned(jaxpr) if identity in places)


def _scanned(jaxpr: Any) -> Iterator[int]:
    """Yield ids of the variables of a jaxpr that a scan takes one slice of in each iteration, also inside of calls."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "scan":
            first = equation.params["num_consts"] + equation.params["num_carry"]
            yield from map(id, equation.invars[first:])
        inner = _body_of(equation) if name != "scan" else None
        if inner is not None and len(inner.invars) == len(equation.invars):
            outer = dict(zip(map(id, inner.invars), equation.invars, strict=True))
            yield from (id(outer[identity]) for identity in _scanned(inner) if identity in outer)


def _body_of(equation: Any) -> Any:
    """Return the jaxpr that a call evaluates once; None for any other operation."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = equation.params.get(name)
        if inner is not None:
            return getattr(inner, "jaxpr", inner)
    return None
