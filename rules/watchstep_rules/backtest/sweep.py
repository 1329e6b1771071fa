"""Sweeps: the same rules with other values of a parameter, to see which value fires in which runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from watchstep.errors import RuleError
from watchstep_rules.config.rule_config import MinimumDuration, RuleConfig
from watchstep_rules.rule_files.yaml_source import data_of

MOST_VARIATIONS = 200
"""Of a grid; each is judged over all rows."""

_VALUES = 7
_TWO_DECADES = 100.0
_HOLD = "for"
_LARGEST = 2**63


@dataclass(frozen=True)
class Setting:
    """One parameter at one value.

    Attributes:
        config: name of the rule config.
        parameter: of its rule; ``for`` for the steps that a finding must last.
        value: what it is set to.
    """

    config: str
    parameter: str
    value: Any

    def __str__(self) -> str:
        shown = f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)
        return f"{self.config}.{self.parameter}={shown}"


@dataclass(frozen=True)
class Sweep:
    """One parameter at several values.

    Attributes:
        settings: in the order of the values; the present one is among them.
        current: the present value.
    """

    settings: tuple[Setting, ...]
    current: Any


@dataclass(frozen=True)
class Variation:
    """A set of rules with some parameters set.

    Attributes:
        settings: which, one of each sweep.
        current: all are as they are now.
        configs: the rule configs that are judged: those that are set, and those that may keep them quiet.
    """

    settings: tuple[Setting, ...]
    current: bool
    configs: tuple[RuleConfig, ...]

    @property
    def judged(self) -> frozenset[str]:
        """Names of the rule configs whose alerts count."""
        return frozenset(setting.config for setting in self.settings)


def parse_sweep(text: str, configs: Sequence[RuleConfig]) -> Sweep:
    """Read ``[config.]parameter=values``; values are ``a,b,c``, or a range ``from:to`` or ``from:to:number``.

    A range over two decades or more is spaced geometrically, another one evenly. The present value is added to what is
    asked for.

    Args:
        text: as on the command line.
        configs: the rule configs.

    Raises:
        RuleError: there is no such parameter, several rule configs have it, or a value cannot be used.
    """
    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise RuleError(f"sweep {text!r}: no values", "write PARAMETER=FROM:TO[:NUMBER] or PARAMETER=A,B,C")
    config, parameter = _find(name, configs)
    current = _current(config, parameter)
    wanted = _range(text, values) if ":" in values else [_scalar(text, part) for part in values.split(",")]
    if isinstance(current, int) and not isinstance(current, bool) and ":" in values:
        wanted = [round(value) for value in wanted]
    if not any(_same(value, current) for value in wanted):
        wanted.append(current)
    if all(isinstance(value, int | float) for value in wanted):
        wanted.sort()
    settings = tuple(Setting(config.name, parameter, value) for value in dict.fromkeys(wanted))
    for setting in settings:
        _set(config, setting)
    return Sweep(settings, current)


def variations(configs: Sequence[RuleConfig], sweeps: Sequence[Sweep]) -> list[Variation]:
    """All combinations of the values of some sweeps; none without a sweep.

    Raises:
        RuleError: there are more than `MOST_VARIATIONS`, or one parameter is swept twice.
    """
    if not sweeps:
        return []
    named = [(sweep.settings[0].config, sweep.settings[0].parameter) for sweep in sweeps]
    if len(set(named)) < len(named):
        raise RuleError(
            f"sweeps of {named[0][0]}.{named[0][1]}: one is enough", "give all values in one sweep"
        )
    number = math.prod(len(sweep.settings) for sweep in sweeps)
    if number > MOST_VARIATIONS:
        raise RuleError(
            f"sweeps: {number} combinations, {MOST_VARIATIONS} at the most",
            "give fewer values, or sweep one by one",
        )
    made = []
    for settings in itertools.product(*(sweep.settings for sweep in sweeps)):
        current = all(_same(s.value, sweep.current) for s, sweep in zip(settings, sweeps, strict=True))
        made.append(Variation(settings, current, _needed(_all_set(configs, settings), settings)))
    return made


def _find(name: str, configs: Sequence[RuleConfig]) -> tuple[RuleConfig, str]:
    head, _, parameter = name.rpartition(".")
    named = [config for config in configs if not head or config.name == head]
    if not named:
        known = ", ".join(config.name for config in configs)
        raise RuleError(f"sweep {name!r}: no rule config is named {head!r}", f"use one of {known}")
    found = [config for config in named if parameter in _parameters(config)]
    if not found:
        known = ", ".join(sorted({each for config in named for each in _parameters(config)}))
        raise RuleError(f"sweep {name!r}: there is no parameter {parameter!r}", f"use one of {known}")
    if len(found) > 1:
        several = ", ".join(f"{config.name}.{parameter}" for config in found)
        raise RuleError(f"sweep {name!r}: several rules have it", f"name one: {several}")
    return found[0], parameter


def _parameters(config: RuleConfig) -> list[str]:
    return [*config.implementation.params_type.model_fields, _HOLD]


def _current(config: RuleConfig, parameter: str) -> Any:
    return config.hold.steps if parameter == _HOLD else getattr(config.parameters, parameter)


def _range(text: str, values: str) -> list[Any]:
    parts = values.split(":")
    first, last, number = (
        _number(parts[0]),
        _number(parts[1]),
        _number(parts[2]) if len(parts) == 3 else _VALUES,
    )
    possible = len(parts) <= 3 and math.isfinite(first) and math.isfinite(last)
    if not possible or not 2 <= number <= MOST_VARIATIONS or number != int(number):
        raise RuleError(
            f"sweep {text!r}: {values!r} is no range",
            f"write FROM:TO or FROM:TO:NUMBER, with 2 to {MOST_VARIATIONS} values",
        )
    number = int(number)
    shares = [place / (number - 1) for place in range(number)]
    if min(first, last) > 0 and max(first, last) / min(first, last) >= _TWO_DECADES:
        spaced = [first * (last / first) ** share for share in shares]
    else:
        spaced = [first + (last - first) * share for share in shares]
    return [first, *(float(f"{value:.4g}") for value in spaced[1:-1]), last]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _scalar(sweep: str, text: str) -> Any:
    """A number, a word or a truth value, as in YAML; but ``1e-6`` is a number too.

    Raises:
        RuleError: it is none of them.
    """
    for read in (int, float, data_of):
        try:
            value = read(text)
        except (ValueError, yaml.YAMLError, RecursionError):
            continue
        if value is not None and not isinstance(value, str | int | float):
            break
        if isinstance(value, int) and abs(value) > _LARGEST:
            break
        return value
    raise RuleError(
        f"sweep {sweep[:100]!r}: {text[:100]!r} is no value",
        "give numbers, words or true and false, with ',' between them",
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-9)
    return bool(a == b)


def _set(config: RuleConfig, setting: Setting) -> RuleConfig:
    try:
        if setting.parameter == _HOLD:
            hold = MinimumDuration.model_validate({**config.hold.model_dump(), "steps": setting.value})
            return config.model_copy(update={"hold": hold})
        params = {**config.params, setting.parameter: setting.value}
        config.implementation.params_type.model_validate(params)
        return config.model_copy(update={"params": params})
    except ValidationError as error:
        raise RuleError(
            f"sweep: {setting} cannot be: {error.errors()[0]['msg']}", "give values that the rule takes"
        ) from error


def _all_set(configs: Sequence[RuleConfig], settings: Sequence[Setting]) -> list[RuleConfig]:
    made = list(configs)
    for setting in settings:
        made = [_set(config, setting) if config.name == setting.config else config for config in made]
    return made


def _needed(configs: Sequence[RuleConfig], settings: Sequence[Setting]) -> tuple[RuleConfig, ...]:
    """Those that are set, and all that may keep them quiet, through others too."""
    needed = {setting.config for setting in settings}
    while True:
        targets = [config for config in configs if config.name in needed]
        sources = {
            config.name
            for config in configs
            if any(target.called(name) for target in targets for name in config.inhibits)
        }
        if sources <= needed:
            return tuple(config for config in configs if config.name in needed)
        needed |= sources
