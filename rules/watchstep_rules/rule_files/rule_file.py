"""Rule files: a YAML document with rule configs under ``rules``, on top of the defaults or a preset, and its JSON schema for editors.

YAML from untrusted sources as plain data: errors name their line, and aliases cannot make a short text large.
"""

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
from watchstep.format.yaml_aliases import check_aliases
from watchstep.hook_arguments import RequestedRules
from watchstep_rules.config.attached import capture_needs
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import Name, RuleConfig
from watchstep_rules.custom.python_rule import NOT_FROM_RECORDERS, no_programs, sources_from
from watchstep_rules.custom.sandbox.pool import POOL
from watchstep_rules.custom.sql.rule import QUERIES_CHECKED
from watchstep_rules.engine.inhibition import can_be_inhibited, cycles
from watchstep_rules.registry import KINDS, RULES
from watchstep_rules.rule_files.presets import PRESETS

Loc = tuple[str | int, ...]
"""A path in data: keys of mappings and indices of lists."""


@dataclass(frozen=True)
class YamlNodes:
    """The nodes of a document; ``root`` is None for an empty document."""

    root: yaml.Node | None

    @classmethod
    def of(cls, text: str) -> YamlNodes:
        """The nodes of a text.

        Raises:
            yaml.YAMLError, RecursionError: as for `nodes_of`.
        """
        return cls(nodes_of(text))

    def line(self, loc: Sequence[str | int]) -> int:
        """The line, from 1, of the value at a path, or of its last existing parent."""
        node, line = self.root, 1 if self.root is None else self.root.start_mark.line + 1
        for part in loc:
            if isinstance(node, yaml.MappingNode):
                entries = [(key, value) for key, value in node.value if key.value == str(part)]
                if entries:
                    key, node = entries[-1]
                    line = key.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                node = node.value[part]
                line = node.start_mark.line + 1
        return line

    def duplicates(self) -> list[tuple[str, int]]:
        """Duplicate keys of mappings, of which YAML uses the last, with the line of the second."""
        duplicates, seen = [], set()
        waiting = [self.root] if self.root is not None else []
        while waiting:
            node = waiting.pop()
            if id(node) in seen or not isinstance(node, yaml.CollectionNode):
                continue
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                waiting += node.value
                continue
            keys: set[str] = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in keys:
                    duplicates.append((key.value, key.start_mark.line + 1))
                keys.add(str(key.value))
                waiting.append(value)
        return sorted(duplicates, key=lambda place: place[1])


_LONGEST_NUMBER = 1000
"""Limit of characters in a number, because parsing time grows with their square."""

_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})
_FAULTS = (ValueError, KeyError, IndexError, AttributeError, TypeError, ArithmeticError)
"""Exceptions of PyYAML's constructors for text that does not match its tag."""


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        name = node.tag.rpartition(":")[2]
        if node.tag in _NUMBERS and len(node.value) > _LONGEST_NUMBER:
            problem = f"a number of {len(node.value)} characters, over the limit of {_LONGEST_NUMBER}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep=deep)
        except _FAULTS as error:
            shown = f"{node.value[:100]!r}" if isinstance(node, yaml.ScalarNode) else "this"
            problem = f"{shown} is not a valid {name}; put it in quotes if it is a string"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def nodes_of(text: str) -> yaml.Node | None:
    """The root node of a document; None if it is empty.

    Raises:
        yaml.YAMLError: the text is not valid YAML, or its aliases expand to too many nodes (`check_aliases`).
        RecursionError: the document is nested too deeply.
    """
    root: yaml.Node | None = yaml.compose(text, Loader=_Loader)
    if root is not None:
        check_aliases(root)
    return root


def data_of(text: str) -> Any:
    """The data of a document.

    Raises:
        yaml.YAMLError: as for `nodes_of`, or a value does not match its tag.
        RecursionError: the document is nested too deeply.
    """
    root = nodes_of(text)
    if root is None:
        return None
    loader = _Loader("")
    try:
        return loader.construct_document(root)
    finally:
        loader.dispose()


DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ACTIONS = ("StopAction", "SnapshotAction", "WebhookAction", "NotifyAction")


