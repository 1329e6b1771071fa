"""Folders on this machine: paths as users write them, and names of folders that are part of a key."""

from __future__ import annotations

import functools
import logging
import os
import unicodedata
from pathlib import Path

from watchstep.errors import ConfigError

_log = logging.getLogger(__name__)


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """A path as a user writes it: with ``~`` expanded, from the working directory where it is relative.

    Raises:
        ConfigError: it begins with ``~`` and the home folder is not known, or it is relative and the working directory is gone.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(
            f"path {os.fspath(path)}: the home folder of user {os.geteuid()} is not known", "set HOME"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"path {os.fspath(path)}: the working directory cannot be read: {error.strerror}",
            "use an absolute path",
        ) from error


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
