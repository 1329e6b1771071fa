"""Probes with arguments: figures of single elements, which are measured only where a rule or a program asks for them.

The name of such a probe, and of its column, is its kind and its arguments: ``inactive_units:1.0``. Two rules that ask for the
same arguments share a column; other arguments are another column.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from watchstep.errors import ConfigError

INACTIVE_UNITS = "inactive_units"
SATURATED_UNITS = "saturated_units"
UNITS = "units"
UNCHANGED = "unchanged"
WEIGHT_CHANGE = "weight_change"
TOKEN_COUNT = "token_count"  # noqa: S105 - no password
TOKENS = "tokens_counted"
CHANNEL_SUM = "channel_sum"
INPUT_VARIANCE = "input_variance"
PERCENTILE_RANGE = "percentile_range"
FUNCTION_CALLS = "function_calls"

MOST_CHANNELS = 4
"""Of an image: red, green, blue and alpha."""

_ARGUMENTS: dict[str, tuple[type, ...]] = {
    INACTIVE_UNITS: (float,),
    SATURATED_UNITS: (str, float, float, float),
    UNCHANGED: (float, float, bool),
    WEIGHT_CHANGE: (int, float),
    TOKEN_COUNT: (int,),
    CHANNEL_SUM: (int,),
    INPUT_VARIANCE: (),
    PERCENTILE_RANGE: (int,),
    FUNCTION_CALLS: (),
}
"""The kinds, and what their arguments are.

``inactive_units:PERCENT``: of a rectifier, units that are above zero for less than so many percent of the examples of a step.
``saturated_units:Tanh:LOW:HIGH:PERCENT``, and ``Sigmoid``: units whose input lies between the bounds for less than so many
percent of the examples. Beside both, ``units``: how many there are. ``unchanged:RTOL:ATOL:EQUAL_NAN``: 1 where all elements are
those of the record before, by the test of `numpy.allclose`, else 0. ``weight_change:STEPS:EPSILON``: the norm of the change of a
weight since an earlier record over its norm there plus epsilon; the earlier record is the oldest of the last STEPS steps, or the
last one where STEPS is 0; -1 where there is none. ``token_count:TOKEN``: how often an embedding was given a token; ``tokens_counted``, how many tokens it
was given. ``channel_sum:AXIS``: of a model's images, the sum of each channel, in columns ``channel_sum:AXIS:0`` to 3.
``input_variance``: of what goes into a rectifier. ``percentile_range:STEPS``: of a gradient, within so many steps of its first
record, the 95th percentile less the 5th. ``function_calls``: also look at `torch.relu`, `torch.tanh` and `torch.sigmoid` where a
model calls them as functions; their outputs are then recorded as ``MODULE:relu_0``.
"""

_SUMMED = frozenset({TOKEN_COUNT, TOKENS, CHANNEL_SUM})
_LAST = frozenset({INACTIVE_UNITS, SATURATED_UNITS, UNITS, INPUT_VARIANCE})


class ElementProbe(NamedTuple):
    """One probe: its name, its kind, and its arguments."""

    name: str
    kind: str
    arguments: tuple[str | float | int | bool, ...]


def element_probe(kind: str, *arguments: str | float) -> str:
    """The name of a probe of a kind with these arguments."""
    kinds = _ARGUMENTS[kind]
    given = [str(_converted(to, argument)) for to, argument in zip(kinds, arguments, strict=True)]
    return ":".join([kind, *given])


def parsed(name: str) -> ElementProbe | None:
    """The probe of that name; None where it is of another sort.

    Raises:
        ConfigError: the arguments are not those of its kind.
    """
    kind, *words = name.split(":")
    if kind not in _ARGUMENTS:
        return None
    kinds = _ARGUMENTS[kind]
    try:
        arguments = tuple(_converted(to, word) for to, word in zip(kinds, words, strict=True))
    except ValueError as error:
        takes = ", ".join(one.__name__ for one in kinds) or "nothing"
        raise ConfigError(f"probe {name!r}: its arguments are wrong", f"{kind} takes {takes}") from error
    return ElementProbe(name, kind, arguments)


def of_kind(probes: Iterable[str], kind: str) -> list[ElementProbe]:
    """Those of a kind."""
    return [probe for name in probes if (probe := parsed(name)) is not None and probe.kind == kind]


def kind_of(column: str) -> str:
    """The kind of a probe's column."""
    return column.partition(":")[0]


def is_summed(column: str) -> bool:
    """Whether the passes of one step add up."""
    return kind_of(column) in _SUMMED


def counts_on(column: str) -> bool:
    """Whether each pass of a step has taken in those before it."""
    return kind_of(column) in _LAST


def _converted(to: type, value: str | float) -> str | float | int | bool:
    if to is bool:
        if str(value) not in {"True", "False"}:
            raise ValueError(value)
        return str(value) == "True"
    converted: str | float | int = to(value)
    return converted
