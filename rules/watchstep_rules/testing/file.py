"""A file of rule tests: what stands in it, checked as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from watchstep.errors import RuleError
from watchstep.format.tensors import Mode
from watchstep_rules.rule import Severity
from watchstep_rules.rule_files.rule_file import in_words
from watchstep_rules.rule_files.yaml_source import YamlNodes, data_of
from watchstep_rules.testing.notation import values_of
from watchstep_rules.testing.synthesis import FIGURES, figure_is_known

Figure = Annotated[str, StringConstraints(max_length=100)]
Step = Annotated[int, Field(ge=0)]
Steps = Step | tuple[Step, Step]
"""One step, or the first and the last of a range."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Series(_Model):
    """One tensor's values, step by step."""

    tensor: str = Field(min_length=1, description="Its name, e.g. fc1.weight:gradient, fc1:output, loss.")
    values: str | float = Field(description="Short notation: 1e-3x100 1e-9x20 _ NaN.")
    figure: Figure | None = Field(
        None,
        description=f"What the values are: {', '.join(FIGURES)}. Of one element the mean, else the abs_mean.",
    )
    probes: dict[str, str | float] = Field(
        default_factory=dict, description="Further columns, by name, in the same notation."
    )
    role: str | None = Field(None, description="As the name says, if left out: gradient, weight, loss, …")
    collections: tuple[str, ...] | None = Field(None, description="As the role says, if left out.")
    module: str | None = Field(None, description="As the name says, if left out.")
    module_type: str | None = Field(None, description="Linear where there is a module, if left out.")
    order: int | None = Field(None, ge=0, description="Depth; the place in the list, if left out.")
    shape: tuple[Annotated[int, Field(ge=1, le=2**31)], ...] | None = Field(
        None, max_length=8, description="[] for losses and metrics, [8] for biases, else [8, 8], if left out."
    )
    mode: Mode = "train"
    worker: int | None = Field(None, ge=0, description="Only this worker's; all workers' if left out.")
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
                raise ValueError(f"probe {name!r} has {found} values beside {length}: give one, or as many")
        return self


class Expectation(_Model):
    """What one rule config's alert shall do."""

    rule: str = Field(description="The rule config's name.")
    never: bool = Field(False, alias="not", description="It shall not fire (about that tensor, if given).")
    fires_at: Steps | None = Field(None, description="The step at which it fires, or [first, last].")
    tensor: str | None = Field(None, description="The tensor of the finding that makes it fire.")
    worker: int | None = Field(None, ge=0, description="That finding's worker.")
    mode: Mode | None = Field(None, description="That finding's mode.")
    message: str | None = Field(None, description="A part of that finding's message.")
    severity: Severity | None = Field(None, description="The rule config's.")
    stops: bool | None = Field(None, description="Whether the rule config stops the job.")
    resolved_at: Steps | Literal["never"] | None = Field(
        None, description="The step at which it is resolved, [first, last], or never."
    )
    health: Literal["ok", "no_data", "error"] | None = Field(
        None, description="Whether the rule could be evaluated; not error, if left out."
    )

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @model_validator(mode="after")
    def _fits_together(self) -> Expectation:
        if self.never and (self.fires_at is not None or self.resolved_at is not None):
            raise ValueError("'not' and 'fires_at' or 'resolved_at' contradict each other")
        return self


class RuleTest(_Model):
    """One test: series that are made, or a recorded run."""

    name: str = Field(min_length=1, description="What it shows.")
    series: tuple[Series, ...] = Field((), description="The tensors of a made run.")
    run: str | None = Field(None, description="A recorded run: path beside this file, or URL.")
    attempt: str | None = Field(None, description="Which attempt of it; the newest, if left out.")
    interval: float = Field(1.0, gt=0, le=1e6, description="Seconds between two steps of a made run.")
    workers: int = Field(1, ge=1, le=1024, description="Ranks of a made run; each has each series.")
    expect: tuple[Expectation, ...] = Field(description="What alerts shall do.")
    others: Literal["ignored", "silent"] = Field(
        "ignored", description="Whether rule configs that are not named may fire."
    )

    @model_validator(mode="after")
    def _has_rows(self) -> RuleTest:
        if (self.run is None) == (not self.series):
            raise ValueError("give either 'series' or 'run'")
        if self.attempt is not None and self.run is None:
            raise ValueError("'attempt' is one of a recorded 'run'")
        return self


class RuleTestFile(_Model):
    """A file of rule tests."""

    rule_files: tuple[str, ...] = Field(
        (), description="The rule files under test, beside this file; the default rules, if left out."
    )
    tests: tuple[RuleTest, ...] = Field(min_length=1, description="The tests.")


def load(path: Path) -> RuleTestFile:
    """Read a file of rule tests.

    Raises:
        RuleError: it is missing, no YAML, or not valid; the message names all places by their lines.
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
    twice = [
        (line, f"{key}: stands here a second time, and only the last would count")
        for key, line in places.twice()
    ]
    try:
        held = RuleTestFile.model_validate(data)
    except ValidationError as error:
        faults = [*twice, *_faults(error, places)]
    else:
        if not twice:
            return held
        faults = twice
    lines = [f"{path}:{line}: error: {said}" for line, said in sorted(dict.fromkeys(faults))]
    raise RuleError(
        "\n".join([f"rule tests {path}: {len(lines)} error{'' if len(lines) == 1 else 's'}", *lines]),
        "see 'watchstep rules test --schema'",
    )


def _faults(error: ValidationError, places: YamlNodes) -> Iterator[tuple[int, str]]:
    """What is wrong, and at which lines. A list of which no item is valid is not short: its items are told."""
    for one in error.errors():
        if one["type"] == "too_short":
            if one["input"]:
                continue
            said = "the list is empty: write at least one"
        else:
            said = in_words(one["msg"])
        yield places.line(one["loc"]), f"{'.'.join(map(str, one['loc'])) or 'file'}: {said}"


def schema() -> dict[str, Any]:
    """The JSON schema of such a file, for editors."""
    held = RuleTestFile.model_json_schema(by_alias=True)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **held,
        "title": "Watchstep rule tests",
    }


def schema_text() -> str:
    """The schema as it is published."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
