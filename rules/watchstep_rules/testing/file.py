"""Rule test files: their schema, the notation of series, and rows with given figures.

Series are written short, ``1e-3x100 1e-9x20 _ NaN``, similar to unit tests of Prometheus rules:

| notation | values |
|---|---|
| ``3`` | 3, once |
| ``3x4`` | 3 3 3 3 |
| ``1+2x4`` | 1 3 5 7 |
| ``7-2x3`` | 7 5 3 |
| ``1*10x3`` | 1 10 100 |
| ``_``, ``_x5`` | nothing recorded, once or five times |
| ``NaN``, ``Inf``, ``-Inf`` | values that are not finite; with a count as well |

A count is the number of values, not the number of values after the first as in Prometheus.

The other figures of a row follow from the same elements, so they are consistent: a tensor of n elements with mean magnitude v has half
of its elements at v and half at -v, so its root mean square is v, its norm is v * sqrt(n), and its mean is close to 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from watchstep.errors import BadNameError, RuleError
from watchstep.format.layout import check_name
from watchstep.format.statistics import Histograms, StatisticsBatch, merge_rows, scalars
from watchstep.format.tensors import Mode
from watchstep_rules.rule import Severity
from watchstep_rules.rule_files.rule_file import YamlNodes, data_of, in_words

MOST_VALUES = 1_000_000

_NUMBER = r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[nN]a[nN]|[iI]nf)"
_WORD = re.compile(
    rf"(?:(?P<missing>_)|(?P<first>{_NUMBER})(?:(?P<sign>[+*-])(?P<change>{_NUMBER}))?)(?:x(?P<count>\d+))?"
)


def values_of(text: str) -> list[float | None]:
    """The values of a series; None if nothing was recorded.

    Raises:
        ValueError: a word is not valid notation, or there are more than `MOST_VALUES`.
    """
    values: list[float | None] = []
    for word in text.split():
        found = _WORD.fullmatch(word)
        if found is None:
            raise ValueError(
                f"{word[:80]!r} is not a valid value: write 3, 3x4, 1+2x4, 7-2x3, 1*10x3, _, NaN or Inf"
            )
        count = int(found["count"] or 1)
        if found["sign"] and not found["count"]:
            raise ValueError(f"{word[:80]!r} has no number of values: write for example {word[:60]}x10")
        if len(values) + count > MOST_VALUES:
            raise ValueError(f"over {MOST_VALUES} values: use shorter series")
        values.extend([None] * count if found["missing"] else _written(found, count))
    return values


def _written(found: re.Match[str], count: int) -> list[float]:
    first = float(found["first"])
    if not found["sign"]:
        return [first] * count
    change = float(found["change"])
    if found["sign"] == "*":
        return [_product(first, change, place) for place in range(count)]
    step = -change if found["sign"] == "-" else change
    return [first + place * step for place in range(count)]


def _product(first: float, factor: float, times: int) -> float:
    try:
        return first * factor**times
    except OverflowError:
        return float("inf") if first > 0 else float("-inf")


Elements = list[tuple[float, int]]
"""Pairs of a value and its number of elements."""

_SPREAD = ("abs_mean", "rms", "std", "variance", "l1", "l2", "abs_max")
_SAME = ("mean", "min", "max")
_COUNTED = ("nan", "pos_inf", "neg_inf", "zero", "zero_share", "nonfinite_share")
FIGURES = (*_SAME, *_SPREAD, *_COUNTED)
"""The figures that a series may be given by."""


def figure_is_known(figure: str) -> bool:
    """Whether a series may be given by it."""
    return figure in FIGURES


def statistics_with(figure: str, values: list[float], count: int) -> StatisticsBatch:
    """One row for each value.

    Args:
        figure: one of `FIGURES`.
        values: the values of the figure; NaN or infinity produce a tensor with one such element.
        count: the number of elements of the tensor.

    Raises:
        ValueError: no tensor with this number of elements has this figure.
    """
    return _statistics_of([elements_with(figure, value, count) for value in values])


def elements_with(figure: str, value: float, count: int) -> Elements:
    """The elements of one row of `statistics_with`.

    Raises:
        ValueError: no tensor with this number of elements has this figure.
    """
    if not math.isfinite(value):
        return [(value, 1), *_spread(1.0, count - 1)]
    if figure in _SAME:
        return [(value, count)]
    if value < 0:
        raise ValueError(f"{figure} {value:g} is not possible: it is never negative")
    if figure in _COUNTED:
        return _counted(figure, value, count)
    return _spread(_magnitude(figure, value, count), count)


def _spread(magnitude: float, count: int) -> Elements:
    """Half of them above zero, half below."""
    return [(magnitude, (count + 1) // 2), (-magnitude, count // 2)]


def _magnitude(figure: str, value: float, count: int) -> float:
    if figure in {"std", "variance"}:
        if count == 1 and value > 0:
            raise ValueError(f"{figure} {value:g} is not possible: the tensor has one element; set its shape")
        # An odd number of elements reduces the deviation.
        spread = math.sqrt(1 - 1 / count**2) if count % 2 and count > 1 else 1.0
        return (math.sqrt(value) if figure == "variance" else value) / spread
    return {"l1": value / count, "l2": value / math.sqrt(count)}.get(figure, value)


def _counted(figure: str, value: float, count: int) -> Elements:
    share = value * count if figure.endswith("_share") else value
    hit = round(share)
    if hit > count or (not figure.endswith("_share") and hit != share):
        raise ValueError(f"{figure} {value:g} is not possible: the tensor has {count} elements")
    number = {"pos_inf": math.inf, "neg_inf": -math.inf, "zero": 0.0, "zero_share": 0.0}.get(figure, math.nan)
    return [(number, hit), *_spread(1.0, count - hit)]


def _statistics_of(rows: list[Elements]) -> StatisticsBatch:
    held = [[pair for pair in elements if pair[1]] for elements in rows]
    pairs = [pair for elements in held for pair in elements]
    group = np.repeat(np.arange(len(held)), [len(elements) for elements in held])
    return merge_rows(_repeated([pair[0] for pair in pairs], [pair[1] for pair in pairs]), group, len(held))


def _repeated(values: list[float], times: list[int]) -> StatisticsBatch:
    """Tensors of equal elements."""
    one, many = scalars(values), np.asarray(times, np.int64)
    bins = one.histogram
    owner = np.repeat(np.arange(len(many)), np.diff(bins.offsets))
    with np.errstate(over="ignore"):
        abs_sum, square_sum = one.abs_sum * many, one.square_sum * many
    return replace(
        one,
        count=one.count * many,
        nan=one.nan * many,
        pos_inf=one.pos_inf * many,
        neg_inf=one.neg_inf * many,
        zero=one.zero * many,
        negative=one.negative * many,
        abs_sum=abs_sum,
        square_sum=square_sum,
        histogram=Histograms(bins.offsets, bins.bins, bins.counts * many[owner]),
    )


Figure = Annotated[str, StringConstraints(max_length=100)]
Step = Annotated[int, Field(ge=0)]
Steps = Step | tuple[Step, Step]
"""One step, or the first and the last of a range."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Tensor(_Model):
    """A tensor as recorders describe it. Missing fields follow from its name."""

    tensor: str = Field(
        min_length=1, description="The tensor's name, e.g. fc1.weight:gradient, fc1:output, loss."
    )
    role: str | None = Field(
        None, description="The role: gradient, weight, loss, …; by default derived from the name."
    )
    collections: tuple[str, ...] | None = Field(
        None, description="The collections; by default derived from the role."
    )
    module: str | None = Field(None, description="The module; by default derived from the name.")
    module_type: str | None = Field(
        None, description="The class of the module; Linear by default if there is a module."
    )
    order: int | None = Field(None, ge=0, description="The depth; by default the index in the list.")
    mode: Mode = "train"
    worker: int | None = Field(None, ge=0, description="The worker; all workers by default.")


