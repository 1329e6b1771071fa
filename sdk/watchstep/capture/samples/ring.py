"""The ring of samples: records of the last steps, in a memory-mapped file that survives the death of the process.

The file is written by memory copies only. After a kill of the process the system still has all of them, and a record that
was being written has an invalid checksum. Layout: a header with `RING_MAGIC` and the number of the first record that is not on the
store, then records (`watchstep.format.samples.samples`) one after another. One that does not fit at the end goes to the beginning.

Room on the disk is reserved before the file is mapped: a full disk would otherwise end the process with SIGBUS at a later step.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass

from watchstep.errors import FormatError
from watchstep.format.samples.samples import (
    MAX_RECORD_BYTES,
    SampleBatch,
    encode_batch,
    frame,
    intact_frames,
    step_of,
)

RING_MAGIC = b"WSRING\x01\x00"
MAX_RING_BYTES = 32 * 1024 * 1024
"""Maximum size of a ring's records."""

_HEADER = struct.Struct("<8sQQ")
_START = 64
_RECORDS_OF_RING = 4
"""A record takes at most this part of the ring, so that some steps before it remain."""

_MIN_BYTES = 4096
_CHUNK = 1024 * 1024


@dataclass(frozen=True)
class RingRecord:
    """An intact record of a ring: its number, its step, and its bytes."""

    number: int
    step: int
    payload: bytes


class SampleRing:
    """Records of the last steps. Written on the training thread, read on any thread of the same process.

    Numbers of records begin with the time in microseconds, so that those of a later process of the same worker are larger.
    """

    def __init__(self, memory: mmap.mmap, steps: int) -> None:
        """Start an empty ring.

        Args:
            memory: mapped memory, from `map_file` or anonymous.
            steps: number of steps that `records` returns at most.
        """
        self._memory = memory
        self._size = len(memory)
        self._steps = steps
        self._place = _START
        self._max_record = min(MAX_RECORD_BYTES, (self._size - _START) // _RECORDS_OF_RING) - _START
        self._number = self._first = time.time_ns() // 1000
        memory[: _HEADER.size] = _HEADER.pack(RING_MAGIC, self._first, steps)

    def append(self, batch: SampleBatch) -> None:
        """Add a record. The oldest ones are overwritten.

        Raises:
            TypeError, ValueError: an id is not of the kind of `SampleId`, or the ring is closed.
        """
        data = frame(self._number, encode_batch(batch, self._max_record))
        end = self._place + len(data)
        if end > self._size:
            self._place, end = _START, _START + len(data)
        self._memory[self._place : end] = data
        self._place = end
        self._number += 1

    @property
    def appended(self) -> int:
        """Number of records since the beginning."""
        return self._number - self._first

    def records(self) -> list[RingRecord]:
        """Return the records that are not on the store, oldest first.

        Raises:
            ValueError: the ring is closed.
        """
        return _records_in(self._memory[:], "the ring of samples")

    def uploaded(self, number: int) -> None:
        """Mark the records before a number as being on the store."""
        self._memory[: _HEADER.size] = _HEADER.pack(RING_MAGIC, number, self._steps)

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()


def map_file(file: int, size: int) -> mmap.mmap:
    """Reserve a new file's room, and map it.

    Args:
        file: descriptor of an empty file; not needed afterwards.
        size: bytes for records.

    Raises:
        OSError: the disk has no room, or cannot map files.
    """
    total = _START + _rounded(size)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, total)
    else:
        for start in range(0, total, _CHUNK):
            os.write(file, bytes(min(_CHUNK, total - start)))
    return mmap.mmap(file, total)


def map_memory(size: int) -> mmap.mmap:
    """Return memory for a ring without a file, which ends with the process.

    Args:
        size: bytes for records.
    """
    return mmap.mmap(-1, _START + _rounded(size))


def _rounded(size: int) -> int:
    return max(_MIN_BYTES, min(MAX_RING_BYTES, size)) & ~7


def read_ring(data: bytes, name: str) -> list[RingRecord]:
    """Return the intact records of a ring's file that are not on the store, oldest first.

    Args:
        data: the file's bytes.
        name: its name, for messages.

    Raises:
        FormatError: it is not a ring.
    """
    if len(data) < _START or not data.startswith(RING_MAGIC):
        raise FormatError(f"{name} is not a ring of samples", "remove it")
    return _records_in(data, name)


def _records_in(data: bytes, name: str) -> list[RingRecord]:
    magic, first, steps = _HEADER.unpack_from(data)
    if magic != RING_MAGIC:
        raise FormatError(f"{name} is damaged", "remove it")
    records = [
        RingRecord(number, step_of(payload), payload) for number, payload in intact_frames(data[_START:])
    ]
    records.sort(key=lambda record: record.number)
    return [
        record for record in _of_last_steps(records, steps) if record.number >= first and record.step >= 0
    ]


def _of_last_steps(records: list[RingRecord], steps: int) -> list[RingRecord]:
    """Return the newest records that belong to so many different steps."""
    chosen: set[int] = set()
    for index in range(len(records) - 1, -1, -1):
        chosen.add(records[index].step)
        if len(chosen) > steps:
            return records[index + 1 :]
    return records
