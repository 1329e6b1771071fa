"""The arguments of `watchstep.Hook`: their checks, their values from the environment, and rule files and guards.

Rule files and guards belong to the rules package, which is found by entry point.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from watchstep.capture.config import CaptureConfig
from watchstep.errors import ConfigError
from watchstep.stopping import FIRST_STEP, AwaitsCheckpoint, Noted, OnStop, SavesThenStops

BUDGET = "WATCHSTEP_OVERHEAD_BUDGET"
PROBES = "WATCHSTEP_PROBES"
"""Probes that the rules of a launcher need, separated by spaces."""

ON_STOP = "WATCHSTEP_ON_STOP"
ON_STOP_WORDS = ("ignore", "raise", "stop", "checkpoint")
"""What a launcher can say of a stop; "stop" is another word for "raise"."""


def on_stop_from_environment() -> str:
    """What the environment says a stop does; empty where it says nothing; raises `ConfigError`."""
    setting = os.environ.get(ON_STOP, "")
    if setting and setting not in ON_STOP_WORDS:
        raise ConfigError(f"{ON_STOP}={setting!r}", f"use {', '.join(ON_STOP_WORDS)}")
    return setting


def checked_on_stop(on_stop: Any, checkpoint_seconds: float) -> OnStop:
    """What a stop does, by the program or else by the environment, if it is something that a hook can do; raises `ConfigError`.

    Where the environment says "checkpoint", a program's function saves one, and the training ends then; without a function it ends
    once the program has noted one that it saved, or after `checkpoint_seconds`.
    """
    setting = on_stop_from_environment()
    if on_stop is None:
        if setting == "checkpoint":
            return AwaitsCheckpoint(checkpoint_seconds)
        return "raise" if setting in {"stop", "raise"} else "ignore"
    if callable(on_stop):
        ends = setting == "checkpoint" and not isinstance(on_stop, Noted)
        return SavesThenStops(on_stop) if ends else on_stop
    if on_stop in {"ignore", "check", "raise"}:
        return on_stop  # type: ignore[no-any-return]
    raise ConfigError(f"on_stop={on_stop!r}", 'use "ignore", "check", "raise" or a function')


def first_step_of(step: Any) -> int:
    """The number of the first step, by the program or else by the environment; raises `ConfigError`."""
    if step is not None:
        return checked_step(step)
    text = os.environ.get(FIRST_STEP, "") or "0"
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(
            f"{FIRST_STEP}={text!r}: no number", "unset it, or set the number of the first step"
        )
    return checked_step(int(text))


def checked_step(step: Any) -> int:
    """A step's number, if it is one; raises `ConfigError`."""
    if type(step) is not int or not 0 <= step < 2**62:
        raise ConfigError(f"first_step={step!r}", "use the number of the step that comes next, from 0")
    return step


def loss_divisor_of(divisor: Any) -> Callable[[], float]:
    """What gives the number that a program divides its losses by; raises `ConfigError`."""
    if callable(divisor):
        return lambda: float(divisor())
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not 0 < divisor < math.inf:
        raise ConfigError(f"loss_divisor={divisor!r}", "use a number above 0, as the number of micro-batches")
    number = float(divisor)
    return lambda: number


def budgeted(config: CaptureConfig | None, budget: float | None) -> CaptureConfig:
    """The configuration with the budget that an argument or the environment gives it; raises `ConfigError`."""
    settings = config or CaptureConfig()
    if budget is not None:
        return replace(settings, overhead_budget=budget)
    text = os.environ.get(BUDGET, "")
    if config is not None or not text:
        return settings
    try:
        return replace(settings, overhead_budget=None if text == "none" else float(text))
    except ValueError:
        raise ConfigError(f"{BUDGET}={text!r}: no number", 'set a share such as 0.01, or "none"') from None


def probing(config: CaptureConfig, probes: Iterable[str]) -> CaptureConfig:
    """The configuration with what rules need measured besides, those of the environment included; raises `ConfigError`."""
    wanted = (*config.probes, *probes, *os.environ.get(PROBES, "").split())
    return replace(config, probes=tuple(dict.fromkeys(wanted)))


_RULE_FILES = "watchstep.rule_files"
_GUARDS = "watchstep.guards"


class AskedRules(NamedTuple):
    """A rule file as a recorder takes it.

    Attributes:
        configs: the rule configs, as data.
        probes: what they need to be measured besides, as `CaptureConfig.probes` takes it.
    """

    configs: tuple[dict[str, Any], ...] = ()
    probes: tuple[str, ...] = ()


def load_rule_file(path: str | os.PathLike[str]) -> AskedRules:
    """Read a rule file.

    Raises:
        RuleError: it is missing or not valid.
        ConfigError: the rules package, or what it needs, is not installed.
    """
    for entry in entry_points(group=_RULE_FILES):
        try:
            read = entry.load()
        except ImportError as error:
            raise ConfigError(
                f"rule file {os.fspath(path)}: {error}", "pip install 'watchstep[rules]'"
            ) from error
        rules: AskedRules = read(path)
        return rules
    raise ConfigError(
        f"rule file {os.fspath(path)}: no reader is installed", "pip install 'watchstep[rules]'"
    )


def make_guard(rules: Any) -> Any:
    """A guard.

    Args:
        rules: a rule file; True for the default rules; or a guard, which is given back.

    Raises:
        RuleError: the rule file is missing or not valid.
        ConfigError: the rules package, or what it needs, is not installed; or this is none of these.
    """
    if hasattr(rules, "before_update") and hasattr(rules, "attach"):
        return rules
    if rules is not True and not isinstance(rules, str | os.PathLike):
        raise ConfigError(f"guard={rules!r}", "give a rule file, True for the default rules, or a Guard")
    for entry in entry_points(group=_GUARDS):
        try:
            build = entry.load()
        except ImportError as error:
            raise ConfigError(f"guard: {error}", "pip install 'watchstep[rules]'") from error
        return build(None if rules is True else rules)
    raise ConfigError("guard: no rules are installed", "pip install 'watchstep[rules]'")
