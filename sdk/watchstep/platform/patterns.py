"""Regular expressions of users, in RE2 syntax, which match in time linear in the text for every pattern.

Python's ``re`` can take years over thirty characters and holds the interpreter's lock meanwhile, which would stop the training.
See https://github.com/google/re2/wiki/Syntax.
"""

from __future__ import annotations

import functools
from typing import Any

MAX_PATTERN = 4096
"""Maximum length of a pattern in characters."""


def check_pattern(pattern: str) -> None:
    """Check that a pattern is valid.

    Raises:
        ValueError: It is too long, is not valid, or uses what RE2 does not support, such as lookahead and backreferences.
    """
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"{len(pattern)} characters, more than the limit of {MAX_PATTERN}")
    try:
        _compiled(pattern)
    except Exception as error:
        reason = error.args[0] if error.args else error
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(text[:200]) from error


@functools.lru_cache(maxsize=65536)
def matches_from_start(pattern: str, text: str) -> bool:
    """Return whether a valid pattern matches a text from its start."""
    # RE2 takes UTF-8, which has no lone surrogates.
    return _compiled(pattern).match(text.encode("utf-8", "replace").decode()) is not None


@functools.lru_cache(maxsize=1000)
def _compiled(pattern: str) -> Any:
    import re2  # imported on first use, because most configurations have no pattern

    options = re2.Options()
    options.log_errors = False
    return re2.compile(pattern, options)
