from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from watchstep.errors import ConfigError, NotFoundError
from watchstep.platform.process import ProcessIdentity, boot_id


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
