"""What a hook is given, held against what it can take."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from watchstep.capture.config import CaptureConfig
from watchstep.errors import ConfigError
from watchstep.stopping import OnStop

BUDGET = "WATCHSTEP_OVERHEAD_BUDGET"


def checked_on_stop(on_stop: Any) -> OnStop:
    """What a stop does, if it is something that a hook can do; raises `ConfigError`."""
    if callable(on_stop) or on_stop in {"ignore", "raise"}:
        return on_stop  # type: ignore[no-any-return]
    raise ConfigError(f"on_stop={on_stop!r}", 'use "ignore", "raise" or a function')


def checked_step(step: Any) -> int:
    """A step's number, if it is one; raises `ConfigError`."""
    if type(step) is not int or not 0 <= step < 2**62:
        raise ConfigError(f"first_step={step!r}", "use the number of the step that comes next, from 0")
    return step


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
