"""Rule files, for the recorder: read by the rules package, found by entry point, taken as data."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any

from watchstep.errors import ConfigError

_GROUP = "watchstep.rule_files"


def load(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a rule file.

    Raises:
        RuleError: it is missing or not valid.
        ConfigError: the rules package, or what it needs, is not installed.
    """
    for entry in entry_points(group=_GROUP):
        try:
            read = entry.load()
        except ImportError as error:
            raise ConfigError(
                f"rule file {os.fspath(path)}: {error}", "pip install 'watchstep[rules]'"
            ) from error
        rules: list[dict[str, Any]] = read(path)
        return rules
    raise ConfigError(
        f"rule file {os.fspath(path)}: no reader is installed", "pip install 'watchstep[rules]'"
    )
