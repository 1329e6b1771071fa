"""Rule files: a YAML document with rule configs under ``rules``, on top of the defaults or a preset, and its JSON schema for editors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.json_schema import models_json_schema
from pydantic_core import InitErrorDetails, PydanticCustomError

from watchstep.errors import RuleError
from watchstep.hook_arguments import AskedRules
from watchstep_rules.config.attached import element_probes
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import Name, RuleConfig
from watchstep_rules.custom.python_rule import NOT_FROM_RECORDERS, no_programs, sources_from
from watchstep_rules.custom.sandbox.pool import POOL
from watchstep_rules.custom.sql.rule import QUERIES_CHECKED
from watchstep_rules.engine.inhibition import can_be_inhibited, circles
from watchstep_rules.registry import KINDS, RULES
from watchstep_rules.rule_files.presets import PRESETS
from watchstep_rules.rule_files.yaml_source import Loc, YamlNodes, data_of

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ACTIONS = ("StopAction", "SnapshotAction", "WebhookAction", "NotifyAction")


def rule_file_schema() -> dict[str, Any]:
    """The schema of a rule file, draft 2020-12.

    What depends on other parts of the file, such as names that clash, a schema cannot say: ``watchstep rules check`` does.
    """
    rules = {**RULES, **KINDS}
    params = [rule.params_type for rule in rules.values()]
    wanted: list[Any] = [(RuleFile, "validation"), *((kind, "validation") for kind in dict.fromkeys(params))]
    made, schema = models_json_schema(wanted, by_alias=True)
    definitions = schema["$defs"]
    file = definitions.pop(_name(made[RuleFile, "validation"]))
    file["properties"]["preset"]["anyOf"][0]["enum"] = sorted(PRESETS)
    config = definitions["RuleConfig"]
    config["properties"]["rule"] = {**config["properties"]["rule"], "enum": sorted(rules)}
    config["properties"]["labels"]["additionalProperties"] = False  # names of another form
    config["properties"]["params"].pop("additionalProperties", None)
    config["allOf"] = [
        _params_of(name, made[rule.params_type, "validation"], bool(_required(rule.params_type)))
        for name, rule in sorted(rules.items())
    ]
    for action in _ACTIONS:
        definitions[action]["required"] = sorted({"kind", *definitions[action].get("required", ())})
    return {
        "$schema": DIALECT,
        **file,
        "title": "Watchstep rule file",
        "$defs": dict(sorted(definitions.items())),
    }


def schema_text() -> str:
    """The schema as it is published."""
    return json.dumps(rule_file_schema(), indent=1, ensure_ascii=False) + "\n"


def _params_of(rule: str, params: Any, needed: bool) -> dict[str, Any]:
    then: dict[str, Any] = {"properties": {"params": params}}
    if needed:
        then["required"] = ["params"]
    return {"if": {"properties": {"rule": {"const": rule}}, "required": ["rule"]}, "then": then}


def _required(params: Any) -> list[str]:
    return [name for name, field in params.model_fields.items() if field.is_required()]


def _name(reference: Any) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


_DICTIONARY = re.compile(r"a valid dictionary or (instance of \w+|object to extract fields from)")

MAX_BYTES = 1 << 20
"""Of a rule file."""


class Inhibition(BaseModel):
    """While the source's alert fires, the targets are quiet."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Name = Field(description="A rule config, or a rule.")
    target: tuple[Name, ...] = Field(min_length=1, description="Rule configs, or rules.")