class Series(_Tensor):
    """The values of one tensor, step by step."""

    values: str | float = Field(description="Values in short notation: 1e-3x100 1e-9x20 _ NaN.")
    figure: Figure | None = Field(
        None,
        description=f"The statistic of the values: {', '.join(FIGURES)}. By default the mean for one element, else the abs_mean.",
    )
    probes: dict[str, str | float] = Field(
        default_factory=dict, description="Further columns, by name, in the same notation."
    )
    shape: tuple[Annotated[int, Field(ge=1, le=2**31)], ...] | None = Field(
        None,
        max_length=8,
        description="The shape; by default [] for losses and metrics, [8] for biases, else [8, 8].",
    )
    start: int = Field(0, ge=0, description="The step of the first value.")
    every: int = Field(1, ge=1, description="Steps between two values.")

    @model_validator(mode="after")
    def _can_be_made(self) -> Series:
        length = len(values_of(str(self.values)))
        if self.figure is not None and not figure_is_known(self.figure):
            raise ValueError(f"figure {self.figure!r}: use one of {', '.join(FIGURES)}")
        for name, written in self.probes.items():
            found = len(values_of(str(written)))
            if found not in {1, length}:
                raise ValueError(
                    f"probe {name!r} has {found} values instead of {length}: give one, or {length}"
                )
        return self


