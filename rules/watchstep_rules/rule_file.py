"""Rule files: a YAML document with a list of rule configs under ``rules``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from watchstep.errors import RuleError
from watchstep_rules.config import RuleConfig


class RuleFile(BaseModel):
    """A rule file's content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rules: tuple[RuleConfig, ...]

    @model_validator(mode="after")
    def _names_differ(self) -> RuleFile:
        names = [config.name for config in self.rules]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two rule configs are named {name!r}: give one of them a 'name'")
        return self


def parse(text: str, source: str) -> tuple[RuleConfig, ...]:
    """Read rule configs from YAML.

    Args:
        text: the document.
        source: what to call it in an error.

    Raises:
        RuleError: it is no YAML, or not a list of valid rule configs; the message names the place.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RuleError(
            f"rule file {source}: not valid YAML ({_place(error)})", "correct the line"
        ) from error
    except RecursionError:
        raise RuleError(
            f"rule file {source}: nested too deeply", "write rules as a list of mappings"
        ) from None
    return check({"rules": []} if data is None else data, source)


def check(data: Any, source: str) -> tuple[RuleConfig, ...]:
    """Check rule configs that are data already.

    Raises:
        RuleError: they are not valid; the message names the first place.
    """
    if not isinstance(data, dict):
        raise RuleError(f"rule file {source}: no mapping", "start it with 'rules:' and a list below")
    try:
        return RuleFile.model_validate(data).rules
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "rules"
        message = first["msg"].removeprefix("Value error, ")
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise RuleError(
            f"rule file {source}: {place}: {message}{more}",
            "see 'watchstep rules list' for rules and 'watchstep rules show NAME' for their parameters",
        ) from error


def load(path: str | Path) -> tuple[RuleConfig, ...]:
    """Read a rule file.

    Raises:
        RuleError: it is missing, unreadable, or not valid.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"rule file {path}: cannot be read ({error})", "check the path") from error
    return parse(text, str(path))


def load_as_data(path: str | Path) -> list[dict[str, Any]]:
    """Read a rule file for the SDK, which takes it as data: the entry point ``watchstep.rule_files``.

    Raises:
        RuleError: as `load`.
    """
    return [config.as_data() for config in load(path)]


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "syntax"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else str(problem)
