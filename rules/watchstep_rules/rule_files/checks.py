"""A rule file looked over: all that is wrong with it, and what is allowed and probably not meant."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from watchstep.capture.config import PROBES, CaptureConfig
from watchstep.format.tensors import SYSTEM
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.python_rule import sources_from
from watchstep_rules.rule_files.rule_file import RuleFile, read, validated
from watchstep_rules.rule_files.yaml_source import Loc
from watchstep_rules.signals import tensor_selection

MANY_STEPS = 10_000
"""``for`` this many judged steps outlasts most runs: layers are measured at one step in five to twenty."""

LONG_SECONDS = 86_400

_ANCHOR_INSIDE = re.compile(r"(?:[^|(\\^\[:!=]|\\.)\^|(?<!\\)\$(?![|)]|$)")
_CLASS = re.compile(r"\[\^?\]?[^\]]*\]")


@dataclass(frozen=True)
class Remark:
    """Something to say of a rule file.

    Attributes:
        level: an error keeps the file from being used.
        line: in the file, from 1 on.
        place: the path into its data.
        text: what it is.
    """

    level: Literal["error", "warning"]
    line: int
    place: str
    text: str


@dataclass(frozen=True)
class CheckResult:
    """What a check found.

    Attributes:
        remarks: by line, errors first within one.
        configs: what the file comes to, where nothing is wrong with it.
    """

    remarks: list[Remark]
    configs: tuple[RuleConfig, ...]

    @property
    def ok(self) -> bool:
        """Whether the file can be used."""
        return all(remark.level != "error" for remark in self.remarks)


def check_text(text: str, source: str, folder: Path) -> CheckResult:
    """Look a rule file over.

    Args:
        text: the document.
        source: what to call it.
        folder: where the files lie that it names.

    Raises:
        RuleError: it is no YAML.
    """
    data, places = read(text, source)
    data = {"rules": []} if data is None else data
    remarks = [
        Remark("error", line, key, f"{key!r} stands here a second time, and only the last would count")
        for key, line in places.twice()
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
                    f"{name} is not among the rules of this file: nothing is inhibited",
                )


def _of_scope(config: RuleConfig, where: Loc) -> Iterator[_Warning]:
    scope = config.tensors
    if scope.exclude is not None and tensor_selection.matches(scope.exclude, ""):
        yield (*where, "tensors", "exclude"), f"{scope.exclude!r} matches every name: nothing is judged"
    if scope.include is not None:
        if _ANCHOR_INSIDE.search(_CLASS.sub("x", scope.include)):
            yield (
                (*where, "tensors", "include"),
                f"{scope.include!r} has '^' or '$' in its middle, where no name can match it: nothing is judged",
            )
        elif scope.include != scope.include.strip():
            yield (
                (*where, "tensors", "include"),
                f"{scope.include!r} begins or ends with a space, which no name does: nothing is judged",
            )


def _of_timing(config: RuleConfig, where: Loc) -> Iterator[_Warning]:
    for name, lasting in (("for", config.hold), ("keep_firing", config.keep_firing)):
        if lasting is None:
            continue
        if lasting.steps > MANY_STEPS:
            yield (*where, name, "steps"), f"{lasting.steps} judged steps are more than most runs have"
        if lasting.seconds > LONG_SECONDS:
            yield (*where, name, "seconds"), f"{lasting.seconds:g} s is more than a day"
    if config.implementation.clock and config.hold.steps > 1:
        yield (
            (*where, "for", "steps"),
            f"{config.rule} watches the clock: steps do not count for it, seconds do",
        )


def _of_actions(config: RuleConfig, where: Loc) -> Iterator[_Warning]:
    stops = any(action.kind == "stop" for action in config.actions)
    if stops and config.implementation.clock:
        yield (
            (*where, "actions"),
            f"{config.rule} stops a job that makes no steps: only its backend can do so",
        )
    kinds = [action.model_dump_json() for action in config.actions]
    for number, kind in enumerate(kinds):
        if kind in kinds[:number]:
            yield (*where, "actions", number), "the same action stands here twice"


def _of_capture(config: RuleConfig, where: Loc) -> Iterator[_Warning]:
    """What a rule needs that a recorder does not give unless it is told to."""
    usual = CaptureConfig()
    needs = config.implementation.needed(config.parameters)
    chosen = (config.tensors.collection,) if config.tensors.collection else needs.collections
    if chosen and not set(chosen) & {*usual.collections, SYSTEM}:
        place = (*where, "tensors", "collection") if config.tensors.collection else (*where, "rule")
        yield place, f"it judges {' and '.join(chosen)}, which recorders take only where they are told to"
    missing = sorted(set(needs.probes) & set(PROBES) - set(usual.probes))
    if missing:
        yield (
            (*where, "rule"),
            f"it needs {', '.join(missing)}, which recorders take only where they are told to",
        )


def _of_copies(config: RuleConfig, before: Sequence[RuleConfig], where: Loc) -> Iterator[_Warning]:
    def judged(one: RuleConfig) -> tuple[object, ...]:
        return (one.rule, one.parameters, one.tensors, one.timing)

    for other in before:
        if judged(other) == judged(config):
            yield (*where, "rule"), f"it judges just as {other.name} does: their alerts come together"
            return