SavedDtype = Literal["float32", "float64", "float16", "int64", "int32", "uint8", "bool"]


class Filled(_Model):
    """Values that are not written out."""

    shape: tuple[Annotated[int, Field(ge=0, le=MOST_VALUES)], ...] = Field(
        max_length=8, description="The shape."
    )
    constant: float = Field(0.0, allow_inf_nan=True, description="The value of all elements.")
    normal: int | None = Field(
        None,
        ge=0,
        description="Instead of constant: normally distributed elements with mean 0 and variance 1, by this seed.",
    )

    @model_validator(mode="after")
    def _is_small(self) -> Filled:
        if math.prod(self.shape) > MOST_VALUES:
            raise ValueError(f"{math.prod(self.shape)} elements: at most {MOST_VALUES} are possible")
        return self


def _checked_values(value: Any) -> Any:
    """Check nested lists: of equal length, of numbers, or NaN, Inf and -Inf as words."""
    if isinstance(value, dict):
        return Filled.model_validate(value)
    if isinstance(value, Filled):
        return value
    waiting = [value]
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, list):
            waiting += entry
        elif not (isinstance(entry, int | float) or entry in _WORDS):
            raise ValueError(f"{str(entry)[:80]!r} is not a number, NaN, Inf or -Inf")
    try:
        array = np.array(value, np.float64)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{str(value)[:80]} is not a number, or lists of equal length") from error
    if array.size > MOST_VALUES or array.ndim > _MOST_DIMENSIONS:
        raise ValueError(
            f"{array.size} elements in {array.ndim} dimensions: at most {MOST_VALUES} in {_MOST_DIMENSIONS} are possible"
        )
    return value


_MOST_DIMENSIONS = 8
_WORDS = ("NaN", "Inf", "-Inf")
SavedValues = Annotated[
    Any,
    BeforeValidator(_checked_values),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number"},
                {"type": "string", "enum": list(_WORDS)},
                {
                    "type": "array",
                    "description": "Numbers, or lists of numbers; one level for each dimension.",
                },
                Filled.model_json_schema(),
            ]
        }
    ),
]


class SavedSeries(_Tensor):
    """A tensor that was saved in full at some steps, for rules over full tensors."""

    values: dict[Step, SavedValues] = Field(
        min_length=1,
        description="The values at each step: a number, nested lists, or {shape, constant} or {shape, normal: SEED}.",
    )
    reference: dict[Step, SavedValues] = Field(
        default_factory=dict, description="The values of this tensor in the reference run, by step."
    )
    dtype: SavedDtype = Field("float32", description="The element type.")

    @model_validator(mode="after")
    def _can_be_saved(self) -> SavedSeries:
        for name in self.collections or ():
            try:
                check_name("collection", name)
            except BadNameError as error:
                raise ValueError(error.what) from error
        return self


def array_of(values: Any, dtype: str) -> NDArray[Any]:
    """The array of saved values."""
    if not isinstance(values, Filled):
        return np.array(values, np.float64).astype(dtype)
    if values.normal is None:
        return np.full(values.shape, values.constant).astype(dtype)
    return np.random.default_rng(values.normal).standard_normal(values.shape).astype(dtype)


