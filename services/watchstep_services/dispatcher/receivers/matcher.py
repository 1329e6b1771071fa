"""One condition on a label, written as in Prometheus Alertmanager: ``severity="critical"``, ``team=~"ml|vision"``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from watchstep_rules.signals import name_pattern

Operator = Literal["=", "!=", "=~", "!~"]

MOST_CHARACTERS = 500
"""Of a matcher."""

_FORM = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*(?:"((?:[^"\\]|\\.)*)"|([^\s"]*))\s*')
_ESCAPED = re.compile(r'\\(["\\])')


@dataclass(frozen=True)
class Matcher:
    """A condition on one label. A label that an alert does not have is as one that is empty.

    Attributes:
        label: its name.
        operator: equal, not equal, matched as a whole by a regular expression in RE2's syntax, or not.
        value: what it is held against.
    """

    label: str
    operator: Operator
    value: str

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether labels meet it."""
        held = labels.get(self.label, "")
        if self.operator in ("=", "!="):
            return (held == self.value) == (self.operator == "=")
        return name_pattern.matches(rf"(?:{self.value})\z", held) == (self.operator == "=~")

    def __str__(self) -> str:
        escaped = self.value.replace("\\", "\\\\").replace('"', '\\"')
        return f'{self.label}{self.operator}"{escaped}"'


def parse_matcher(text: str) -> Matcher:
    r"""Read a matcher; quotes around the value may be left out where it has no spaces.

    Within quotes ``\"`` and ``\\`` stand for a quote and a backslash; every other backslash is the expression's own.

    Raises:
        ValueError: it is none; the message says what one looks like.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"a matcher of {len(text)} characters, over the limit of {MOST_CHARACTERS}")
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError(
            f'{text!r} is not a matcher: write one like severity="critical" or team=~"ml|vision"'
        )
    label, operator, quoted, bare = found.groups()
    value = bare if quoted is None else _ESCAPED.sub(r"\1", quoted)
    if operator in ("=~", "!~"):
        name_pattern.check(value)
        name_pattern.check(rf"(?:{value})\z")
    return Matcher(label, cast("Operator", operator), value)
