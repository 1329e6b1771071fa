"""Regular expressions over names of tensors, in RE2: they may come from anyone, and no name takes them long.

RE2 matches in time linear in the name, whatever the expression; Python's ``re`` can take years over thirty characters, and
holds the interpreter while it does. See https://github.com/google/re2/wiki/Syntax.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import re2

LONGEST = 1000
"""Characters of an expression."""

MOST_REPEATS = 1000
"""Of ``x{n}``; RE2 takes no more, and takes a count that no integer holds as plain text."""

_MEMORY = 1 << 20
"""Bytes that one compiled expression may take."""

_COUNT = re.compile(r"\{(\d*),?(\d*)\}")
_AROUND = re.compile(r"\(\?(?:[=!>]|<[=!])|\(\?P=|\(\?\(|\\[1-9]|invalid perl operator")


def check(pattern: str) -> None:
    """See that an expression can be used.

    Raises:
        ValueError: it is too long, or RE2 does not take it; the message says what to write instead.
    """
    if len(pattern) > LONGEST:
        raise ValueError(
            f"a regular expression of {len(pattern)} characters, over the limit of {LONGEST}: "
            "narrow by collection, or use several rule configs"
        )
    if any(
        len(count.lstrip("0")) > len(str(MOST_REPEATS))
        for found in _COUNT.findall(pattern)
        for count in found
    ):
        raise ValueError(
            f"not a regular expression: it repeats more than {MOST_REPEATS} times; write '*' or '+'"
        )
    _compiled(pattern)


def matches(pattern: str, name: str) -> bool:
    """Whether an expression matches a name from its start.

    Raises:
        ValueError: it is none.
    """
    return _compiled(pattern).match(name.encode(errors="replace")) is not None


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.max_mem = _MEMORY
    options.log_errors = False
    try:
        return re2.compile(pattern.encode(), options)
    except UnicodeEncodeError as error:
        raise ValueError("not a regular expression: half a surrogate pair stands in it") from error
    except re2.error as error:
        raise ValueError(f"not a regular expression: {_in_words(error)}{_hint(pattern)}") from error


def _in_words(error: Exception) -> str:
    """RE2 gives its messages as bytes."""
    said = error.args[0] if error.args else "it cannot be read"
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)


def _hint(pattern: str) -> str:
    if "\\Z" in pattern:
        return "; write '\\z' for the end"
    if _AROUND.search(pattern):
        return (
            "; the syntax is RE2's, without lookaheads and backreferences: use 'exclude' beside 'include', "
            "or name both cases with '|'"
        )
    return "; the syntax is RE2's: put '\\' before a character that stands for itself"
