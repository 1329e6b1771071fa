"""A local store that disappears while a program records is an outage; no new store is created in its place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sdk.faults.accounts import STEPS, accounted, rows_of, spilled, train
from tests.sdk.faults.test_sync import run_sync
from tests.sdk.training import EVERY_STEP
from watchstep import Bounds, Hook, Run, open_run
from watchstep.capture.upload.uploader import spill_folders, sync
from watchstep.errors import ConfigError, MissingStoreError
from watchstep.store.local import MARKER, STORE_ID, StoreIdentity
from watchstep.store.store import Store

CONFIG = replace(
    EVERY_STEP, bounds=Bounds(flush_seconds=0.01, backlog_bytes=1, backlog_seconds=0.0, close_seconds=5.0)
)


class Disk:
    """A folder with a store in it that can be taken away and brought back."""

    def __init__(self, folder: Path, *, leaves_mount_point: bool) -> None:
        self.store, self.elsewhere = folder / "disk" / "runs", folder / "elsewhere"
        self.leaves_mount_point = leaves_mount_point

    def take(self) -> None:
        self.store.rename(self.elsewhere)
        if self.leaves_mount_point:
            self.store.mkdir()

    def bring_back(self) -> None:
        if self.leaves_mount_point:
            self.store.rmdir()  # fails if anything was written there
        assert not self.store.exists()
        self.elsewhere.rename(self.store)


@pytest.fixture(params=[False, True], ids=["moved", "unmounted"])
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Disk:
    return Disk(tmp_path, leaves_mount_point=request.param)


def wait_for_spill(hook: Hook, root: Path) -> None:
    """Until rows are on disk and the fault is reported, which follows at once."""
    while not spilled(root) or "store" not in hook.health["faults"]:
        hook._ending.wake()


def take_once_recorded(hook: Hook, disk: Disk) -> None:
    while not (disk.store / "default" / "r" / "attempts").exists():
        hook._ending.wake()
    disk.take()


def record_until_it_vanishes(disk: Disk) -> Hook:
    """Record a whole training, from its sixth step on without the store."""
    bounds = Bounds(flush_seconds=0.01, close_seconds=0.3)
    hook = Hook(disk.store, run="r", config=replace(CONFIG, bounds=bounds))
    train(hook, each=lambda step: take_once_recorded(hook, disk) if step == 5 else None)
    hook.close()
    return hook


def run_of(store: Path) -> Run:
    return open_run(store / "default" / "r")


def steps_of(store: Path) -> list[int]:
    return run_of(store).steps("train")


def test_what_is_recorded_meanwhile_waits_on_disk_and_is_uploaded_when_the_store_is_back(
    disk: Disk, spill_root: Path, tmp_path: Path
) -> None:
    hook = Hook(disk.store, run="r", config=CONFIG)

    def each(step: int) -> None:
        if step == 5:
            take_once_recorded(hook, disk)
        if step == 10:
            wait_for_spill(hook, spill_root)
            assert "store" in hook.health["faults"]
            assert str(disk.store) in hook.health["faults"]["store"]
        if step == 15:
            disk.bring_back()

    train(hook, each=each)
    hook.close()
    assert hook.health["counts"].get("dropped_rows", 0) == 0
    assert len(run_of(disk.store).rows()) == rows_of(tmp_path / "whole")
    assert steps_of(disk.store) == list(range(STEPS))
    assert spill_folders(spill_root) == []
    assert run_of(disk.store).state() == "completed"


def test_a_store_that_returns_after_the_program_gets_the_rest_by_sync(
    disk: Disk, spill_root: Path, tmp_path: Path
) -> None:
    hook = record_until_it_vanishes(disk)
    assert accounted(hook.health) == rows_of(tmp_path / "whole")
    (folder,) = spill_folders(spill_root)
    done = run_sync()
    assert done.returncode == 1
    assert f"left in {folder}: store {disk.store}" in done.stdout
    disk.bring_back()
    done = run_sync()
    assert (done.returncode, done.stderr) == (0, "")
    assert steps_of(disk.store) == list(range(STEPS))
    assert len(run_of(disk.store).rows()) == rows_of(tmp_path / "whole")


def test_rows_that_others_remove_from_the_disk_do_not_wait_there(
    spill_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path, leaves_mount_point=False)
    bounds = Bounds(flush_seconds=0.01, backlog_bytes=1, backlog_seconds=0.0, close_seconds=0.3)
    hook = Hook(disk.store, run="r", config=replace(CONFIG, bounds=bounds))

    def each(step: int) -> None:
        if step == 5:
            take_once_recorded(hook, disk)

    train(hook, each=each)
    wait_for_spill(hook, spill_root)
    for folder in spill_folders(spill_root):
        shutil.rmtree(folder)
    hook.close()
    assert accounted(hook.health) == rows_of(tmp_path / "whole")
    assert hook.health["counts"]["dropped_rows"] > 0
    left = spill_folders(spill_root)
    if not left:
        assert "spilled_rows" not in hook.health["counts"]
        assert " 0 rows wait on disk, " in caplog.text
    for folder in left:
        assert f"watchstep sync {folder}" in caplog.text


def test_sync_leaves_what_belongs_to_another_store(tmp_path: Path, spill_root: Path) -> None:
    disk = Disk(tmp_path, leaves_mount_point=False)
    record_until_it_vanishes(disk)
    with Hook(disk.store, run="other") as other:  # another program makes a new store in its place
        other.log(loss=1.0)
    (folder,) = spill_folders(spill_root)
    assert "contains another store" in sync(folder).why
    assert not (disk.store / "default" / "r").exists()
    shutil.rmtree(disk.store)
    disk.bring_back()
    assert sync(folder).why == ""
    assert steps_of(disk.store) == list(range(STEPS))


def test_a_store_that_is_emptied_while_a_program_records_is_reported_and_what_follows_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "runs"
    hook = Hook(store, run="r", config=replace(EVERY_STEP, bounds=Bounds(flush_seconds=0.01)))

    def empty(step: int) -> None:
        if step == 5:
            while not list(store.rglob("*.arrow")):
                hook._ending.wake()
            (store / "default").rename(tmp_path / "removed")  # as rm -rf runs/* does: the marker stays

    train(hook, each=empty)
    hook.close()
    run = run_of(store)
    assert (run.state(), len(run.attempts)) == ("completed", 1)
    assert set(range(8, STEPS)) <= set(run.steps("train"))
    assert 0 not in run.steps("train")
    assert "its document was removed during the recording" in hook.health["faults"]["emptied run"]
    assert sum("was removed" in message for message in caplog.messages) == 1


def test_a_marker_is_put_once_and_shown_in_no_listing(tmp_path: Path) -> None:
    for run in ("a", "b"):
        with Hook(tmp_path / "runs", run=run) as hook:
            hook.log(loss=1.0)
    marker = tmp_path / "runs" / MARKER
    assert len(marker.read_text().strip()) == 32
    assert sorted(entry.name for entry in (tmp_path / "runs").iterdir()) == [MARKER, "default"]


def test_a_marker_that_is_a_named_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MARKER)
    with pytest.raises(MissingStoreError, match="is not a regular file"):
        Store.open(tmp_path, create=True, identity=StoreIdentity())


LAUNCHED = """
import sys, watchstep
from pathlib import Path
store, elsewhere, leaves_mount_point = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True"
store.rename(elsewhere)
if leaves_mount_point:
    store.mkdir()
