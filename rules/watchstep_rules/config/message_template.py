"""Message templates of rule configs: text with ``{field}`` placeholders from a fixed list.

A field is looked up by its name. There are no attributes, indices, conversions or formats, so a template cannot reach anything that is
not listed here. ``{{`` and ``}}`` are literal braces. `one_line` and `lines` reject control characters and unpaired surrogates in texts that are
displayed, sent in headers and stored in a database.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

_LARGEST = 2**63
_TEXT_CONTROLS = frozenset("\n\t\r")


def one_line(value: str) -> str:
    """Check that a text has no control characters; returns the text.

    Raises:
        ValueError: the text has a control character.
    """
    return _without_controls(value, frozenset())


def lines(value: str) -> str:
    """Check that a text has no control characters except tabs and line breaks; returns the text.

    Raises:
        ValueError: the text has another control character.
    """
    return _without_controls(value, _TEXT_CONTROLS)


def _without_controls(value: str, allowed: frozenset[str]) -> str:
    for index, character in enumerate(value):
        if unicodedata.category(character) in {"Cc", "Cs"} and character not in allowed:
            raise ValueError(f"{value!r} has a control character at position {index + 1}: remove it")
    return value


ONE_LINE = r"^[^\u0000-\u001f\u007f-\u009f]*$"
"""`one_line` as a pattern for JSON schemas."""

LINES = r"^[^\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]*$"
"""`lines` as a pattern for JSON schemas."""


def check_storable(data: Any) -> None:
    """Check that data can be stored as JSON in any database.

    Raises:
        ValueError: a text has a NUL or an unpaired surrogate, or a number is not finite or has more than 64 bits.
    """
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, str) and ("\0" in value or not _is_whole(value)):
            raise ValueError(f"{value[:100]!r} contains a NUL or an unpaired surrogate: remove it")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number: use a finite one, or omit it")
        elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
            raise ValueError("a number has more than 64 bits: use a smaller one")


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


MOST_CHARACTERS = 1000
"""Limit of characters in a template."""

MOST_FILLED = 4000
"""Limit of characters in a message; a longer message is truncated."""

LABEL = "label."
"""``{label.team}`` is the config's label ``team``."""

FIELDS: dict[str, str] = {
    "name": "the rule config's name",
    "rule": "the rule",
    "severity": "the rule config's severity",
    "project": "the run's project",
    "run": "the run's id",
    "attempt": "the attempt",
    "step": "the step of the finding",
    "mode": "the mode of the step",
    "worker": "the rank",
    "tensor": "the tensor's name; 'the run' for a finding about the run as a whole",
    "module": "path of the tensor's module",
    "module_type": "the module's class",
    "role": "the tensor's role in its module",
    "value": "the measured value, in four digits",
    "threshold": "the threshold, in four digits",
    "message": "the finding's own message",
    "since_step": "the first step of the findings that made the alert fire",
}
"""Fields of a template, in addition to the labels."""

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def check(text: str, labels: Mapping[str, str] | None, fields: Mapping[str, str] = FIELDS) -> None:
    """Check that every field of a template is defined.

    Args:
        text: the template.
        labels: labels that the template may use; None for any.
        fields: other fields that it may use.

    Raises:
        ValueError: a field is not defined, or a brace is not paired.
    """
    for match in _PART.finditer(text):
        if match[0] in ("{{", "}}"):
            continue
        field = match[1]
        if field is None:
            raise ValueError(f"unpaired brace at character {match.start() + 1}: write {match[0] * 2}")
        label = field.removeprefix(LABEL) if field.startswith(LABEL) else None
        if field in fields or (label and (labels is None or label in labels)):
            continue
        known = ", ".join([*fields, *(LABEL + name for name in (["NAME"] if labels is None else labels))])
        raise ValueError(f"unknown field {{{field}}}; use one of: {known}")


def fill(text: str, values: Mapping[str, str], most: int = MOST_FILLED) -> str:
    """Fill a checked template.

    Args:
        text: the template.
        values: values of the fields, labels with their prefix; a missing value is replaced by a dash.
        most: limit of characters; a longer message is truncated.
    """

    def part(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][:1]
        return values.get(match[1], "-")

    return _PART.sub(part, text)[:most]
