"""Records of TensorFlow: what is written is read, and damage is found."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.errors import FormatError
from watchstep.format.event_files import tf_records
from watchstep.format.event_files.tf_records import RecordFile, record


def crc32c(data: bytes) -> int:
    """CRC-32C bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def read(path: Path, limit: int = 2**20) -> tuple[list[bytes], bool]:
    with path.open("rb") as file:
        records = RecordFile(file, str(path), limit)
        return list(records), records.is_truncated


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "file"


def test_the_checksum_of_the_standard() -> None:
    assert tf_records._crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("size", [0, 1, 3, 4, 63, 64, 65, 255, 256, 257, 259, 260, 512, 515, 1000])
def test_checksums_of_all_sizes(size: int) -> None:
    data = bytes(number * 7 % 251 for number in range(size))
    assert tf_records._crc32c(data) == crc32c(data)


def test_large_data_is_looked_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(number * 7 % 251 for number in range(3000))
    monkeypatch.setattr(tf_records, "_PIECE", 512)
    assert tf_records._crc32c(data) == crc32c(data)


@given(contents=st.lists(st.binary(max_size=600), max_size=5))
def test_records_are_read_as_they_were_written(contents: list[bytes], path: Path) -> None:
    path.write_bytes(b"".join(map(record, contents)))
    assert read(path) == (contents, False)


@given(
    contents=st.lists(st.binary(max_size=100), min_size=1, max_size=4),
    share=st.floats(0, 1, exclude_max=True),
)
def test_a_file_that_ends_within_a_record(contents: list[bytes], share: float, path: Path) -> None:
    whole = b"".join(map(record, contents))
    cut = int(share * len(whole))
    path.write_bytes(whole[:cut])
    found, is_truncated = read(path)
    assert found == contents[: len(found)]
    assert is_truncated == (cut != sum(len(record(content)) for content in found))


@given(content=st.binary(min_size=1, max_size=300), place=st.integers(0, 2**40), change=st.integers(1, 255))
def test_a_changed_byte_is_found(content: bytes, place: int, change: int, path: Path) -> None:
    whole = bytearray(record(content))
    whole[place % len(whole)] ^= change
    path.write_bytes(whole)
    with pytest.raises(FormatError, match="wrong checksum"):
        read(path)


def test_sizes_are_checked_before_they_are_read(path: Path) -> None:
    path.write_bytes(record(b"x" * 100))
    with pytest.raises(FormatError, match="100 bytes; the limit is 99"):
        read(path, 99)
    head = struct.pack("<Q", 2**62)
    path.write_bytes(head + tf_records._checksum(head) + b"xxxx")
    assert read(path) == ([], True)
