"""Checks of a rule file, or of one rule config: all errors, and warnings about valid settings that are probably mistakes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from watchstep.capture.config import PROBES, CaptureConfig
from watchstep.format.tensors import SYSTEM
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.python_rule import sources_from
from watchstep_rules.rule_files.rule_file import Loc, RuleFile, YamlNodes, data_of, read, validated
from watchstep_rules.signals import tensor_selection

MANY_STEPS = 10_000
"""More judged steps than most runs have: layers are measured at one step in five to twenty."""

LONG_SECONDS = 86_400

_ANCHOR_INSIDE = re.compile(r"(?:[^|(\\^\[:!=]|\\.)\^|(?<!\\)\$(?![|)]|$)")
_CLASS = re.compile(r"\[\^?\]?[^\]]*\]")


@dataclass(frozen=True)
class Remark:
    """An error or warning about a rule file.

    Attributes:
        level: ``error`` if the file cannot be used.
        line: the line in the file, from 1.
        place: the path in its data.
        text: the message.
    """

    level: Literal["error", "warning"]
    line: int
    place: str
    text: str


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Attributes:
        remarks: errors and warnings by line, errors first within a line.
        configs: the rule configs of the file; empty if it has errors.
    """

    remarks: list[Remark]
    configs: tuple[RuleConfig, ...]

    @property
    def ok(self) -> bool:
        """Whether the file can be used."""
        return all(remark.level != "error" for remark in self.remarks)


def check_text(text: str, source: str, folder: Path) -> CheckResult:
    """Check a rule file.

    Args:
        text: the text of the file.
        source: its name in messages.
        folder: the folder of the files that it refers to.

    Raises:
        RuleError: the text is not valid YAML.
    """
    data, places = read(text, source)
    data = {"rules": []} if data is None else data
    remarks = [
        Remark("error", line, key, f"duplicate key {key!r}: only the last one would count")
        for key, line in places.duplicates()
    ]
    with sources_from(folder):
        file, faults = validated(data)
    remarks += [Remark("error", places.line(fault.loc), fault.place, fault.text) for fault in faults]
    if file is not None:
        for loc, warning in _warnings(file):
            place = ".".join(map(str, loc))
            remarks.append(Remark("warning", places.line(loc), place, warning))
    remarks.sort(key=lambda remark: (remark.line, remark.level))
    return CheckResult(remarks, file.all_rules if file is not None else ())


@dataclass(frozen=True)
class ConfigCheck:
    """The result of a check of one rule config.

    Attributes:
        data: the data of the text; None if it is not a mapping.
        config: the rule config; None if there are errors.
        remarks: errors and warnings by line; their places are paths in the rule config, empty for the whole.
    """

    data: dict[str, Any] | None
    config: RuleConfig | None
    remarks: list[Remark]


