"""Output that lies in a file of this machine, or of one that shares its disks."""

from __future__ import annotations

from pathlib import Path

from watchstep_launch.backend import LogPart
from watchstep_launch.errors import BackendDownError

LARGEST_PART = 1024 * 1024


def read_part(path: Path, cursor: str) -> LogPart:
    """What a file holds from a place on, a megabyte at most; empty where it is not there yet.

    Raises:
        BackendDownError: it is there and cannot be read.
    """
    start = int(cursor) if cursor.isdecimal() else 0
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(LARGEST_PART)
    except FileNotFoundError:
        return LogPart(b"", cursor)
    except OSError as error:
        raise BackendDownError(
            f"log {path}: cannot be read ({error.strerror})",
            "see to its permissions, or read it as its owner",
        ) from error
    return LogPart(data, str(start + len(data)))