class RuleFile(BaseModel):
    """A rule file's content. It has rules of its own, or those of the defaults or of a preset, or both."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={"anyOf": [{"required": [name]} for name in ("rules", "preset", "extends")]},
    )

    extends: Literal["defaults"] | None = Field(
        None,
        description="Begin with the default rules; one of the file's with the same name changes what it says of it.",
    )
    preset: str | None = Field(None, description="Begin with, or add, the rules of a preset, likewise.")
    rules: tuple[RuleConfig, ...] = Field((), description="The file's own rule configs.")
    inhibit: tuple[Inhibition, ...] = Field((), description="Which rules keep which others quiet.")

    @field_validator("preset")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is not None and value not in PRESETS:
            raise ValueError(f"no preset is named {value!r}: use one of {', '.join(sorted(PRESETS))}")
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> RuleFile:
        if not {"rules", "preset", "extends"} & self.model_fields_set:
            missing = InitErrorDetails(type="missing", loc=("rules",), input={})
            raise ValidationError.from_exception_data("RuleFile", [missing])
        wrong = [
            InitErrorDetails(
                type=PydanticCustomError("rule_file", "{text}", {"text": fault.text}),
                loc=fault.loc,
                input=None,
            )
            for fault in faults_between(self)
        ]
        if wrong:
            raise ValidationError.from_exception_data("RuleFile", wrong)
        return self

    @property
    def all_rules(self) -> tuple[RuleConfig, ...]:
        """Those of the defaults and the preset, changed by their namesakes in the file, then the file's others."""
        taken = {config.name: config for config in self._given()}
        for config in self.rules:
            taken[config.name] = _changed(taken.get(config.name), config)
        return tuple(self._inhibiting(config) for config in taken.values())

    def _given(self) -> Iterator[RuleConfig]:
        if self.extends:
            yield from DEFAULT_RULES
        if self.preset:
            yield from PRESETS[self.preset]

    def _inhibiting(self, config: RuleConfig) -> RuleConfig:
        targets = [name for one in self.inhibit if config.called(one.source) for name in one.target]
        if not targets:
            return config
        return config.model_copy(update={"inhibits": tuple(dict.fromkeys([*config.inhibits, *targets]))})


def _changed(given: RuleConfig | None, own: RuleConfig) -> RuleConfig:
    """A rule config of the defaults or a preset with what the file says of it; the rest of it stays."""
    if given is None or given.rule != own.rule:
        return own
    said = {name: getattr(own, name) for name in own.model_fields_set}
    return given.model_copy(update={**said, "params": {**given.params, **own.params}})


@dataclass(frozen=True)
class RuleFileProblem:
    """Something wrong with rule configs, and where in their data."""

    loc: Loc
    text: str

    @property
    def place(self) -> str:
        """The path in words."""
        return ".".join(str(part) for part in self.loc) or "rules"


def faults_between(file: RuleFile) -> list[RuleFileProblem]:
    """What is wrong with rule configs that are right each by itself: names that clash, inhibitions that cannot be."""
    names = [config.name for config in file.rules]
    faults = _clashes(names)
    configs = file.all_rules
    for place, config in enumerate(file.rules):
        for number, name in enumerate(config.inhibits):
            faults += _of_target(name, configs, ("rules", place, "inhibits", number))
    for place, one in enumerate(file.inhibit):
        sources = [config for config in configs if config.called(one.source)]
        if not sources:
            faults.append(
                RuleFileProblem(("inhibit", place, "source"), f"no rule config is named {one.source!r}")
            )
        elif any(config.implementation.clock for config in sources):
            text = f"{one.source} watches the clock, not steps, and cannot inhibit"
            faults.append(RuleFileProblem(("inhibit", place, "source"), text))
        elif notes := [config.name for config in sources if config.severity == "info"]:
            text = f"{', '.join(notes)} has severity info: notes inhibit nothing; use severity warning or critical"
            faults.append(RuleFileProblem(("inhibit", place, "source"), text))
        for number, name in enumerate(one.target):
            faults += _of_target(name, configs, ("inhibit", place, "target", number))
    for circle in circles(configs):
        text = (
            f"rules that inhibit each other in a circle: {', '.join(configs[place].name for place in circle)}"
        )
        where = [
            number for number, name in enumerate(names) if name in {configs[place].name for place in circle}
        ]
        faults.append(RuleFileProblem(("rules", where[0]) if where else ("inhibit",), text))
    return faults


def _of_target(name: str, configs: Sequence[RuleConfig], loc: Loc) -> list[RuleFileProblem]:
    targets = [config for config in configs if config.called(name)]
    if not targets and name in RULES:
        targets = [RuleConfig.model_construct(rule=name, name=name, params={})]
        rule = RULES[name]
        waits = rule.merge == "sealed" and not rule.clock
    else:
        waits = any(can_be_inhibited(config) for config in targets)
    if not targets:
        return [RuleFileProblem(loc, f"no rule config and no rule is named {name!r}")]
    if not waits:
        text = (
            f"{name} is judged as each worker's rows come, or by the clock, and cannot wait for another rule"
        )
        return [RuleFileProblem(loc, text)]
    return []