def rule_file_schema() -> dict[str, Any]:
    """The JSON schema of a rule file, draft 2020-12.

    A schema cannot express conditions between parts of the file, such as duplicate names; ``watchstep rules check`` checks them.
    """
    rules = {**RULES, **KINDS}
    params = [rule.params_type for rule in rules.values()]
    wanted: list[Any] = [(RuleFile, "validation"), *((kind, "validation") for kind in dict.fromkeys(params))]
    references, schema = models_json_schema(wanted, by_alias=True)
    definitions = schema["$defs"]
    file = definitions.pop(_name(references[RuleFile, "validation"]))
    file["properties"]["preset"]["anyOf"][0]["enum"] = sorted(PRESETS)
    config = definitions["RuleConfig"]
    config["properties"]["rule"] = {**config["properties"]["rule"], "enum": sorted(rules)}
    config["properties"]["labels"]["additionalProperties"] = False  # names must match the pattern
    config["properties"]["params"].pop("additionalProperties", None)
    config["allOf"] = [
        _params_of(name, references[rule.params_type, "validation"], bool(_required(rule.params_type)))
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
    """The text of the published schema."""
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
"""Limit of bytes in a rule file."""


class Inhibition(BaseModel):
    """While the alert of the source fires, the targets are inhibited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Name = Field(description="A rule config, or a rule.")
    target: tuple[Name, ...] = Field(min_length=1, description="Rule configs, or rules.")


class RuleFile(BaseModel):
    """The content of a rule file: its own rules, the default rules or those of a preset, or a combination."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={"anyOf": [{"required": [name]} for name in ("rules", "preset", "extends")]},
    )

    extends: Literal["defaults"] | None = Field(
        None,
        description="Include the default rules. A rule config of the file with the same name overrides the fields that it sets.",
    )
    preset: str | None = Field(None, description="Include the rules of a preset, with the same overrides.")
    rules: tuple[RuleConfig, ...] = Field((), description="The rule configs of the file.")
    inhibit: tuple[Inhibition, ...] = Field((), description="Which rules inhibit which others.")

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
        """The default and preset rule configs with the overrides of the file, then the other rule configs of the file."""
        by_name = {config.name: config for config in self._included()}
        for config in self.rules:
            by_name[config.name] = _overridden(by_name.get(config.name), config)
        return tuple(self._inhibiting(config) for config in by_name.values())

    def _included(self) -> Iterator[RuleConfig]:
        if self.extends:
            yield from DEFAULT_RULES
        if self.preset:
            yield from PRESETS[self.preset]

    def _inhibiting(self, config: RuleConfig) -> RuleConfig:
        targets = [
            name
            for inhibition in self.inhibit
            if config.matches_name(inhibition.source)
            for name in inhibition.target
        ]
        if not targets:
            return config
        return config.model_copy(update={"inhibits": tuple(dict.fromkeys([*config.inhibits, *targets]))})


def _overridden(included: RuleConfig | None, own: RuleConfig) -> RuleConfig:
    """A default or preset rule config with the fields that the file sets."""
    if included is None or included.rule != own.rule:
        return own
    overrides = {name: getattr(own, name) for name in own.model_fields_set}
    return included.model_copy(update={**overrides, "params": {**included.params, **own.params}})


@dataclass(frozen=True)
class RuleFileProblem:
    """An error in rule configs, and its path in their data."""

    loc: Loc
    text: str

    @property
    def place(self) -> str:
        """The path as text."""
        return ".".join(str(part) for part in self.loc) or "rules"


def faults_between(file: RuleFile) -> list[RuleFileProblem]:
    """Errors between rule configs that are valid by themselves: duplicate names and invalid inhibitions."""
    names = [config.name for config in file.rules]
    faults = _clashes(names)
    configs = file.all_rules
    for place, config in enumerate(file.rules):
        for number, name in enumerate(config.inhibits):
            faults += _of_target(name, configs, ("rules", place, "inhibits", number))
    for place, inhibition in enumerate(file.inhibit):
        source = inhibition.source
        sources = [config for config in configs if config.matches_name(source)]
        if not sources:
            faults.append(
                RuleFileProblem(("inhibit", place, "source"), f"no rule config is named {source!r}")
            )
        elif any(config.implementation.clock for config in sources):
            text = f"{source} watches the clock, not steps, and cannot inhibit"
            faults.append(RuleFileProblem(("inhibit", place, "source"), text))
        elif notes := [config.name for config in sources if config.severity == "info"]:
            text = f"{', '.join(notes)} has severity info: notes inhibit nothing; use severity warning or critical"
            faults.append(RuleFileProblem(("inhibit", place, "source"), text))
        for number, name in enumerate(inhibition.target):
            faults += _of_target(name, configs, ("inhibit", place, "target", number))
    for cycle in cycles(configs):
        members = [configs[place].name for place in cycle]
        text = f"rules inhibit each other in a cycle: {', '.join(members)}"
        where = [number for number, name in enumerate(names) if name in members]
        faults.append(RuleFileProblem(("rules", where[0]) if where else ("inhibit",), text))
    return faults


