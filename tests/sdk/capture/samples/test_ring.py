"""The ring of samples has the newest records, whatever is appended, and survives the death of its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.sdk.format.test_samples import IDS
from watchstep import Bounds, CaptureConfig, Hook
from watchstep.capture.samples.ring import RingRecord, SampleRing, map_file, map_memory, read_ring
from watchstep.capture.upload.uploader import spill_folders, sync
from watchstep.errors import FormatError
from watchstep.format.samples.samples import SampleBatch, SampleId, decode_batch
from watchstep.reading.run import open_run

BYTES = 4096


def _decoded(records: list[RingRecord]) -> list[SampleBatch]:
    return [decode_batch(record.payload, "ring") for record in records]


@given(st.lists(IDS, max_size=40), st.integers(1, 20))
@settings(max_examples=examples(60), deadline=None)
def test_a_ring_has_the_newest_batches(appended: list[list[SampleId]], steps: int) -> None:
    """Encoding, the ring and decoding return a suffix of what was appended, of at most so many steps and bytes."""
    ring = SampleRing(map_memory(BYTES), steps)
    for number, ids in enumerate(appended):
        ring.append(SampleBatch(number // 2, tuple(ids), "Numbers", 0, number))
    found = _decoded(ring.records())
    assert ring.appended == len(appended)
    assert [batch.number for batch in found] == list(range(len(appended) - len(found), len(appended)))
    for batch in found:
        assert list(batch.ids) == appended[batch.number][: len(batch.ids)]
        assert len(batch.ids) + batch.left_out == len(appended[batch.number])
    assert len({batch.step for batch in found}) <= steps
    if appended:
        assert found


@pytest.mark.parametrize("cut", [1, 17, 40, 100])
def test_a_torn_record_is_dropped(tmp_path: Path, cut: int) -> None:
    """A record that was being written at the end has an invalid checksum; the others remain."""
    file = tmp_path / "ring"
    with file.open("w+b") as opened:
        ring = SampleRing(map_file(opened.fileno(), 65536), 100)
    for step in range(5):
        ring.append(SampleBatch(step, tuple(range(0, 500, 7))))
    last = len(b"".join([file.read_bytes().rstrip(b"\0")]))
    data = bytearray(file.read_bytes())
    data[last - cut : last] = bytes(cut)
    assert [record.step for record in read_ring(bytes(data), "ring")] == [0, 1, 2, 3]
    ring.uploaded(ring.records()[2].number)
    assert [record.step for record in read_ring(file.read_bytes(), "ring")] == [2, 3, 4]
    with pytest.raises(FormatError, match="other is not a ring"):
        read_ring(b"x" * 100, "other")


KILLED = """
import os, signal, sys
import watchstep
hook = watchstep.Hook(sys.argv[1], run="r")
for step in range(20):
    hook.samples([step * 10, step * 10 + 1])
    hook.samples({"file": "shard.tar", "offset": step})
    hook.log(loss=1.0)
    hook.step()
    if step == 10 and len(sys.argv) > 2:
        while hook.health["counts"].get("objects", 0) == 0:
            pass
os.kill(os.getpid(), signal.SIGKILL)
"""

FOLLOWING = """
import sys, time
import watchstep
with watchstep.Hook(sys.argv[1], run="r", first_step=30) as hook:
    hook.log(loss=1.0)
    hook.step()
    until = time.monotonic() + 20
    while hook.health["counts"].get("sample_uploads", 0) == 0 and time.monotonic() < until:
        pass
"""


def _run(program: str, *arguments: str, spill: Path) -> int:
    environment = {**os.environ, "WATCHSTEP_SPILL": str(spill)}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, check=False
    ).returncode


def _check_killed(store: Path) -> None:
    run = open_run(store / "default" / "r")
    for step in range(20):
        batches = run.samples(step)
        assert [batch.ids for batch in batches] == [
            (step * 10, step * 10 + 1),
            ({"file": "shard.tar", "offset": step},),
        ]
    assert run.damaged == {}


@pytest.mark.ci
def test_a_killed_process_leaves_its_samples_to_sync(tmp_path: Path) -> None:
    """After SIGKILL the ring is in its folder; ``watchstep sync`` uploads it and removes the folder."""
    assert _run(KILLED, str(tmp_path / "store"), "wait", spill=tmp_path / "spill") == -signal.SIGKILL
    folders = [folder for folder in spill_folders(tmp_path / "spill") if "-samples" in folder.name]
    assert len(folders) == 1
    assert (folders[0] / "samples.ring").stat().st_mode & 0o777 == 0o600
    synced = sync(folders[0])
    assert (synced.objects, synced.why) == (1, "")
    assert not folders[0].exists()
    _check_killed(tmp_path / "store")


@pytest.mark.ci
def test_the_next_recording_of_the_run_uploads_them(tmp_path: Path) -> None:
    """Resuming the run on the same machine uploads what the killed process left."""
    store = str(tmp_path / "store")
    assert _run(KILLED, store, "wait", spill=tmp_path / "spill") == -signal.SIGKILL
    assert _run(FOLLOWING, store, spill=tmp_path / "spill") == 0
    assert not [folder for folder in spill_folders(tmp_path / "spill") if "-samples" in folder.name]
    _check_killed(tmp_path / "store")


def test_a_store_that_does_not_answer_leaves_them_to_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a closed recording is free, although its process goes on; its samples are uploaded once the store is there."""
    monkeypatch.setenv("WATCHSTEP_SPILL", str(tmp_path / "spill"))
    (tmp_path / "store").write_text("no folder")
    bounds = Bounds(close_seconds=0.3)
    with Hook(tmp_path / "store", run="r", config=CaptureConfig(bounds=bounds, system=None)) as hook:
        hook.samples([5, 6])
        hook.step()
    (tmp_path / "store").unlink()
    (tmp_path / "store").mkdir()
    folders = [folder for folder in spill_folders(tmp_path / "spill") if "-samples" in folder.name]
    synced = [sync(folder) for folder in folders]
    while synced[0].why.startswith("in use"):  # the thread lets go of it
        synced = [sync(folder) for folder in folders]
    assert [(done.objects, done.why) for done in synced] == [(1, "")]
    assert open_run(tmp_path / "store" / "default" / "r").samples(0)[0].ids == (5, 6)