def validated(data: Any) -> tuple[RuleFile | None, list[RuleFileProblem]]:
    """A rule file of data, its queries checked; None, and all that is wrong with it, where it is not valid.

    Raises:
        BusyError: a query cannot be checked now.
    """
    if not isinstance(data, dict):
        return None, [RuleFileProblem((), "no mapping: start it with 'rules:' and a list below")]
    try:
        return RuleFile.model_validate(data, context=QUERIES_CHECKED), []
    except ValidationError as error:
        faults = [RuleFileProblem(found["loc"], in_words(found["msg"])) for found in error.errors()]
        return None, list(dict.fromkeys([*faults, *_clashes(_names(data))]))


def in_words(message: str) -> str:
    """A message of pydantic's in the words of YAML."""
    message = message.removeprefix("Value error, ").replace("a valid tuple", "a list")
    return _DICTIONARY.sub("a mapping", message)


def _names(data: dict[str, Any]) -> list[str]:
    """Names of rule configs of which some are not valid."""
    rules = data.get("rules")
    items = [item if isinstance(item, dict) else {} for item in (rules if isinstance(rules, list) else [])]
    return [str(item.get("name") or item.get("rule") or "") for item in items]


def _clashes(names: Sequence[str]) -> list[RuleFileProblem]:
    return [
        RuleFileProblem(("rules", place), f"two rule configs are named {name!r}: give one of them a 'name'")
        for place, name in enumerate(names)
        if name and name in names[:place]
    ]


def parse(text: str, source: str) -> tuple[RuleConfig, ...]:
    """Read rule configs from YAML.

    Args:
        text: the document.
        source: what to call it in an error.

    Raises:
        RuleError: it is no YAML, or not a list of valid rule configs; the message names line and place.
    """
    data, places = read(text, source)
    return _checked({"rules": []} if data is None else data, source, places)


def check(data: Any, source: str) -> tuple[RuleConfig, ...]:
    """Check rule configs that are data already.

    Raises:
        BusyError: a query cannot be checked now.
        RuleError: they are not valid; the message names the first place.
    """
    return _checked(data, source, None)


def read(text: str, source: str) -> tuple[Any, YamlNodes]:
    """A rule file's data, and where in the text it stands.

    Raises:
        RuleError: it is no YAML.
    """
    if len(text) > MAX_BYTES:
        raise RuleError(
            f"rule file {source}: {len(text)} characters, over the limit of {MAX_BYTES}", "split it"
        )
    try:
        return data_of(text), YamlNodes.of(text)
    except yaml.YAMLError as error:
        raise RuleError(
            f"rule file {source}: not valid YAML ({_place(error)})", "correct the line"
        ) from error
    except RecursionError:
        raise RuleError(
            f"rule file {source}: nested too deeply", "write rules as a list of mappings"
        ) from None


def _checked(data: Any, source: str, places: YamlNodes | None) -> tuple[RuleConfig, ...]:
    file, faults = validated(data)
    if file is not None:
        return file.all_rules
    first = faults[0]
    line = f"line {places.line(first.loc)}: " if places is not None else ""
    more = f" (and {len(faults) - 1} more: 'watchstep rules check' lists all)" if len(faults) > 1 else ""
    raise RuleError(
        f"rule file {source}: {line}{first.place}: {first.text}{more}",
        "see 'watchstep rules list' for rules and 'watchstep rules show NAME' for their parameters",
    )


def load(path: str | Path) -> tuple[RuleConfig, ...]:
    """Read a rule file.

    Raises:
        RuleError: it is missing, unreadable, or not valid.
    """
    with sources_from(Path(path).absolute().parent):
        return parse(text_of(path), str(path))


def text_of(path: str | Path) -> str:
    """A rule file's text.

    Raises:
        RuleError: it is missing, unreadable, or over `MAX_BYTES`.
    """
    try:
        with Path(path).open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise RuleError(f"rule file {path}: over the limit of {MAX_BYTES} bytes", "split it")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"rule file {path}: cannot be read ({error})", "check the path") from error


def load_as_data(path: str | Path) -> AskedRules:
    """Read a rule file for the SDK, which takes it as data: the entry point ``watchstep.rule_files``.

    Raises:
        RuleError: as `load`.
    """
    try:
        with no_programs(NOT_FROM_RECORDERS):
            configs = load(path)
            return AskedRules(tuple(config.as_data() for config in configs), element_probes(configs))
    finally:
        POOL.close()  # a training process evaluates no rule: what checked its queries would only take memory


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "syntax"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else str(problem)