def _of_target(name: str, configs: Sequence[RuleConfig], loc: Loc) -> list[RuleFileProblem]:
    targets = [config for config in configs if config.matches_name(name)]
    if not targets:  # it may be configured elsewhere: a rule of a project applies beside the owner's
        targets = [config for config in DEFAULT_RULES if config.matches_name(name)]
    if not targets and name in RULES:
        targets = [RuleConfig.model_construct(rule=name, name=name, params={})]
        rule = RULES[name]
        waits = rule.merge == "watermark" and not rule.clock
    else:
        waits = any(can_be_inhibited(config) for config in targets)
    if not targets:
        return [RuleFileProblem(loc, f"no rule config and no rule is named {name!r}")]
    if not waits:
        text = f"{name} is evaluated as the rows of each worker arrive, or by the clock, and cannot be inhibited by another rule"
        return [RuleFileProblem(loc, text)]
    return []


def validated(data: Any) -> tuple[RuleFile | None, list[RuleFileProblem]]:
    """Validate the data of a rule file, including its queries. Returns the rule file, or None and all errors.

    Raises:
        BusyError: a query cannot be checked now.
    """
    if not isinstance(data, dict):
        return None, [RuleFileProblem((), "not a mapping: start with 'rules:' and a list below it")]
    try:
        return RuleFile.model_validate(data, context=QUERIES_CHECKED), []
    except ValidationError as error:
        faults = [RuleFileProblem(fault["loc"], in_words(fault["msg"])) for fault in error.errors()]
        return None, list(dict.fromkeys([*faults, *_clashes(_names(data))]))


def in_words(message: str) -> str:
    """A message of pydantic with the terms of YAML."""
    message = message.removeprefix("Value error, ").replace("a valid tuple", "a list")
    return _DICTIONARY.sub("a mapping", message)


def _names(data: dict[str, Any]) -> list[str]:
    """The names of rule configs, some of which may not be valid."""
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
        text: the text of the file.
        source: its name in error messages.

    Raises:
        RuleError: the text is not valid YAML or not a valid rule file; the message names the line and the field.
    """
    data, places = read(text, source)
    return _checked({"rules": []} if data is None else data, source, places)


def check(data: Any, source: str) -> tuple[RuleConfig, ...]:
    """Check the data of a rule file.

    Raises:
        BusyError: a query cannot be checked now.
        RuleError: the data are not valid; the message names the first invalid field.
    """
    return _checked(data, source, None)


def read(text: str, source: str) -> tuple[Any, YamlNodes]:
    """The data of a rule file, and its nodes with their lines.

    Raises:
        RuleError: the text is not valid YAML.
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
        RuleError: the file is missing, unreadable, or not valid.
    """
    with sources_from(Path(path).absolute().parent):
        return parse(text_of(path), str(path))


def text_of(path: str | Path) -> str:
    """The text of a rule file.

    Raises:
        RuleError: the file is missing, unreadable, or over `MAX_BYTES`.
    """
    try:
        with Path(path).open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise RuleError(f"rule file {path}: over the limit of {MAX_BYTES} bytes", "split it")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"rule file {path}: cannot be read ({error})", "check the path") from error


def load_as_data(path: str | Path) -> RequestedRules:
    """Read a rule file as data for the SDK; the entry point ``watchstep.rule_files``.

    Raises:
        RuleError: as for `load`.
    """
    try:
        with no_programs(NOT_FROM_RECORDERS):
            configs = load(path)
            return RequestedRules(tuple(config.as_data() for config in configs), capture_needs(configs))
    finally:
        POOL.close()  # a training process evaluates no rules, so the processes that checked its queries only take memory


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "syntax"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else str(problem)
