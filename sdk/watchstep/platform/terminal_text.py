"""Text that comes from runs, recorders, services and users, made safe to show in a terminal.

Names of losses, reasons of stops and messages of errors may hold escape sequences (also in the one-byte form of C1), characters that
reverse the direction of writing, and ends of lines that forge further output; or be megabytes long. Whatever Watchstep writes to a
terminal goes through one of these functions; what it writes as JSON goes through `escaped_json`, and is whole.
"""

from __future__ import annotations

import json
import math

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for a character that is not shown."""

MOST_CHARACTERS = 4_000
"""Of one line: some 50 lines of a terminal. The rest is cut, and its length told."""

MOST_LINES = 1_000
"""Of one text."""


def printable(text: object) -> str:
    """One line: every character that is not printable, an end of a line included, is replaced, and what is too long is cut.

    Printable is what `str.isprintable` says: no control and format characters (C0, C1, bidirectional overrides), no line and
    paragraph separators, no halves of surrogate pairs.
    """
    whole = str(text)
    shown = whole[:MOST_CHARACTERS]
    if not shown.isprintable():
        shown = "".join(letter if letter.isprintable() else REPLACEMENT for letter in shown)
    return shown + _cut(len(whole) - MOST_CHARACTERS, "character")


def printable_lines(text: object) -> str:
    """Several lines, each as `printable` gives it; for text whose ends of lines are Watchstep's own. Tabs become spaces."""
    lines = str(text).split("\n")
    shown = [printable(line.expandtabs()) for line in lines[:MOST_LINES]]
    left = _cut(len(lines) - MOST_LINES, "line")
    return "\n".join([*shown, left.lstrip()] if left else shown)


def _cut(left: int, what: str) -> str:
    return f" … ({left:,} more {what}{'s' if left > 1 else ''})" if left > 0 else ""


def escaped_json(text: str) -> str:
    r"""The same JSON with ``\u`` escapes for what is not printable: a terminal acts on nothing in it, and it is read back as it was."""
    return "\n".join(_escaped_line(line) for line in text.split("\n"))


def _escaped_line(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in line)


def number_text(value: float) -> str:
    """Format a number: an integer exactly, ``49,152``; any other with four digits."""
    if math.isfinite(value) and value == int(value) and abs(value) < _EXACT:
        return f"{int(value):,}"
    return f"{value:.4g}"


_EXACT = 2**53
"""Below it, each integer is a float64 of its own."""
