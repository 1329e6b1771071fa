"""Calls of optimizers that are parts of one update, as of a program that applies transformations one by one.

A call is a part of the update of an earlier one if its gradients

- are what that call has returned,
- or are computed from that and from nothing else but numbers, in the same compiled step,
- or are the very gradients of that call, for the same parameters.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from watchstep.jax.internals import jax_names

trace_state: Callable[[], Any] = jax_names.find("trace_state") or object
"""Returns an object that is equal for code in the same trace; a new one at each call if JAX does not tell. Looked up once, because it is asked for
at each call of a compiled function."""


_top_level = trace_state()
"""That of code outside of all traces, where this module is imported."""


def is_top_level() -> bool:
    """Return whether the current code is outside of all traces. This module is imported outside of them."""
    return bool(trace_state() == _top_level)


@dataclass(frozen=True, eq=False)
class Call:
    """A call of an optimizer.

    Attributes:
        withheld: whether the update was left out, bool of shape (); None without a policy.
        trace: the trace.
        gradients: number of its gradients.
        elements: number of their elements.
        parameters: its parameters, in order; empty if the program passed none.
        is_identity: whether it has returned its gradients unchanged.
    """

    withheld: Any
    trace: Any
    gradients: int
    elements: int
    parameters: tuple[weakref.ref[Any], ...]
    is_identity: bool


_Calls = dict[int, tuple[weakref.ref[Any], Call]]

_returned: _Calls = {}
"""What the updates that a program still has were returned by, by the id of the array."""

_given: _Calls = {}
"""The last call that the gradients which a program still has were passed to, by the id of the array."""


def remember(updates: Any, gradients: Any, parameters: Any, withheld: Any) -> Call:
    """Remember a call until the program has neither its gradients nor its updates any more.

    Args:
        updates: pytree that it has returned. Leaves that it has passed on unchanged may be gradients of another update, too.
        gradients: pytree that it was called with.
        parameters: pytree of the parameters; None if the program passed none.
        withheld: as in `Call`.
    """
    given, returned = _arrays(gradients), _arrays(updates)
    unchanged = frozenset(map(id, given))
    changed = [leaf for leaf in returned if id(leaf) not in unchanged]
    references = tuple(map(weakref.ref, _arrays(parameters)))
    call = Call(withheld, trace_state(), len(given), elements_of(given), references, not changed)
    for leaves, calls in ((changed, _returned), (given, _given)):
        for leaf in leaves:
            calls[id(leaf)] = weakref.ref(leaf, functools.partial(_forget, calls, id(leaf))), call
    return call


def _forget(calls: _Calls, key: int, _: Any) -> None:
    calls.pop(key, None)


def earlier_call(gradients: Any, parameters: Any) -> Call | None:
    """Return the call whose update one with these arguments is a part of; None if it makes an update of its own."""
    leaves = _arrays(gradients)
    for leaf in leaves:
        if id(leaf) in _returned:
            return _returned[id(leaf)][1]
    return _call_of_same(leaves, _arrays(parameters)) or _call_that_computed(leaves)


def _call_of_same(gradients: Sequence[Any], parameters: Sequence[Any]) -> Call | None:
    """Return the call that was passed the same gradients, for the same parameters as far as the program passed them."""
    calls = {id(gradient): _given.get(id(gradient), (None, None))[1] for gradient in gradients}
    call = next(iter(calls.values()), None)
    if call is None or set(calls.values()) != {call} or call.gradients != len(gradients):
        return None
    here = trace_state()
    if call.trace != here:
        return None
    if call.is_identity:
        return call
    if not (parameters and call.parameters):
        # A program without a compiled step may apply gradients again, at the next one.
        return None if here == _top_level else call
    pairs = zip(call.parameters, parameters, strict=False)
    is_same = len(call.parameters) == len(parameters) and all(one() is other for one, other in pairs)
    return call if is_same else None


def _call_that_computed(gradients: Sequence[Any]) -> Call | None:
    """Return the call from whose result gradients are computed; None if they also depend on arrays that are not the call's.

    Those of a further step depend on parameters. A number, such as a learning rate, is not such an array.
    """
    here = trace_state()
    if here == _top_level or not any(call.trace == here for _, call in list(_returned.values())):
        return None
    kind = jax_names.find("traced_value")
    if kind is None:
        return None
    call: Call | None = None
    waiting, seen = list(gradients), set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if id(value) in _returned:
            call = _returned[id(value)][1]
        elif id(value) not in _given:
            equation = jax_names.of(value, "traced_equation") if isinstance(value, kind) else None
            if equation is not None:
                waiting.extend(jax_names.of(equation, "traced_inputs", ()))
            elif getattr(value, "ndim", 0):
                return None
    return call if call is not None and call.elements == elements_of(gradients) else None


def _arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree_util.tree_leaves(tree) if isinstance(leaf, jax.Array)]


def is_input(value: Any) -> bool:
    """Return whether a value is an input of the trace that it belongs to; False if JAX does not tell."""
    kind = jax_names.find("traced_value")
    return (
        kind is not None
        and isinstance(value, kind)
        and jax_names.of(value, "traced_equation", default=value) is None
    )


def elements_of(leaves: Sequence[Any]) -> int:
    """Return the number of elements of arrays."""
    return sum(math.prod(getattr(leaf, "shape", ())) for leaf in leaves)
