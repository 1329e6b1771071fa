"""The arguments of `watchstep.Hook`: their checks, their values from the environment, and rule files and guards.

Rule files and guards belong to the rules package, which is found by entry point.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from watchstep.capture.config import CaptureConfig
from watchstep.capture.document.files import from_environment, load
from watchstep.capture.needs import with_needs
from watchstep.errors import ConfigError
from watchstep.format.capture_needs import CaptureNeed, decoded
from watchstep.platform.folders import absolute_path
from watchstep.stopping import FIRST_STEP, AwaitsCheckpoint, Noted, OnNonfinite, OnStop, SavesThenStops

if TYPE_CHECKING:
    from watchstep.trace.trace_steps import TraceSteps

TRACE = "WATCHSTEP_TRACE"

BUDGET = "WATCHSTEP_OVERHEAD_BUDGET"
AUDIT = "WATCHSTEP_AUDIT"
"""Folder for the reports of an audited program; set by ``watchstep audit``, together with the store of the run."""

NEEDS = "WATCHSTEP_NEEDS"
"""What the rules of a launcher need the recorder to capture, as JSON (`watchstep.format.capture_needs.encoded`)."""

TENSORBOARD = "WATCHSTEP_TENSORBOARD"
"""Folder for TensorBoard event files."""

ON_STOP = "WATCHSTEP_ON_STOP"
ON_STOP_WORDS = ("ignore", "raise", "stop", "checkpoint")
"""Valid values of WATCHSTEP_ON_STOP; "stop" is a synonym of "raise"."""

ON_NONFINITE = "WATCHSTEP_ON_NONFINITE"
"""The gate policy, in a form that `OnNonfinite.parse` reads."""

EXPLAIN = "WATCHSTEP_EXPLAIN"
"""1 to compute the step that stops the training again, if `Hook(explain=…)` does not state it."""

EXPLAINED_BUNDLE = "WATCHSTEP_EXPLAINED_BUNDLE"
"""Set by ``watchstep explain``: the bundle of the step that the program computes after its first update."""

_URL = re.compile(r"[A-Za-z][\w+.-]*://")


def on_stop_from_environment() -> str:
    """Return WATCHSTEP_ON_STOP; empty if it is not set. Raises `ConfigError` for an invalid value."""
    setting = os.environ.get(ON_STOP, "")
    if setting and setting not in ON_STOP_WORDS:
        raise ConfigError(f"invalid {ON_STOP}={setting!r}", f"use {', '.join(ON_STOP_WORDS)}")
    return setting


def checked_on_stop(on_stop: Any, checkpoint_seconds: float) -> OnStop:
    """Return the effect of a stop from the argument, or else from the environment. Raises `ConfigError` if it is invalid.

    If the environment requests "checkpoint", a program's function saves a checkpoint, and the training ends when it returns. Without a
    function, the training ends once the program has reported a saved checkpoint, or after `checkpoint_seconds`.
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
    raise ConfigError(f"invalid on_stop={on_stop!r}", 'use "ignore", "check", "raise" or a function')


def explains(given: Any) -> bool:
    """Return whether the step that stops the training is computed again, from the argument or else the environment. Raises `ConfigError`."""
    if given is not None:
        return bool(given)
    text = os.environ.get(EXPLAIN, "")
    if text not in {"", "0", "1"}:
        raise ConfigError(f"invalid {EXPLAIN}={text!r}"[:200], "use 1, or unset it")
    return text == "1"


def policy_of(policy: Any, *, explain: bool) -> OnNonfinite:
    """Return the gate policy, which is `stop` by default if the step that stops the training is computed again.

    Raises:
        ConfigError: the policy is invalid, or never stops.
    """
    chosen = on_nonfinite_of(policy)
    if not explain:
        return chosen
    is_chosen = policy is not None or os.environ.get(ON_NONFINITE, "") not in {"", "record"}
    if chosen.action == "record" and not is_chosen:
        return OnNonfinite("stop")
    if chosen.action != "stop" and chosen.max_skips is None:
        raise ConfigError(
            f"explain with on_nonfinite={str(chosen)!r}: nothing stops", 'use "stop" or "skip:N"'
        )
    return chosen


def on_nonfinite_of(policy: Any) -> OnNonfinite:
    """Return the gate policy from the argument, or else from the environment. Raises `ConfigError` if it is invalid."""
    if policy is not None:
        return policy if isinstance(policy, OnNonfinite) else OnNonfinite.parse(policy)
    text = os.environ.get(ON_NONFINITE, "")
    try:
        return OnNonfinite.parse(text) if text else OnNonfinite()
    except ConfigError as error:
        raise ConfigError(f"invalid {ON_NONFINITE}={text!r}"[:200], error.hint) from None


def first_step_of(step: Any) -> int:
    """Return the number of the first step from the argument, or else from the environment. Raises `ConfigError`."""
    if step is not None:
        return checked_step(step)
    text = os.environ.get(FIRST_STEP, "") or "0"
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(
            f"{FIRST_STEP}={text!r} is not a number", "unset it, or set the number of the first step"
        )
    return checked_step(int(text.lstrip("0")[:20] or "0"))  # Python converts no more than 4,300 digits


def checked_step(step: Any) -> int:
    """Return a step number if it is valid. Raises `ConfigError`."""
    if type(step) is not int or not 0 <= step < 2**62:
        raise ConfigError(f"invalid first_step={step!r}", "use the number of the next step, from 0")
    return step


