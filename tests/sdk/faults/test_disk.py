"""A full disk: of the store, of the spill folder, of both."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sdk.faults.accounts import LONGEST_STEP, accounted, plain_losses, rows_of, spilled, train
from tests.sdk.training import EVERY_STEP
from watchstep import Bounds, CaptureConfig, Hook, open_run
from watchstep.capture.upload.uploader import spill_folders, sync

STEPS = 200
QUICK = replace(EVERY_STEP, bounds=Bounds(flush_seconds=0.001, backlog_bytes=10_000, close_seconds=0.5))


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A separate file system of so many bytes."""
    place.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"no file system can be mounted here: {mount.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def enlarge(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", place], check=True)


def record(store: Path, config: CaptureConfig = QUICK) -> Hook:
    hook = Hook(store, run="r", config=config)
    watched = train(hook, STEPS)
    hook.close()
    assert watched.losses == plain_losses(STEPS)
    assert watched.longest < LONGEST_STEP
    return hook


def temporary_files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and "#" in file.name]


def test_a_full_store_is_made_up_for_once_there_is_room(tmp_path: Path, spill_root: Path) -> None:
    with small_disk(tmp_path / "store", "64k") as store:
        hook = record(store)
        counts = hook.health["counts"]
        assert counts["spilled_rows"] > 0
        assert accounted(hook.health) == rows_of(tmp_path, STEPS)
        run = open_run(hook.run_url)
        assert (run.damaged, len(run.rows())) == ({}, counts["rows"])
        enlarge(store)
        (folder,) = spill_folders(spill_root)
        assert sync(folder).why == ""
        run = open_run(hook.run_url)
        assert run.steps() == list(range(STEPS))
        assert (run.damaged, len(run.rows())) == ({}, accounted(hook.health))
        assert [end.state for end in run.ends()] == ["completed"]
        assert not temporary_files(store)


def test_a_full_spill_disk_is_counted_and_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "store", "64k") as store, small_disk(tmp_path / "spill", "32k") as spill:
        monkeypatch.setenv("WATCHSTEP_SPILL", str(spill))
        hook = record(store)
        counts = hook.health["counts"]
        assert counts["dropped_rows"] > 0
        assert "No space left" in hook.health["faults"]["spill"]
        assert accounted(hook.health) == rows_of(tmp_path, STEPS)
        run = open_run(hook.run_url)
        assert (run.damaged, len(run.rows())) == ({}, counts.get("rows", 0))
        assert not [file for file in spilled(spill) if file.name.startswith(".")]


def test_a_spill_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WATCHSTEP_SPILL", str(tmp_path / "file" / "spill"))
    (tmp_path / "store").write_text("in the way, too")
    hook = record(tmp_path / "store")
    assert "NotADirectoryError" in hook.health["faults"]["spill"]
    assert hook.health["counts"]["dropped_rows"] == accounted(hook.health) == rows_of(tmp_path, STEPS)
