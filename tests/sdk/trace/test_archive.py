"""Hostile zip archives: sizes are bounded where `zipfile` does not bound them."""

from __future__ import annotations

import io
import json
import struct
import zipfile

import pytest

from tests.processes import traced_memory
from watchstep.errors import FormatError
from watchstep.store.store import Store
from watchstep.trace.archive import MAX_DIRECTORY_BYTES
from watchstep.trace.indexed_trace import TraceArchive
from watchstep.trace.trace_file import read_trace

MEBIBYTE = 2**20


def bomb(method: int) -> bytes:
    """A member of 64 MiB that states 100 bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        with archive.open("operations.jsonl", "w") as member:
            for _ in range(64):
                member.write(bytes(MEBIBYTE))
        archive.writestr("trace.json", json.dumps({"version": 2}))
    data = bytearray(content.getvalue())
    struct.pack_into("<I", data, data.find(b"PK\1\2") + 24, 100)
    return bytes(data)


def with_zip64_directory(size: int) -> bytes:
    """An archive whose zip64 record states a directory of a size, and whose end record states none."""
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, size, 0)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, size, 1)
    return bytes(size) + record + locator + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, 0, 0, 0)


def open_on_store(store: Store, content: bytes) -> TraceArchive:
    store.put("traces/a", content)
    return TraceArchive(store, "traces/a", len(content))


@pytest.mark.ci
@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_methods_without_a_bound_are_refused(method: int, folder_store: Store) -> None:
    content = bomb(method)
    with traced_memory() as memory:
        with pytest.raises(FormatError, match="not by DEFLATE"):
            read_trace(io.BytesIO(content))
        with pytest.raises(FormatError, match="not by DEFLATE"):
            open_on_store(folder_store, content)
    assert memory.peak < 8 * MEBIBYTE


def test_a_member_that_is_longer_than_stated_is_refused(folder_store: Store) -> None:
    content = bomb(zipfile.ZIP_DEFLATED)
    with pytest.raises(FormatError):
        read_trace(io.BytesIO(content))
    with pytest.raises(FormatError):
        open_on_store(folder_store, content).operations()


def test_a_large_directory_of_a_zip64_record_is_refused(folder_store: Store) -> None:
    content = with_zip64_directory(MAX_DIRECTORY_BYTES + 1)
    with pytest.raises(FormatError, match="bytes of names"):
        read_trace(io.BytesIO(content))
    with pytest.raises(FormatError, match="bytes of names"):
        open_on_store(folder_store, content)


def test_a_small_file_cannot_have_many_gigabytes_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watchstep.trace.trace_file._SURE_TENSOR_BYTES", 2**16)
    content = io.BytesIO()
    head = {
        "version": 2, "mode": "full_tensors", "program": "", "left_out": 0, "losses": [], "notes": [], "raised": [],
        "stacks": [], "sources": {},
    }  # fmt: skip
    tensor = [0, [2**20], "float32", "cpu", "", None, None, None, "<f4"]
    line = {"index": 0, "step": 0, "name": "a", "phase": "forward", "inputs": [], "outputs": [tensor]}
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("trace.json", json.dumps(head))
        archive.writestr("operations.jsonl", json.dumps(line) + "\n")
        archive.writestr("values/0-0", bytes(4 * 2**20))
    with pytest.raises(FormatError, match="the limit is"):
        read_trace(content)
