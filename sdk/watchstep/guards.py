"""Guards, for the hook: they live in the rules package, and are found by entry point."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any

from watchstep.errors import ConfigError

_GROUP = "watchstep.guards"


def make(rules: Any) -> Any:
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
    for entry in entry_points(group=_GROUP):
        try:
            build = entry.load()
        except ImportError as error:
            raise ConfigError(f"guard: {error}", "pip install 'watchstep[rules]'") from error
        return build(None if rules is True else rules)
    raise ConfigError("guard: no rules are installed", "pip install 'watchstep[rules]'")