class Expectation(_Model):
    """The expected alert of one rule config."""

    rule: str = Field(description="The rule config's name.")
    never: bool = Field(
        False, alias="not", description="The alert must not fire (for the tensor, if one is set)."
    )
    fires_at: Steps | None = Field(None, description="The step at which it fires, or [first, last].")
    tensor: str | None = Field(None, description="The tensor of the finding that makes it fire.")
    worker: int | None = Field(None, ge=0, description="The worker of this finding.")
    mode: Mode | None = Field(None, description="The mode of this finding.")
    message: str | None = Field(None, description="A part of this finding's message.")
    severity: Severity | None = Field(None, description="The severity of the rule config.")
    stops: bool | None = Field(None, description="Whether the rule config stops the job.")
    resolved_at: Steps | Literal["never"] | None = Field(
        None, description="The step at which it is resolved, [first, last], or never."
    )
    health: Literal["ok", "no_data", "error"] | None = Field(
        None, description="The health of the rule; by default any value but error."
    )

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @model_validator(mode="after")
    def _fits_together(self) -> Expectation:
        if self.never and (self.fires_at is not None or self.resolved_at is not None):
            raise ValueError("'not' and 'fires_at' or 'resolved_at' contradict each other")
        return self


class RuleTest(_Model):
    """One test: synthetic series, or a recorded run."""

    name: str = Field(min_length=1, description="The name of the test.")
    series: tuple[Series, ...] = Field((), description="The tensors of a synthetic run.")
    saved: tuple[SavedSeries, ...] = Field((), description="The full tensors that a synthetic run saved.")
    run: str | None = Field(None, description="A recorded run: path relative to this file, or URL.")
    attempt: str | None = Field(None, description="The attempt of the run; the newest by default.")
    interval: float = Field(1.0, gt=0, le=1e6, description="Seconds between two steps of a synthetic run.")
    workers: int = Field(1, ge=1, le=1024, description="Ranks of a synthetic run; each has all series.")
    expect: tuple[Expectation, ...] = Field(description="The expected alerts.")
    others: Literal["ignored", "silent"] = Field(
        "ignored", description="Whether rule configs that are not named may fire."
    )

    @model_validator(mode="after")
    def _has_rows(self) -> RuleTest:
        if (self.run is None) == (not self.series and not self.saved):
            raise ValueError("give either 'series' or 'run'; 'saved' may stand beside or instead of 'series'")
        if self.attempt is not None and self.run is None:
            raise ValueError("'attempt' requires a recorded 'run'")
        return self


class RuleTestFile(_Model):
    """A file of rule tests."""

    rule_files: tuple[str, ...] = Field(
        (), description="The rule files under test, relative to this file; the default rules if omitted."
    )
    tests: tuple[RuleTest, ...] = Field(min_length=1, description="The tests.")


def load(path: Path) -> RuleTestFile:
    """Read a file of rule tests.

    Raises:
        RuleError: the file is missing, not valid YAML, or not valid; the message lists all errors with their lines.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"rule tests {path}: cannot be read ({error})", "check the path") from error
    try:
        data, places = data_of(text), YamlNodes.of(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise RuleError(
            f"rule tests {path}: not valid YAML ({_in_one_line(error)})", "correct the line"
        ) from error
    duplicates = [
        (line, f"duplicate key {key}: only the last one would count") for key, line in places.duplicates()
    ]
    try:
        file = RuleTestFile.model_validate(data)
    except ValidationError as error:
        faults = [*duplicates, *_faults(error, places)]
    else:
        if not duplicates:
            return file
        faults = duplicates
    lines = [f"{path}:{line}: error: {message}" for line, message in sorted(dict.fromkeys(faults))]
    raise RuleError(
        "\n".join([f"rule tests {path}: {len(lines)} error{'' if len(lines) == 1 else 's'}", *lines]),
        "see 'watchstep rules test --schema'",
    )


def _faults(error: ValidationError, places: YamlNodes) -> Iterator[tuple[int, str]]:
    """The errors with their lines. A list without valid items is not reported as too short; its items are reported."""
    for fault in error.errors():
        if fault["type"] == "too_short":
            if fault["input"]:
                continue
            message = "the list is empty: write at least one"
        else:
            message = in_words(fault["msg"])
        yield places.line(fault["loc"]), f"{'.'.join(map(str, fault['loc'])) or 'file'}: {message}"


def schema() -> dict[str, Any]:
    """The JSON schema of a file of rule tests, for editors."""
    file_schema = RuleTestFile.model_json_schema(by_alias=True)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **file_schema,
        "title": "Watchstep rule tests",
    }


def schema_text() -> str:
    """The text of the published schema."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
