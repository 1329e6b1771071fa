"""Sweeps: the same rules with other values of a parameter, to compare which values fire in which runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from watchstep.errors import RuleError
from watchstep_rules.config.rule_config import MinimumDuration, RuleConfig
from watchstep_rules.custom.python_rule import PythonParams
from watchstep_rules.rule_files.rule_file import data_of

MOST_VARIATIONS = 200
"""Limit of variations in a grid; each one is evaluated over all rows."""

_VALUES = 7
_TWO_DECADES = 100.0
_HOLD = "for"
_LARGEST = 2**63


@dataclass(frozen=True)
class Setting:
    """A value of one parameter.

    Attributes:
        config: name of the rule config.
        parameter: parameter of its rule, of the class of a Python rule, or ``for``: the number of steps that a finding must last.
        value: the value.
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
        settings: settings in the order of the values, including the current value.
        current: the current value.
    """

    settings: tuple[Setting, ...]
    current: Any


@dataclass(frozen=True)
class Variation:
    """A set of rules with some parameters set.

    Attributes:
        settings: one setting of each sweep.
        current: whether all settings have their current values.
        configs: the rule configs to evaluate: those with a setting, and those that may inhibit them.
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

    A range over two decades or more is spaced geometrically, any other range evenly. The current value is always added.

    Args:
        text: the text of the command line option.
        configs: the rule configs.

    Raises:
        RuleError: no rule config or several have the parameter, or a value is not valid for it.
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
    """All combinations of the values of the sweeps; empty without a sweep.

    Raises:
        RuleError: there are more than `MOST_VARIATIONS`, or one parameter is swept twice.
    """
    if not sweeps:
        return []
    named = [(sweep.settings[0].config, sweep.settings[0].parameter) for sweep in sweeps]
    if len(set(named)) < len(named):
        raise RuleError(
            f"{named[0][0]}.{named[0][1]} is swept more than once", "give all values in one sweep"
        )
    number = math.prod(len(sweep.settings) for sweep in sweeps)
    if number > MOST_VARIATIONS:
        raise RuleError(
            f"sweeps: {number} combinations, over the limit of {MOST_VARIATIONS}",
            "give fewer values, or sweep one parameter at a time",
        )
    result = []
    for settings in itertools.product(*(sweep.settings for sweep in sweeps)):
        current = all(_same(s.value, sweep.current) for s, sweep in zip(settings, sweeps, strict=True))
        result.append(Variation(settings, current, _needed(_all_set(configs, settings), settings)))
    return result


def _find(name: str, configs: Sequence[RuleConfig]) -> tuple[RuleConfig, str]:
    head, _, parameter = name.rpartition(".")
    named = [config for config in configs if not head or config.name == head]
    if not named:
        names = ", ".join(config.name for config in configs)
        raise RuleError(f"sweep {name!r}: no rule config is named {head!r}", f"use one of {names}")
    matching = [config for config in named if parameter in _parameters(config)]
    if not matching:
        names = ", ".join(sorted({name for config in named for name in _parameters(config)}))
        raise RuleError(f"sweep {name!r}: no rule has a parameter {parameter!r}", f"use one of {names}")
    if len(matching) > 1:
        names = ", ".join(f"{config.name}.{parameter}" for config in matching)
        raise RuleError(f"sweep {name!r}: several rules have this parameter", f"use one of {names}")
    return matching[0], parameter


def _parameters(config: RuleConfig) -> list[str]:
    own = _of_class(config)
    return [*(config.implementation.params_type.model_fields if own is None else own), _HOLD]


def _of_class(config: RuleConfig) -> Mapping[str, Any] | None:
    """The parameters of the class of a Python rule, by their current values; None for other rules."""
    return config.parameters.about.params if isinstance(config.parameters, PythonParams) else None


def _current(config: RuleConfig, parameter: str) -> Any:
    if parameter == _HOLD:
        return config.hold.steps
    own = _of_class(config)
    return getattr(config.parameters, parameter) if own is None else own[parameter]


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
            f"sweep {text!r}: {values!r} is not a valid range",
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
    """A number, string or boolean, as in YAML; ``1e-6`` is a number too.

    Raises:
        RuleError: the text is none of these.
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
        f"sweep {sweep[:100]!r}: {text[:100]!r} is not a valid value",
        "give numbers, strings, true or false, separated by ','",
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
        if _of_class(config) is None:
            params = {**config.params, setting.parameter: setting.value}
        else:
            of_class = {**config.params.get("params", {}), setting.parameter: setting.value}
            params = {**config.params, "params": of_class}
        config.implementation.params_type.model_validate(params)
        return config.model_copy(update={"params": params})
    except ValidationError as error:
        raise RuleError(
            f"sweep: {setting} is not valid: {error.errors()[0]['msg']}", "give values that the rule accepts"
        ) from error


def _all_set(configs: Sequence[RuleConfig], settings: Sequence[Setting]) -> list[RuleConfig]:
    result = list(configs)
    for setting in settings:
        result = [_set(config, setting) if config.name == setting.config else config for config in result]
    return result


def _needed(configs: Sequence[RuleConfig], settings: Sequence[Setting]) -> tuple[RuleConfig, ...]:
    """The rule configs with a setting, and all that may inhibit them, directly or through others."""
    needed = {setting.config for setting in settings}
    while True:
        targets = [config for config in configs if config.name in needed]
        sources = {
            config.name
            for config in configs
            if any(target.matches_name(name) for target in targets for name in config.inhibits)
        }
        if sources <= needed:
            return tuple(config for config in configs if config.name in needed)
        needed |= sources
