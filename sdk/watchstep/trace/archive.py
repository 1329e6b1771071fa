"""Zip archives of traces, which are hostile input: sizes are checked before anything is read, also those that `zipfile` does not check.

`zipfile` reads the whole directory of an archive when it opens it, and its size may be stated by either of two records. It bounds the
output of the method DEFLATE only; BZIP2 and LZMA return everything that they decompress.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from typing import IO

from watchstep.errors import FormatError

MAX_DIRECTORY_BYTES = 4 * 2**20
"""Maximum size of the archive's directory: some 60,000 full tensors."""

DAMAGED = (
    OSError,
    EOFError,
    KeyError,
    ValueError,
    NotImplementedError,
    RuntimeError,  # a member is encrypted
    zipfile.BadZipFile,
    zlib.error,
)
"""Exceptions of `zipfile` for a damaged archive."""

_METHODS = frozenset((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_CHUNK = 2**20


def open_archive(file: IO[bytes], name: str, hint: str) -> zipfile.ZipFile:
    """Open an archive whose directory has at most `MAX_DIRECTORY_BYTES`.

    Args:
        file: the seekable file.
        name: its name in messages.
        hint: hint of the errors.

    Raises:
        FormatError: it is no archive, its directory is too large, or a member is compressed by another method than DEFLATE.
        OSError: it cannot be read.
    """
    size = file.seek(0, os.SEEK_END)
    length = min(size, _END.size + _LOCATOR.size + _END_64.size)
    file.seek(size - length)
    directory = _directory_bytes(file.read(length))
    if directory is None or directory > MAX_DIRECTORY_BYTES:
        raise FormatError(
            f"{name}: not an archive, or one with more than {MAX_DIRECTORY_BYTES} bytes of names", hint
        )
    file.seek(0)
    try:
        archive = zipfile.ZipFile(file)
    except DAMAGED as error:
        raise FormatError(f"{name}: {str(error)[:200]}", hint) from error
    for info in archive.infolist():
        if info.compress_type not in _METHODS:
            archive.close()
            raise FormatError(
                f"{name}: {info.filename[:80]!r} is compressed by method {info.compress_type}, not by DEFLATE",
                hint,
            )
    return archive


def read_member(archive: zipfile.ZipFile, name: str, member: str, limit: int, hint: str) -> bytes:
    """Read a member of an archive from `open_archive`.

    Args:
        archive: the archive.
        name: its name in messages.
        member: name of the member.
        limit: maximum size in bytes.
        hint: hint of the errors.

    Raises:
        FormatError: the member is missing, damaged, too large, or has another size than stated.
    """
    try:
        info = archive.getinfo(member)
        if info.file_size > limit:
            raise FormatError(f"{name}: {member} has {info.file_size} bytes; the limit is {limit}", hint)
        with archive.open(info) as file:
            content = io.BytesIO()
            while chunk := file.read(_CHUNK):
                content.write(chunk)
                if content.tell() > info.file_size:
                    break
    except DAMAGED as error:
        raise FormatError(f"{name}: {str(error)[:200]}", hint) from error
    if content.tell() != info.file_size:
        raise FormatError(f"{name}: {member} does not have the size that its archive states", hint)
    return content.getvalue()


def _directory_bytes(end: bytes) -> int | None:
    """Return the size of the directory that the last bytes of an archive state; None if they do not.

    An archive with a comment is refused: the end record is then not at the end, and `zipfile` would search for it.
    """
    if len(end) < _END.size:
        return None
    signature, *_, directory, _, _ = _END.unpack(end[-_END.size :])
    if signature != b"PK\5\6":
        return None
    before = end[: -_END.size]
    if len(before) >= _LOCATOR.size and before[-_LOCATOR.size :].startswith(b"PK\6\7"):
        record = before[: -_LOCATOR.size]
        if len(record) != _END_64.size or not record.startswith(b"PK\6\6"):
            return None
        directory = max(directory if directory != 0xFFFFFFFF else 0, _END_64.unpack(record)[8])
    return int(directory)
