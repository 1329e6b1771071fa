"""Message templates of rule configs: text with ``{field}`` placeholders from a fixed list.

A field is looked up by its name. There are no attributes, indices, conversions or formats, so a template cannot reach anything that is
not listed here. ``{{`` and ``}}`` stand for braces. `one_line` and `lines` reject control characters and unpaired surrogates in texts that are
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
    """A text without control characters.

    Raises:
        ValueError: it has one.
    """
    return _without_controls(value, frozenset())


def lines(value: str) -> str:
    """A text without control characters, but for tabs and ends of lines.

    Raises:
        ValueError: it has another.
    """
    return _without_controls(value, _TEXT_CONTROLS)


def _without_controls(value: str, allowed: frozenset[str]) -> str:
    for place, character in enumerate(value):
        if unicodedata.category(character) in {"Cc", "Cs"} and character not in allowed:
            raise ValueError(f"{value!r} has a control character at place {place + 1}: leave it out")
    return value


ONE_LINE = r"^[^\u0000-\u001f\u007f-\u009f]*$"
"""`one_line` as a JSON schema says it."""

LINES = r"^[^\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f]*$"
"""`lines` as a JSON schema says it."""


def can_be_kept(data: Any) -> None:
    """See that data of any form can be kept as JSON in any database.

    Raises:
        ValueError: some text has a NUL or half a surrogate pair, or some number is not finite or has over 64 bits.
    """
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, str) and ("\0" in value or not _is_whole(value)):
            raise ValueError(f"{value[:100]!r} has a NUL or half a surrogate pair in it: leave it out")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{value} is no number that can be kept: write a finite one, or leave it out")
        elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
            raise ValueError("a number over 64 bits: write a smaller one")


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


MOST_CHARACTERS = 1000
"""Of a template."""

MOST_FILLED = 4000
"""Of a message; what is longer is cut."""

LABEL = "label."
"""``{label.team}`` is the config's label ``team``."""

FIELDS: dict[str, str] = {
    "name": "the rule config's name",
    "rule": "the rule",
    "severity": "the rule config's severity",
    "project": "the run's project",
    "run": "the run's id",
    "attempt": "the attempt",
    "step": "the step that was judged",
    "mode": "its mode",
    "worker": "the rank",
    "tensor": "the tensor's name; 'the run' for a finding about the run as a whole",
    "module": "path of its module",
    "module_type": "the module's class",
    "role": "what the tensor is to its module",
    "value": "what was seen, in four digits",
    "threshold": "what it was held against, in four digits",
    "message": "the finding's own message",
    "since_step": "the first step of the findings that made the alert fire",
}
"""What may stand in a template, beside the labels."""

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def check(text: str, labels: Mapping[str, str] | None, fields: Mapping[str, str] = FIELDS) -> None:
    """See that every field of a template is known.

    Args:
        text: the template.
        labels: the only ones that may be named; None for any.
        fields: what else may.

    Raises:
        ValueError: one is not, or a brace stands alone.
    """
    for found in _PART.finditer(text):
        if found[0] in ("{{", "}}"):
            continue
        field = found[1]
        if field is None:
            raise ValueError(f"a brace stands alone at character {found.start() + 1}: write {found[0] * 2}")
        label = field.removeprefix(LABEL) if field.startswith(LABEL) else None
        if field in fields or (label and (labels is None or label in labels)):
            continue
        known = ", ".join([*fields, *(LABEL + name for name in (["NAME"] if labels is None else labels))])
        raise ValueError(f"unknown field {{{field}}}; use one of: {known}")


def fill(text: str, values: Mapping[str, str], most: int = MOST_FILLED) -> str:
    """A message from a template that was checked.

    Args:
        text: the template.
        values: what stands for each field, labels with their prefix; one that is missing is a dash.
        most: characters of the message; what is longer is cut.
    """

    def part(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][:1]
        return values.get(found[1], "-")

    return _PART.sub(part, text)[:most]
