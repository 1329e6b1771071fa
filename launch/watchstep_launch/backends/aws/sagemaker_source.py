"""What a launch puts on S3 for its job: how to start, and the launcher's own files."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Literal

from watchstep_launch.backend import Launch
from watchstep_launch.errors import SubmissionRejectedError

Source = Literal["program", "folder", "none"]

START = "start.py"
LAUNCH = "launch.json"
PACKED = "source.tar.gz"
MOST_BYTES = 256 * 1024 * 1024

_LEFT_OUT = frozenset((".git", ".hg", ".venv", "venv", "__pycache__", "node_modules", "watchstep-runs", ".watchstep"))  # fmt: skip


def local_files(launch: Launch, source: Source) -> list[PurePosixPath]:
    """Files of the launcher's that a job needs, below the launch's folder: those that its command names, or all of them."""
    if source == "none":
        return []
    if source == "folder":
        return sorted(_all_below(launch.folder))
    named = {word for word in launch.command if _names_a_file(launch.folder, word)}
    return sorted(PurePosixPath(os.path.normpath(word)) for word in named)


def packed(
    launch: Launch, files: Iterable[PurePosixPath], secrets: Mapping[str, str], again: bool
) -> dict[str, bytes]:
    """What to put on S3: name → bytes.

    Raises:
        SubmissionRejectedError: a file cannot be read, or there is too much of them.
    """
    held = list(files)
    start = Path(__file__).with_name("sagemaker_start.py").read_bytes()
    asked = {"command": list(launch.command), "source": bool(held), "secrets": dict(secrets), "again": again}
    objects = {START: start, LAUNCH: json.dumps(asked, indent=1).encode()}
    if held:
        objects[PACKED] = _archive(launch.folder, held)
    return objects


def _names_a_file(folder: Path, word: str) -> bool:
    place = PurePosixPath(word)
    if not word or "\0" in word or len(word) > 1024 or place.is_absolute() or ".." in place.parts:
        return False
    try:
        return (folder / place).is_file()
    except OSError:
        return False


def _all_below(folder: Path) -> Iterator[PurePosixPath]:
    top = folder.resolve()
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        for name in names:
            path = Path(at, name)
            # A link leads no further than the folder that was given.
            if path.is_file() and path.resolve().is_relative_to(top) and not name.endswith(".pyc"):
                yield PurePosixPath(path.relative_to(folder).as_posix())


def _archive(folder: Path, files: list[PurePosixPath]) -> bytes:
    """A tarball that is the same for the same files."""
    held, size = io.BytesIO(), 0
    with (
        gzip.GzipFile(fileobj=held, mode="wb", mtime=0, compresslevel=6) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for file in files:
            try:
                data = (folder / file).read_bytes()
                mode = (folder / file).stat().st_mode & 0o777
            except OSError as error:
                raise SubmissionRejectedError(
                    f"file {folder / file}: cannot be read ({error.strerror})", "see to its permissions"
                ) from error
            size += len(data)
            if size > MOST_BYTES:
                raise SubmissionRejectedError(
                    f"folder {folder}: its files have more than {MOST_BYTES >> 20} MiB, at {file}",
                    "launch from a folder of code, and give data as inputs={'train': 's3://…'}",
                )
            about = tarfile.TarInfo(str(file))
            about.size, about.mode = len(data), mode
            archive.addfile(about, io.BytesIO(data))
    return held.getvalue()