def loss_divisor_of(divisor: Any) -> Callable[[], float]:
    """Return a function that returns the divisor of a program's losses. Raises `ConfigError`."""
    if callable(divisor):
        return lambda: float(divisor())
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not 0 < divisor < math.inf:
        raise ConfigError(
            f"invalid loss_divisor={divisor!r}", "use a number above 0, such as the number of micro-batches"
        )
    number = float(divisor)
    return lambda: number


def configured(config: CaptureConfig | str | os.PathLike[str] | None, budget: float | None) -> CaptureConfig:
    """Return the configuration from the argument, or else from the environment, or else the built-in one.

    Args:
        config: a configuration, or the path of a capture file.
        budget: the overhead budget. Default: that of the configuration; if the program sets none, WATCHSTEP_OVERHEAD_BUDGET.

    Raises:
        ConfigError: the capture file or a variable is invalid.
    """
    if isinstance(config, CaptureConfig):
        settings = config
    elif isinstance(config, str | os.PathLike):
        settings = load(config)
    elif config is None:
        settings = from_environment() or CaptureConfig()
    else:
        raise ConfigError(
            f"invalid config={config!r}"[:200], "use a CaptureConfig, or the path of a capture file"
        )
    if budget is not None:
        return replace(settings, overhead_budget=budget)
    text = os.environ.get(BUDGET, "")
    if config is not None or not text:
        return settings
    try:
        return replace(settings, overhead_budget=None if text == "none" else float(text))
    except ValueError:
        raise ConfigError(
            f"{BUDGET}={text!r} is not a number", 'set a share such as 0.01, or "none"'
        ) from None


def tensorboard_folder(folder: Any) -> Path | None:
    """Return the folder for TensorBoard event files from the argument, or else from the environment; None for none.

    Raises:
        ConfigError: the argument is no path of a folder on this machine, or it is empty, or it leads to a file.
    """
    name, given = "tensorboard", folder
    if given is None:
        name, given = TENSORBOARD, os.environ.get(TENSORBOARD) or None
    if given is None:
        return None
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not text or not isinstance(text, str) or "\0" in text:
        raise ConfigError(f"invalid {name}={given!r}", "use the path of a folder, or None for no event files")
    if _URL.match(text):
        raise ConfigError(f"{name}={text!r} is a URL", "use a folder of this machine")
    path = absolute_path(text)
    with suppress(OSError):  # health reports a folder that cannot be read
        first = next((place for place in (path, *path.parents) if place.exists()), path)
        if first.exists() and not first.is_dir():
            raise ConfigError(f"{name}={text!r}: {first} is a file", "use another folder")
    return path


def needing(config: CaptureConfig, needs: Iterable[CaptureNeed]) -> CaptureConfig:
    """Return the configuration with what rules need, including those of the environment. Raises `ConfigError`."""
    return with_needs(config, (*needs, *needs_in(os.environ)))


def needs_in(variables: Mapping[str, str]) -> tuple[CaptureNeed, ...]:
    """Return what the rules of a launcher need. Raises `ConfigError` for an invalid variable."""
    try:
        return decoded(variables.get(NEEDS, ""))
    except ValueError as error:
        raise ConfigError(f"{NEEDS} is not valid: {error}", "unset it; launchers set it") from error


_RULE_FILES = "watchstep.rule_files"
_GUARDS = "watchstep.guards"


class RequestedRules(NamedTuple):
    """The contents of a rule file that a recorder needs.

    Attributes:
        configs: the rule configs, as data.
        needs: what the rules need the recorder to capture.
    """

    configs: tuple[dict[str, Any], ...] = ()
    needs: tuple[CaptureNeed, ...] = ()


def load_rule_file(path: str | os.PathLike[str]) -> RequestedRules:
    """Read a rule file.

    Raises:
        RuleError: the file is missing or invalid.
        ConfigError: the rules package, or one of its requirements, is not installed.
    """
    from importlib.metadata import entry_points

    for entry in entry_points(group=_RULE_FILES):
        try:
            read = entry.load()
        except ImportError as error:
            raise ConfigError(
                f"rule file {os.fspath(path)}: {error}", "pip install 'watchstep[rules]'"
            ) from error
        rules: RequestedRules = read(path)
        return rules
    raise ConfigError(
        f"rule file {os.fspath(path)}: no reader is installed", "pip install 'watchstep[rules]'"
    )


def make_guard(rules: Any) -> Any:
    """Return a guard.

    Args:
        rules: a rule file; True for the default rules; or a guard, which is returned unchanged.

    Raises:
        RuleError: the rule file is missing or invalid.
        ConfigError: the argument is invalid, or the rules package, or one of its requirements, is not installed.
    """
    if hasattr(rules, "before_update") and hasattr(rules, "attach"):
        return rules
    if rules is not True and not isinstance(rules, str | os.PathLike):
        raise ConfigError(
            f"invalid guard={rules!r}", "use a rule file, True for the default rules, or a Guard"
        )
    from importlib.metadata import entry_points

    for entry in entry_points(group=_GUARDS):
        try:
            build = entry.load()
        except ImportError as error:
            raise ConfigError(f"guard: {error}", "pip install 'watchstep[rules]'") from error
        return build(None if rules is True else rules)
    raise ConfigError("guard: the rules package is not installed", "pip install 'watchstep[rules]'")


def traced_steps(given: TraceSteps | str | None) -> TraceSteps | None:
    """Return the steps that are traced, from the argument or else from the environment; None for none.

    Raises:
        ConfigError: the steps are not valid.
    """
    if given is None and not os.environ.get(TRACE):
        return None
    from watchstep.trace.trace_steps import trace_steps_of  # loaded for programs that trace only

    return trace_steps_of(given)