bounds = watchstep.Bounds(close_seconds=0.3, flush_seconds=0.01)
with watchstep.Hook(store, config=watchstep.CaptureConfig(bounds=bounds, system=None)) as hook:
    for step in range(20):
        hook.log(loss=float(step))
        hook.step()
"""


def launch(disk: Disk, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program whose store is taken away between its launch and its first write."""
    program = folder / "program.py"
    program.write_text(LAUNCHED)
    watchstep = Path(sys.executable).with_name("watchstep")
    command: list[str | Path] = [watchstep, "run", "--store", disk.store, "--run", "r", "--"]
    command += [sys.executable, program, disk.store, disk.elsewhere, str(disk.leaves_mount_point)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_a_store_that_vanishes_between_the_launch_and_the_first_write_is_not_made_anew(
    disk: Disk, tmp_path: Path, spill_root: Path
) -> None:
    disk.store.parent.mkdir()
    done = launch(disk, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not everything reached the store" in done.stderr
    (folder,) = spill_folders(spill_root)
    assert sync(folder).why != ""
    disk.bring_back()
    assert sync(folder).why == ""
    assert steps_of(disk.store) == list(range(STEPS))


def test_the_identity_of_a_launch_is_for_the_store_of_the_launch_alone() -> None:
    marker = "0123456789abcdef" * 2
    passed = {STORE_ID: f"{marker} file:///disk/my runs"}
    assert StoreIdentity.of_launch("file:///disk/my runs", passed).id == marker
    assert StoreIdentity.of_launch("file:///disk/other", passed).id == ""
    assert StoreIdentity.of_launch("file:///disk/my runs", {}).id == ""
    with pytest.raises(ConfigError, match="WATCHSTEP_STORE_ID='mine' is not an id and a URL"):
        StoreIdentity.of_launch("file:///disk/my runs", {STORE_ID: "mine"})


@pytest.mark.parametrize("accepted", ["id", "new"])
def test_sync_uploads_to_another_store_that_the_user_accepts(
    tmp_path: Path, spill_root: Path, accepted: str
) -> None:
    disk = Disk(tmp_path, leaves_mount_point=True)
    record_until_it_vanishes(disk)
    (folder,) = spill_folders(spill_root)
    if accepted == "id":
        Store.open(disk.store, create=True, identity=StoreIdentity()).put("default/other/run.json", b"{}")
    done = run_sync("--accept-store", "0" * 32)
    assert (done.returncode, f"left in {folder}: store {disk.store}" in done.stdout) == (1, True)
    identity = (disk.store / MARKER).read_text().strip() if accepted == "id" else "new"
    done = run_sync("--accept-store", identity)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert not folder.exists()
    assert steps_of(disk.store)[-1] == STEPS - 1
    done = run_sync("--accept-store", "another")
    assert "is neither the id of a store nor 'new'" in done.stderr


def test_a_new_store_is_created_for_the_data_of_one_store_and_of_all_its_ranks(
    tmp_path: Path, spill_root: Path
) -> None:
    replaced, away = (Disk(tmp_path / name, leaves_mount_point=True) for name in ("replaced", "away"))
    record_until_it_vanishes(replaced)
    (first,) = spill_folders(spill_root)
    second = shutil.copytree(first, spill_root / "second")
    record_until_it_vanishes(away)
    (unrelated,) = {*spill_folders(spill_root)} - {first, second}
    done = run_sync("--accept-store", "new")
    assert done.returncode != 0
    assert "3 spill folders are for several stores" in done.stderr
    assert not list(away.store.iterdir()) + list(replaced.store.iterdir())
    unrelated.rename(tmp_path / "unrelated")
    assert run_sync("--accept-store", "new").returncode == 0
    assert spill_folders(spill_root) == []
    assert steps_of(replaced.store)[-1] == STEPS - 1


def test_jobs_that_begin_while_a_store_in_use_is_away_wait_for_it_on_each_rank(
    tmp_path: Path, spill_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    disk = Disk(tmp_path, leaves_mount_point=True)
    user = StoreIdentity()
    Store.open(disk.store, create=True, identity=user)
    disk.take()
    program = tmp_path / "program.py"
    program.write_text(WAITING)
    names = {"WORLD_SIZE": "2", "WATCHSTEP_RUN": "r", "WATCHSTEP_ATTEMPT": "a"}
    ranks = [
        subprocess.Popen(
            [sys.executable, program, disk.store, str(tmp_path / "back")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **names, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert "MissingStoreError" in rank.stdout.readline()
    disk.bring_back()
    (tmp_path / "back").touch()
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    for rank in ranks:
        assert rank.stdout is not None
        rank.stdout.close()
    assert spill_folders(spill_root) == []
    run = run_of(disk.store)
    assert (run.state(), sorted(set(run.rows().worker.tolist()))) == ("completed", [0, 1])


WAITING = """
import sys, watchstep
from pathlib import Path
bounds = watchstep.Bounds(flush_seconds=0.01)
with watchstep.Hook(sys.argv[1], config=watchstep.CaptureConfig(bounds=bounds, system=None)) as hook:
    hook.log(loss=1.0)
    hook.step()
    while "store" not in hook.health["faults"]:
        hook._ending.wake()
    print(hook.health["faults"]["store"], flush=True)
    while not Path(sys.argv[2]).exists():
        hook._ending.wake()
    hook.log(loss=2.0)
    hook.step()
"""
