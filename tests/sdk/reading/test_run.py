"""Reading a run: while it runs, after its end, after a resume, with damage, on a folder and on S3."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path

import pytest

from tests.conftest import S3
from watchstep import Bounds, CaptureConfig, Hook, Run, open_run
from watchstep.errors import BadNameError, ConfigError, NotFoundError, StoreError
from watchstep.format.layout import SCHEMA_VERSION
from watchstep.store.store import Store


def record(url: str | Path, steps: int, *, first: int = 0, run: str = "r") -> Hook:
    hook = Hook(url, run=run)
    hook._recorder.step = first
    for step in range(first, first + steps):
        hook.log(loss=float(step), accuracy=step / 10)
        hook.step()
    hook.close()
    return hook


def test_filters(tmp_path: Path) -> None:
    run = open_run(record(tmp_path, 3).run_url)
    assert run.tensors(regex="acc") == ["accuracy"]
    assert run.tensors(collection="losses") == ["loss"]
    assert run.tensors(collection="losses", regex="acc") == []
    with pytest.raises(ConfigError, match="regex"):
        run.tensors(regex="(")


def test_a_resumed_run_shows_the_newest_attempt_of_each_step(tmp_path: Path) -> None:
    record(tmp_path, 10)
    record(tmp_path, 4, first=6)
    run = open_run(tmp_path / "default" / "r")
    assert run.steps() == list(range(10))
    assert run.losses().num_rows == 10
    first, second = run.attempts
    assert len(run.rows(first)) == 20
    assert sorted(set(run.rows(second).step.tolist())) == [6, 7, 8, 9]


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    hook = Hook(tmp_path, run="r")
    for value in (1.5, math.inf, -math.inf, math.nan, -2.0):
        hook.log(loss=value)
        hook.step()
    hook.close()
    values = open_run(hook.run_url).losses()["value"].to_pylist()
    assert math.isnan(values.pop(3))
    assert values == [1.5, math.inf, -math.inf, -2.0]


def test_a_damaged_segment_hides_no_other(tmp_path: Path) -> None:
    for _ in range(2):
        record(tmp_path, 3)
    (victim, _) = sorted((tmp_path / "default" / "r" / "stats").rglob("*.arrow"))
    victim.write_bytes(victim.read_bytes()[:-40])
    run = open_run(tmp_path / "default" / "r")
    assert run.steps() == [0, 1, 2]
    (name,) = run.damaged
    assert name.endswith(".arrow")


def test_waiting_for_steps_of_a_run_that_continues(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=CaptureConfig(bounds=Bounds(flush_seconds=0.01)))
    hook.log(loss=0.0)
    hook.step()
    run = wait_until_there(hook)
    reading = threading.Event()

    def go_on() -> None:
        reading.wait(30)
        for step in range(1, 20):
            hook.log(loss=float(step))
            hook.step()

    writer = threading.Thread(target=go_on)
    writer.start()
    reading.set()
    assert run.wait_for_steps([0, 10, 19], timeout=60) == [0, 10, 19]
    writer.join()
    hook.close()
    assert run.wait_for_steps([5, 1000]) == [5]


def wait_until_there(hook: Hook) -> Run:
    while True:
        try:
            return open_run(hook.run_url)
        except NotFoundError:
            hook._session.queue.wake.set()


def test_waiting_has_an_end(tmp_path: Path) -> None:
    hook = Hook(tmp_path)
    run = wait_until_there(hook)
    assert run.wait_for_steps([3], timeout=0.05) == []
    hook.close()


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("nowhere/default/r", NotFoundError, "not found"),
        ("{store}/default/other", NotFoundError, "not found"),
        ("r", NotFoundError, "not found"),
        ("{store}/default/..r", BadNameError, "run name"),
        ("ftp://host/default/r", ConfigError, "unknown scheme"),
        ("s3://missing-bucket/default/r", StoreError, "no such bucket"),
    ],
)
def test_a_run_that_cannot_be_read(
    tmp_path: Path, s3: S3, url: str, error: type[Exception], message: str
) -> None:
    record(tmp_path, 1)
    with pytest.raises(error, match=message) as caught:
        open_run(url.format(store=tmp_path))
    assert "hint:" in str(caught.value)


def test_what_was_not_recorded_is_named(tmp_path: Path) -> None:
    run = open_run(record(tmp_path, 2).run_url)
    with pytest.raises(NotFoundError, match="'nope'"):
        run.tensor("nope")
    with pytest.raises(NotFoundError, match="no full tensors were saved"):
        run.tensor("loss").value(1)


def test_a_run_of_a_later_version_is_refused(tmp_path: Path) -> None:
    record(tmp_path, 1)
    store = Store.open(tmp_path).child("default/r")
    store.put("run.json", store.get("run.json").replace(b'"schema": %d' % SCHEMA_VERSION, b'"schema": 99'))
    with pytest.raises(Exception, match="newer watchstep"):
        open_run(tmp_path / "default" / "r")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pattern", ["attempts/*.json", "end/*/0.json", "stats/*/*/*/*.arrow"])
def test_a_named_pipe_in_the_place_of_an_object_does_not_block(tmp_path: Path, pattern: str) -> None:
    record(tmp_path, 3)
    (file,) = (tmp_path / "default" / "r").glob(pattern)
    exchange_for_pipe(file)
    run = open_run(tmp_path / "default" / "r")
    assert (run.steps(), run.damaged) == ([] if file.suffix == ".arrow" else [0, 1, 2], {})
    assert len(run.ends()) == (0 if "end" in pattern else 1)


@pytest.mark.timeout(120)
def test_a_named_pipe_in_the_place_of_the_runs_document_is_reported(tmp_path: Path) -> None:
    record(tmp_path, 3)
    exchange_for_pipe(tmp_path / "default" / "r" / "run.json")
    with pytest.raises(StoreError, match=r"run\.json is not a regular file"):
        open_run(tmp_path / "default" / "r")


def exchange_for_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)
