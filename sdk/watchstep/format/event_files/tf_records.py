"""Files of TensorFlow records, as event files of TensorBoard and dumps of Debugger V2: framing and checksums.

A record is the length of its data in 8 bytes, little-endian, a checksum of the length, the data, and a checksum of the data. A checksum is a
CRC-32C, rotated and with a constant added ("masked"), in 4 bytes.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from watchstep.errors import FormatError

_HEAD_BYTES, _TAIL_BYTES = 12, 4
_HINT = "the file is damaged; copy it again, or record it again"


def record(data: bytes) -> bytes:
    """Return a record with this data."""
    length = struct.pack("<Q", len(data))
    return b"".join([length, _checksum(length), data, _checksum(data)])


class RecordFile:
    """The records of one file, from its beginning. Iterate it once.

    A file that ends within a record, as of a process that was killed, is read up to that record.

    Attributes:
        name: path of the file, for messages.
        is_truncated: whether the file ended within a record; set when iteration is over.
        size: size of the file in bytes when it was opened.
    """

    def __init__(self, file: BinaryIO, name: str, max_record_bytes: int) -> None:
        """Read a file from its current position.

        Args:
            file: The file.
            name: Its path, for messages.
            max_record_bytes: Maximum size of the data of one record.
        """
        self._file = file
        self.name = name
        self._limit = max_record_bytes
        self.is_truncated = False
        self.size = os.fstat(file.fileno()).st_size

    def __iter__(self) -> Iterator[bytes]:
        """Yield the data of each record.

        Raises:
            FormatError: a record's checksum is wrong, or it is too large. Memory is taken only for the size that is left in the file.
        """
        offset = 0
        while head := self._file.read(_HEAD_BYTES):
            if len(head) < _HEAD_BYTES:
                self.is_truncated = True
                return
            if _checksum(head[:8]) != head[8:]:
                raise FormatError(
                    f"file {self.name}: the length of the record at byte {offset} has a wrong checksum", _HINT
                )
            (length,) = struct.unpack_from("<Q", head)
            if length > self.size - offset - _HEAD_BYTES - _TAIL_BYTES:
                self.is_truncated = True
                return
            if length > self._limit:
                raise FormatError(
                    f"file {self.name}: the record at byte {offset} has {length} bytes; the limit is {self._limit}",
                    "record fewer elements of each tensor, or no full tensors",
                )
            data = self._file.read(length)
            tail = self._file.read(_TAIL_BYTES)
            if len(data) < length or len(tail) < _TAIL_BYTES:
                self.is_truncated = True
                return
            if _checksum(data) != tail:
                raise FormatError(
                    f"file {self.name}: the record at byte {offset} has a wrong checksum", _HINT
                )
            offset += _HEAD_BYTES + length + _TAIL_BYTES
            yield data


def _checksum(data: bytes) -> bytes:
    crc = _crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


_WIDTH = 256
_FEW = 64
_INITIAL = 4
"""Number of bytes at the beginning that the checksum's initial value changes."""
_PIECE = 2**20
"""Number of bytes that are looked up at once; the lookup takes four times as much memory."""


def _crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of some bytes.

    A checksum is linear: that of a block of bytes is the exclusive or of the contributions of its bytes, which depend only on the byte and
    on the number of bytes after it. numpy looks up those of all blocks at once. The checksum of everything before a block changes its
    first four bytes.
    """
    contributions, last, before = _crc_tables()
    if len(data) <= _FEW:
        crc = 0xFFFFFFFF
        for byte in data:
            crc = last[(crc ^ byte) & 0xFF] ^ crc >> 8
        return crc ^ 0xFFFFFFFF
    # Zeros in front change nothing, so the first blocks are filled with them. They have the four bytes that the initial value changes.
    start = len(data) % _WIDTH
    start += _WIDTH if start < _INITIAL else 0
    head = np.zeros(-(-start // _WIDTH) * _WIDTH, np.uint8)
    head[-start:] = np.frombuffer(data, np.uint8, start)
    head[len(head) - start : len(head) - start + _INITIAL] ^= 0xFF
    rest = np.frombuffer(data, np.uint8, offset=start)
    pieces = (rest[place : place + _PIECE] for place in range(0, len(rest), _PIECE))
    first, second, third, fourth = before
    places = np.arange(_WIDTH)
    crc = 0
    for piece in (head, *pieces):
        blocks = contributions[places, piece.reshape(-1, _WIDTH)]
        for block in np.bitwise_xor.reduce(blocks, axis=1).tolist():
            crc = (
                first[crc & 0xFF]
                ^ second[crc >> 8 & 0xFF]
                ^ third[crc >> 16 & 0xFF]
                ^ fourth[crc >> 24]
                ^ block
            )
    return crc ^ 0xFFFFFFFF


@functools.cache
def _crc_tables() -> tuple[NDArray[np.uint32], list[int], list[list[int]]]:
    """Return the contribution of each byte at each place of a block, shape (256, 256), and lists of the last and the first four places."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(0x82F63B78), table >> 1)
    contributions = np.empty((_WIDTH, 256), np.uint32)
    contributions[-1] = table
    for place in range(_WIDTH - 2, -1, -1):
        later = contributions[place + 1]
        contributions[place] = table[later & 0xFF] ^ later >> 8
    return contributions, table.tolist(), contributions[:4].tolist()
