"""Words from rule files that are shown, sent in headers and kept in a database: no control characters, no half characters."""

from __future__ import annotations

import math
import unicodedata
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
