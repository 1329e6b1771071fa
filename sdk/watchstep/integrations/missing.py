"""What a library that is not installed is told as."""

from __future__ import annotations

from typing import NoReturn


def missing(library: str, extra: str, error: ImportError) -> NoReturn:
    """Say which extra brings a library.

    Raises:
        ImportError: always.
    """
    raise ImportError(
        f"{library} is not installed, or cannot be imported ({error})\n  mend: pip install 'watchstep[{extra}]'"
    ) from error
