"""Names of folders on this machine where one of them is no part of a key: the others are listed without it."""

from __future__ import annotations

import functools
import logging
import os
import unicodedata

_log = logging.getLogger(__name__)


def usable_folders(path: str) -> list[str]:
    """Names of the folders in a folder, sorted, without those with control characters, of which the log tells once.

    Raises:
        OSError: the folder cannot be listed.
    """
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    for name in names:
        if not is_usable(name):
            _tell(path, name)
    return sorted(filter(is_usable, names))


def is_usable(name: str) -> bool:
    """Whether a name can be part of a key."""
    return not any(unicodedata.category(character) in {"Cc", "Cs"} for character in name)


@functools.lru_cache(maxsize=1024)
def _tell(path: str, name: str) -> None:
    _log.warning("folder %r in %s is left out: rename it to a name without control characters", name, path)