def check_config_text(text: str, name: str = "") -> ConfigCheck:
    """Check the text of one rule config: YAML, or JSON. It is checked as the only one of a rule file.

    Args:
        text: the text.
        name: the name that the rule config is stored with; empty for any.

    Raises:
        BusyError: a query cannot be checked now.
    """
    try:
        data, places = data_of(text), YamlNodes.of(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "syntax"
        column = "" if mark is None else f" at column {mark.column + 1}"
        line = 1 if mark is None else mark.line + 1
        return ConfigCheck(None, None, [Remark("error", line, "", f"not valid YAML{column}: {problem}")])
    except RecursionError:
        return ConfigCheck(None, None, [Remark("error", 1, "", "nested too deeply")])
    if not isinstance(data, dict):
        problem = "not a mapping: start with 'rule:' and the name of a rule"
        return ConfigCheck(None, None, [Remark("error", 1, "", problem)])
    named = data if not name or "name" in data else {**data, "name": name}
    file, faults = validated({"rules": [named]})
    remarks = [
        Remark("error", line, key, f"duplicate key {key!r}: only the last one would count")
        for key, line in places.duplicates()
    ]
    remarks += [_of_config("error", places, fault.loc, fault.text) for fault in faults]
    if name and str(named.get("name")) != name:
        remarks.append(_of_config("error", places, (*_ONLY, "name"), f"must be {name!r}, or left out"))
    if file is not None:
        remarks += [
            _of_config("warning", places, loc, warning)
            for loc, warning in _warnings(file)
            if "inhibits" not in loc  # it may name rule configs elsewhere
        ]
    remarks.sort(key=lambda remark: (remark.line, remark.level))
    invalid = file is None or any(remark.level == "error" for remark in remarks)
    return ConfigCheck(data, None if invalid or file is None else file.all_rules[0], remarks)


_ONLY: Loc = ("rules", 0)


def _of_config(level: Literal["error", "warning"], places: YamlNodes, loc: Loc, text: str) -> Remark:
    path = loc[len(_ONLY) :]
    return Remark(level, places.line(path), ".".join(map(str, path)), text)


_Warning = tuple[Loc, str]


def _warnings(file: RuleFile) -> Iterator[_Warning]:
    names = [name for config in file.all_rules for name in (config.name, config.rule)]
    for place, config in enumerate(file.rules):
        where: Loc = ("rules", place)
        yield from _of_scope(config, where)
        yield from _of_timing(config, where)
        yield from _of_actions(config, where)
        yield from _of_capture(config, where)
        yield from _of_copies(config, file.rules[:place], where)
        for number, name in enumerate(config.inhibits):
            if name not in names:
                yield (
                    (*where, "inhibits", number),
                    f"{name} is not a rule of this file: nothing is inhibited",
                )


def _of_scope(config: RuleConfig, where: Loc) -> Iterator[_Warning]:
    scope = config.tensors
    if scope.exclude is not None and tensor_selection.matches(scope.exclude, ""):
        yield (*where, "tensors", "exclude"), f"{scope.exclude!r} matches every name: nothing is judged"
    if scope.include is not None:
        if _ANCHOR_INSIDE.search(_CLASS.sub("x", scope.include)):
            yield (
                (*where, "tensors", "include"),
                f"{scope.include!r} has '^' or '$' in the middle, which no name can match: nothing is judged",
            )
        elif scope.include != scope.include.strip():
            yield (
                (*where, "tensors", "include"),
                f"{scope.include!r} begins or ends with a space, which no name has: nothing is judged",
            )


def _of_timing(config: RuleConfig, where: Loc) -> Iterator[_Warning]:
    for name, duration in (("for", config.hold), ("keep_firing", config.keep_firing)):
        if duration is None:
            continue
        if duration.steps > MANY_STEPS:
            yield (*where, name, "steps"), f"{duration.steps} judged steps are more than most runs have"
        if duration.seconds > LONG_SECONDS:
            yield (*where, name, "seconds"), f"{duration.seconds:g} s is more than a day"
    if config.implementation.clock and config.hold.steps > 1:
        yield (
            (*where, "for", "steps"),
            f"{config.rule} watches the clock: use seconds instead of steps",
        )


def _of_actions(config: RuleConfig, where: Loc) -> Iterator[_Warning]:
    stops = any(action.kind == "stop" for action in config.actions)
    if stops and config.implementation.clock:
        yield (
            (*where, "actions"),
            f"{config.rule} stops a job that makes no steps: only its backend can stop it",
        )
    kinds = [action.model_dump_json() for action in config.actions]
    for number, kind in enumerate(kinds):
        if kind in kinds[:number]:
            yield (*where, "actions", number), "duplicate action"


def _of_capture(config: RuleConfig, where: Loc) -> Iterator[_Warning]:
    """Collections and probes that a rule needs and recorders do not record by default."""
    defaults = CaptureConfig()
    needs = config.implementation.needed(config.parameters)
    chosen = (config.tensors.collection,) if config.tensors.collection else needs.collections
    if chosen and not set(chosen) & {*defaults.collections, SYSTEM}:
        place = (*where, "tensors", "collection") if config.tensors.collection else (*where, "rule")
        yield place, f"it judges {' and '.join(chosen)}, which recorders do not record by default"
    missing = sorted(set(needs.probes) & set(PROBES) - set(defaults.probes))
    if missing:
        yield (
            (*where, "rule"),
            f"it needs {', '.join(missing)}, which recorders do not record by default",
        )


def _of_copies(config: RuleConfig, before: Sequence[RuleConfig], where: Loc) -> Iterator[_Warning]:
    def judged(rule_config: RuleConfig) -> tuple[object, ...]:
        return (rule_config.rule, rule_config.parameters, rule_config.tensors, rule_config.timing)

    for other in before:
        if judged(other) == judged(config):
            yield (*where, "rule"), f"it is equal to {other.name}: both fire at the same time"
            return
