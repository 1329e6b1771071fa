"""Rule files, for the recorder: read by the rules package, found by entry point, taken as data."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from watchstep.errors import ConfigError

_GROUP = "watchstep.rule_files"


class AskedRules(NamedTuple):
    """A rule file as a recorder takes it.

    Attributes:
        configs: the rule configs, as data.
        probes: what they need to be measured besides, as `CaptureConfig.probes` takes it.
    """

    configs: tuple[dict[str, Any], ...] = ()
    probes: tuple[str, ...] = ()


def load(path: str | os.PathLike[str]) -> AskedRules:
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
        rules: AskedRules = read(path)
        return rules
    raise ConfigError(
        f"rule file {os.fspath(path)}: no reader is installed", "pip install 'watchstep[rules]'"
    )
