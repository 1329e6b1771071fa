from __future__ import annotations

import os
import select
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from watchstep_launch.backends.command import CommandResult, TimedOutError, run

HANGS_SECONDS = 60.0
"""After which a call counts as one that does not return."""


@contextmanager
def left_behind(folder: Path, then: str, seconds: float) -> Iterator[Future[CommandResult]]:
    """A command whose child, in a session of its own, holds both outputs until the block is left."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR)
    script = f'exec 3<"$0"; setsid cat <&3 & {then}'
    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(run, ["sh", "-c", script, str(pipe)], seconds, folder, {})
        finally:
            os.close(end)


def test_a_command_has_ended_though_its_child_holds_its_outputs(tmp_path: Path) -> None:
    with left_behind(tmp_path, "echo running; echo odd >&2; exit 7", HANGS_SECONDS) as answer:
        assert answer.result(HANGS_SECONDS / 2) == CommandResult(7, b"running\n", "odd\n")


def test_a_command_is_ended_in_time_though_its_child_holds_its_outputs(tmp_path: Path) -> None:
    with (
        left_behind(tmp_path, "exec sleep 600", 1.0) as answer,
        pytest.raises(TimedOutError, match=r"no answer in 1 s\n"),
    ):
        answer.result(HANGS_SECONDS / 2)


@pytest.mark.parametrize("begin", ["", "setsid "])
def test_no_process_that_descends_from_a_command_outlives_its_time(tmp_path: Path, begin: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Each process holds the pipe: it ends when all are gone.
    script = f'exec 3>"$0"; {begin}sh -c \'sh -c "echo up >&3; exec sleep 600"; true\' & exec sleep 600'
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(run, ["sh", "-c", script, str(pipe)], 2.0, tmp_path, {})
        with pipe.open("rb", buffering=0) as reader:
            assert isinstance(answer.exception(HANGS_SECONDS), TimedOutError)
            part = b"up"
            while part:
                assert select.select([reader], [], [], HANGS_SECONDS)[0], "a process has outlived it"
                part = reader.read(100)


def test_a_command_that_closes_its_outputs_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(TimedOutError):
        run(["sh", "-c", "exec >&- 2>&-; exec sleep 600"], 0.5, tmp_path, {})
    assert run(["sh", "-c", "exec >&- 2>&-; exit 3"], HANGS_SECONDS, tmp_path, {}) == CommandResult(
        3, b"", ""
    )


def test_no_more_of_an_output_is_kept_than_is_returned(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        answer = run(["head", "-c", "200000000", "/dev/zero"], HANGS_SECONDS, tmp_path, {})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.output == bytes(16 * 1024 * 1024)
    assert peak < 100_000_000
