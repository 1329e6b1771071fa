"""The folder for locks and sockets is this user's alone, and a process is identified by its start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from watchstep.errors import ConfigError, NotFoundError
from watchstep.platform.folders import PrivateFolder
from watchstep.platform.process import ProcessIdentity, boot_id


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The candidate folders, in order; none exists yet."""
    for name in ("runtime", "tmp", "shm", "cache"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr("watchstep.platform.folders._SHARED_MEMORY", tmp_path / "shm")
    user = f"watchstep-{os.getuid()}"
    return [
        tmp_path / "runtime/watchstep", tmp_path / "tmp" / user, tmp_path / "shm" / user, tmp_path / "cache/watchstep/run"
    ]  # fmt: skip


def spoil(place: Path, how: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if how == "file":
        place.write_text("")
    elif how == "link":
        place.symlink_to(place.parent)
    elif how == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
        place.chmod(0o777)


@pytest.mark.parametrize("how", ["file", "link", "pipe", "open to others"])
@pytest.mark.parametrize("spoilt", [0, 1, 2, 3, 4])
def test_the_first_place_that_is_private_is_used(places: list[Path], spoilt: int, how: str) -> None:
    for place in places[:spoilt]:
        spoil(place, how)
    if spoilt == len(places):
        with pytest.raises(PermissionError) as refusal:
            PrivateFolder.open()
        assert all(str(place) in str(refusal.value) for place in places)
        return
    folder = PrivateFolder.open()
    assert folder.path == places[spoilt]
    assert all(str(place) in folder.refused for place in places[:spoilt])
    assert folder.path.stat().st_mode & 0o077 == 0
    folder.close()


@pytest.mark.parametrize("mode", [0o755, None])
def test_a_runtime_folder_of_someone_else_is_no_fault(
    places: list[Path], monkeypatch: pytest.MonkeyPatch, mode: int | None
) -> None:
    if mode is None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/none")
    else:
        places[0].parent.chmod(mode)
    folder = PrivateFolder.open()
    assert (folder.path, folder.refused) == (places[1], "")
    folder.close()


def test_a_folder_that_is_moved_away_is_not_followed(places: list[Path]) -> None:
    folder = PrivateFolder.open()
    folder.path.rename(places[1])
    folder.path.mkdir()
    os.close(folder.open_file("lock"))
    assert not list(folder.path.iterdir())
    assert folder.inode("lock") == (places[1] / "lock").stat().st_ino
    folder.close()


@pytest.mark.parametrize("how", ["link", "pipe", "open to others"])
def test_what_is_no_regular_file_is_not_opened(how: str) -> None:
    folder = PrivateFolder.open()
    spoil(folder.path / "lock", how)
    with pytest.raises(OSError):  # noqa: PT011 - of several kinds
        folder.open_file("lock")
    folder.close()
    folder.close()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until its input ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_this_process_is_itself_and_runs() -> None:
    identity = ProcessIdentity.of(os.getpid())
    assert identity == ProcessIdentity.of(os.getpid())
    assert identity.pid == os.getpid()
    assert identity.boot == boot_id()
    assert identity.is_running()


def test_another_start_or_boot_with_the_same_id_is_another_process() -> None:
    identity = ProcessIdentity.of(os.getpid())
    assert not replace(identity, start_ticks=identity.start_ticks + 1).is_running()
    assert not replace(identity, boot="another").is_running()


def test_a_killed_process_does_not_run_even_as_a_zombie(child: subprocess.Popen[bytes]) -> None:
    identity = ProcessIdentity.of(child.pid)
    assert identity.is_running()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped: a zombie
    assert not identity.is_running()
    child.wait()
    assert not identity.is_running()
    with pytest.raises(NotFoundError, match=f"process {child.pid} is not running"):
        ProcessIdentity.of(child.pid)


def test_a_name_with_brackets_and_spaces_does_not_confuse_the_fields(tmp_path: Path) -> None:
    program = tmp_path / "a) S 1 (b"
    program.symlink_to("/bin/cat")
    with subprocess.Popen([str(program)], stdin=subprocess.PIPE) as process:
        identity = ProcessIdentity.of(process.pid)
        assert identity.is_running()
        assert identity.start_ticks >= ProcessIdentity.of(os.getpid()).start_ticks
        process.kill()


def test_a_system_without_proc_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "read_text", missing)
    for ask in (boot_id, lambda: ProcessIdentity.of(os.getpid())):
        with pytest.raises(
            ConfigError, match=r"cannot be identified on this system .*\n  hint: run local jobs on Linux"
        ):
            ask()
