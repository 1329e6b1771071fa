"""What a hook is given, held against what it can take."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from watchstep.capture.config import CaptureConfig
from watchstep.errors import ConfigError
from watchstep.stopping import FIRST_STEP, AwaitsCheckpoint, Noted, OnStop, SavesThenStops

BUDGET = "WATCHSTEP_OVERHEAD_BUDGET"
PROBES = "WATCHSTEP_PROBES"
"""Probes that the rules of a launcher need, separated by spaces."""

ON_STOP = "WATCHSTEP_ON_STOP"
ON_STOP_WORDS = ("ignore", "raise", "stop", "checkpoint")
"""What a launcher can say of a stop; "stop" is another word for "raise"."""


def said_of_stops() -> str:
    """What the environment says a stop does; empty where it says nothing; raises `ConfigError`."""
    said = os.environ.get(ON_STOP, "")
    if said and said not in ON_STOP_WORDS:
        raise ConfigError(f"{ON_STOP}={said!r}", f"use {', '.join(ON_STOP_WORDS)}")
    return said


def checked_on_stop(on_stop: Any, checkpoint_seconds: float) -> OnStop:
    """What a stop does, by the program or else by the environment, if it is something that a hook can do; raises `ConfigError`.

    Where the environment says "checkpoint", a program's function saves one, and the training ends then; without a function it ends
    once the program has noted one that it saved, or after `checkpoint_seconds`.
    """
    said = said_of_stops()
    if on_stop is None:
        if said == "checkpoint":
            return AwaitsCheckpoint(checkpoint_seconds)
        return "raise" if said in {"stop", "raise"} else "ignore"
    if callable(on_stop):
        ends = said == "checkpoint" and not isinstance(on_stop, Noted)
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
    held = config or CaptureConfig()
    if budget is not None:
        return replace(held, overhead_budget=budget)
    text = os.environ.get(BUDGET, "")
    if config is not None or not text:
        return held
    try:
        return replace(held, overhead_budget=None if text == "none" else float(text))
    except ValueError:
        raise ConfigError(f"{BUDGET}={text!r}: no number", 'set a share such as 0.01, or "none"') from None


def probing(config: CaptureConfig, probes: Iterable[str]) -> CaptureConfig:
    """The configuration with what rules need measured besides, those of the environment included; raises `ConfigError`."""
    wanted = (*config.probes, *probes, *os.environ.get(PROBES, "").split())
    return replace(config, probes=tuple(dict.fromkeys(wanted)))
