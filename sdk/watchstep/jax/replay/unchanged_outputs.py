"""Outputs of a step that are arguments of it, bit by bit, if the step leaves out its update.

The position of an output does not tell which argument it is: a program may return two models in the other order, or change a parameter besides its
update. The operations of the step tell it. They are followed under the assumption that the update is withheld, so that what the optimizer returns is
zero. An output is an argument if nothing but zero is added to it on the way. The sign of zeros is not told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from watchstep.jax.stacked_layers import body_of, places_of_inputs
from watchstep.jax.traced_updates import UpdateOutputs


@dataclass(frozen=True)
class _Argument:
    """The value of an argument.

    Attributes:
        place: its place among the leaves of the arguments.
        dtype: its dtype: a conversion to another one and back may round it.
    """

    place: int
    dtype: Any


class _Known(Enum):
    """Values that are known whatever the arguments are."""

    ZERO = 0
    FALSE = 1
    TRUE = 2


_Value = _Argument | _Known | None

_OPPOSITES = {_Known.FALSE: _Known.TRUE, _Known.TRUE: _Known.FALSE}

_SAME = frozenset({"copy", "copy_p", "stop_gradient", "sharding_constraint", "optimization_barrier"})
"""Operations that return their inputs."""

_CALLS = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
)
"""Operations that evaluate a program once. Others have programs with another meaning, such as what a reduction does with two elements."""

_ZERO_OF_ZERO = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose", "expand_dims", "neg"})
"""Operations that return zeros for zeros."""


def unchanged_outputs(traced: Any, arguments: Any, keywords: Any) -> dict[int, tuple[int, ...]]:
    """Return the outputs that are an argument if the update of a step is withheld.

    Args:
        traced: the trace of the step's recording form, which makes one update.
        arguments: positional arguments of the call. They may have been donated.
        keywords: keyword arguments of the call.

    Returns:
        The places of these outputs among the leaves of the result, by the place of the argument among the leaves of ``(arguments, keywords)``.
    """
    program = traced.jaxpr.jaxpr
    places = places_of_inputs(traced, arguments, keywords)
    result, updates = traced.out_info
    withheld = [update.withheld for update in updates if isinstance(update, UpdateOutputs)]
    if places is None or len(withheld) != 1 or withheld[0] is None:
        return {}
    outputs = jax.tree_util.tree_leaves((result, updates))
    mark = next(place for place, output in enumerate(outputs) if output is withheld[0])
    values = _Values(_assumed(program, program.outvars[mark]))
    inputs = [
        _Argument(place, variable.aval.dtype) for place, variable in zip(places, program.invars, strict=True)
    ]
    count = len(jax.tree_util.tree_leaves(result))
    found: dict[int, tuple[int, ...]] = {}
    for output, value in enumerate(values.outputs_of(program, inputs)[:count]):
        if isinstance(value, _Argument) and value.dtype == program.outvars[output].aval.dtype:
            found[value.place] = (*found.get(value.place, ()), output)
    return found


def _assumed(program: Any, withheld: Any) -> dict[Any, _Known]:
    """Return what follows for variables of a program from the assumption that its update is withheld: the guard selects by the negation."""
    makers = {output: equation for equation in program.eqns for output in equation.outvars}
    assumed = {withheld: _Known.TRUE}
    variable = withheld
    while variable in makers and makers[variable].primitive.name == "not":
        (negated,) = makers[variable].invars
        if _is_literal(negated):
            break
        assumed[negated] = _OPPOSITES[assumed[variable]]
        variable = negated
    return assumed


class _Values:
    """Follows values through the operations of a program."""

    def __init__(self, assumed: Mapping[Any, _Known]) -> None:
        self._assumed = assumed

    def outputs_of(self, program: Any, inputs: Sequence[_Value]) -> list[_Value]:
        """Return the values of a program's outputs."""
        values: dict[Any, _Value] = dict(zip(program.invars, inputs, strict=True))

        def read(atom: Any) -> _Value:
            return _value_of_literal(atom.val) if _is_literal(atom) else values.get(atom)

        for equation in program.eqns:
            results = self._results(equation, [read(atom) for atom in equation.invars])
            for variable, value in zip(equation.outvars, results, strict=True):
                values[variable] = self._assumed.get(variable, value)
        return [read(atom) for atom in program.outvars]

    def _results(self, equation: Any, inputs: list[_Value]) -> Sequence[_Value]:
        name, outputs = equation.primitive.name, equation.outvars
        if name in _SAME:
            return inputs
        if name == "cond":
            branches = [branch.jaxpr for branch in equation.params["branches"]]
            found = [self.outputs_of(branch, inputs[1:]) for branch in branches]
            return [_common(values) for values in zip(*found, strict=True)]
        body = body_of(equation) if name in _CALLS else None
        if body is not None and len(body.invars) == len(inputs) and len(body.outvars) == len(outputs):
            return self.outputs_of(body, inputs)
        return [_result(equation, inputs)] if len(outputs) == 1 else [None] * len(outputs)


def _result(equation: Any, inputs: Sequence[_Value]) -> _Value:
    """Return the result of an operation with one output; None if it is unknown."""
    name, first = equation.primitive.name, inputs[0] if inputs else None
    if name == "select_n":
        if first in _OPPOSITES:
            return inputs[1 + (first is _Known.TRUE)]
        return _common(inputs[1:])
    if name == "not" and isinstance(first, _Known):
        return _OPPOSITES.get(first)
    if name == "convert_element_type":
        is_kept = isinstance(first, _Argument) and _holds(equation.params["new_dtype"], first.dtype)
        return first if is_kept or first is _Known.ZERO else None
    if name in {"add", "add_any", "sub"} and inputs[1] is _Known.ZERO:
        return first
    if name in {"add", "add_any"} and first is _Known.ZERO:
        return inputs[1]
    if name == "mul" and _Known.ZERO in inputs and any(map(_is_finite_literal, equation.invars)):
        return _Known.ZERO
    return first if name in _ZERO_OF_ZERO and first is _Known.ZERO else None


def _common(values: Sequence[_Value]) -> _Value:
    """Return the value that all of some values are."""
    return values[0] if all(value == values[0] for value in values) else None


def _holds(dtype: Any, other: Any) -> bool:
    """Return whether a dtype has each value of another."""
    if jnp.issubdtype(dtype, jnp.inexact) and jnp.issubdtype(other, jnp.integer):
        # `jnp.promote_types` makes float32 of int32 and float32, which has no more than 24 bits of a whole number.
        return bool(
            jnp.finfo(dtype).nmant + 1 >= jnp.iinfo(other).bits - jnp.issubdtype(other, jnp.signedinteger)
        )
    return bool(dtype == other or (dtype != np.bool_ and jnp.promote_types(dtype, other) == dtype))


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def _is_finite_literal(atom: Any) -> bool:
    return _is_literal(atom) and bool(np.isfinite(atom.val).all())


def _value_of_literal(value: Any) -> _Value:
    if np.asarray(value).dtype == np.bool_ and np.ndim(value) == 0:
        return _Known.TRUE if value else _Known.FALSE
    return _Known.ZERO if not np.any(value) else None
