"""``watchstep sync``: safe to repeat, concurrently with another or with the recorder itself, and after an interruption."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sdk.faults.accounts import STEPS, on_server, spilled, train
from tests.sdk.store.faulty_s3 import FaultyS3
from tests.sdk.training import EVERY_STEP
from watchstep import Bounds, Hook
from watchstep.capture.upload.spill import ABOUT, END
from watchstep.capture.upload.uploader import spill_folders, sync

OFFLINE = replace(EVERY_STEP, bounds=Bounds(flush_seconds=0.01, backlog_bytes=1, close_seconds=0.3))


def record_offline(server: FaultyS3) -> Hook:
    server.fault = "unavailable"
    hook = Hook(config=OFFLINE)
    train(hook)
    hook.close()
    server.fault = "none"
    return hook


def be_second_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "WATCHSTEP_ATTEMPT": "a1"}.items():
        monkeypatch.setenv(name, value)


def run_sync(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "watchstep.command", "sync", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_one_line_of_the_log_states_where_the_rest_is(
    server: FaultyS3, spill_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.fault = "denied"
    hook = Hook(config=replace(EVERY_STEP, bounds=Bounds(flush_seconds=60.0, close_seconds=0.3)))
    train(hook)
    hook.close()
    (folder,) = spill_folders(spill_root)
    assert sum(f"watchstep sync {folder}" in message for message in caplog.messages) == 1
    assert sum(str(folder) in message for message in caplog.messages) == 1


def test_the_command_states_what_it_did(server: FaultyS3, spill_root: Path) -> None:
    record_offline(server)
    done = run_sync()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("default/r: ")
    assert on_server(server).steps == list(range(STEPS))
    again = run_sync()
    assert (again.returncode, again.stdout) == (0, f"nothing to upload in {spill_root}\n")


def test_the_command_states_what_is_left_and_why(server: FaultyS3, spill_root: Path) -> None:
    record_offline(server)
    server.fault = "denied"
    (folder,) = spill_folders(spill_root)
    done = run_sync(str(folder))
    assert done.returncode == 1
    assert f"left in {folder}: store s3://bucket/runs: access denied" in done.stdout
    server.fault = "none"
    assert run_sync(str(folder)).returncode == 0
    assert run_sync(str(folder)).returncode == 2


def test_several_at_once_upload_everything_once(server: FaultyS3, spill_root: Path) -> None:
    record_offline(server)
    (folder,) = spill_folders(spill_root)
    with ThreadPoolExecutor(4) as pool:
        done = [finished for finished in pool.map(sync, [folder] * 4) if finished.objects]
    assert len(done) == 1
    found = on_server(server)
    assert (found.steps, found.seqs) == (list(range(STEPS)), list(range(len(found.seqs))))


def test_broken_off_before_anything_was_removed_and_done_again(
    server: FaultyS3, spill_root: Path, tmp_path: Path
) -> None:
    record_offline(server)
    (folder,) = spill_folders(spill_root)
    as_it_was = shutil.copytree(folder, tmp_path / "copy")
    assert sync(folder).why == ""
    uploaded = dict(server.objects)
    assert sync(as_it_was).why == ""
    assert server.objects == uploaded


def test_a_folder_that_does_not_state_whose_it_is(spill_root: Path) -> None:
    folder = spill_root / "broken"
    folder.mkdir(0o700)
    (folder / "spill.json").write_text("{}")
    (folder / "lock").touch(0o600)
    assert "is not a spill folder's file" in sync(folder).why
    assert folder.is_dir()


def test_a_folder_in_use_is_skipped(server: FaultyS3, spill_root: Path) -> None:
    server.fault = "unavailable"
    hook = Hook(config=OFFLINE)
    train(hook)
    while not spilled(spill_root):
        hook._ending.wake()
    (folder,) = spill_folders(spill_root)
    assert sync(folder).why.startswith("in use")
    server.fault = "none"
    hook.close()
    assert sync(folder) == replace(sync(folder), why="")
    assert on_server(server).steps == list(range(STEPS))


def test_two_processes_that_never_reached_the_store_are_two_attempts(
    server: FaultyS3, spill_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")
    for _ in range(2):
        record_offline(server)
    assert run_sync().returncode == 0
    assert sorted(on_server(server).attempts) == ["a1", "a1.2"]
    assert len(on_server(server).ends) == 2


def test_a_rank_that_never_reached_the_store_takes_no_live_ones_name(
    server: FaultyS3, spill_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_second_of_two_ranks(monkeypatch)
    record_offline(server)
    assert run_sync().returncode == 0
    found = on_server(server)
    assert found.attempts == ["a1"]
    (claim,) = (data for path, data in server.objects.items() if path.endswith("/attempts/a1.json"))
    assert json.loads(claim)["late"] is True
    (end,) = found.ends
    assert end.writer.startswith("w1-")
    assert any(f"/{end.writer}/" in path for path in server.objects)


def test_a_later_document_of_another_process_of_the_rank_is_retained(
    server: FaultyS3, spill_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_second_of_two_ranks(monkeypatch)
    record_offline(server)
    record_offline(server)
    earlier, later = sorted(
        spill_folders(spill_root), key=lambda folder: (folder / "end.json").stat().st_mtime_ns
    )
    for folder in (later, earlier):
        assert sync(folder).why == ""
    (end,) = on_server(server).ends
    written = {path.split("/")[-2] for path in server.objects if "/stats/" in path}
    assert end.writer in written
    assert len(written) == 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("place", ["", "watchstep-spill-0"])
def test_what_another_user_planted_in_the_temporary_folder_is_not_uploaded(
    server: FaultyS3,
    spill_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    record_offline(server)
    (folder,) = spill_folders(spill_root)
    temporary = tmp_path / "temporary"
    planted = temporary / place
    planted.mkdir(parents=True)
    own = Path(shutil.move(folder, temporary / "own"))
    for file in sorted(own.iterdir()):
        shutil.copy(file, planted / file.name)
    for path in (temporary, planted, *(entry for entry in planted.iterdir() if entry.is_file())):
        os.chown(path, 65534, 65534)
    names = {entry.name for entry in planted.iterdir()}
    monkeypatch.delenv("WATCHSTEP_SPILL")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-cache"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    assert run_sync(str(planted)).returncode == (0 if not place else 1)
    if place:  # the recorder itself may write its documents late
        assert not any("/stats/" in path for path in server.objects)
    done = run_sync()
    assert (done.returncode, done.stderr) == (0, "")
    assert not own.exists()
    assert on_server(server).steps == list(range(STEPS))
    assert {entry.name for entry in planted.iterdir()} == names - {"own"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [ABOUT, END])
def test_a_named_pipe_in_a_spill_folder_is_refused_without_waiting(
    tmp_path: Path, spill_root: Path, server: FaultyS3, name: str
) -> None:
    server.fault = "unavailable"
    with Hook(config=replace(OFFLINE, system=None)) as hook:
        hook.log(loss=1.0)
    server.fault = "none"
    (folder,) = spill_folders(spill_root)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert "not a regular file" in sync(folder).why
