"""Event files that are written during the run: the same as those of the export, and of no effect on anything else."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.capture.node.ranks import do_all, node
from tests.sdk.event_files import accumulated, contents, event_files
from tests.sdk.faults.test_disk import small_disk
from tests.sdk.training import EVERY_STEP, watched_training
from tests.services.jobs import eventually
from watchstep import Bounds, Hook, open_run
from watchstep.errors import ConfigError
from watchstep.format.event_files.tensorboard import EventFile
from watchstep.reading.tensorboard import export

FAST = replace(EVERY_STEP, bounds=Bounds(flush_seconds=0.01))


def log_steps(hook: Hook, steps: range) -> None:
    for step in steps:
        hook.log(loss=float(step))
        hook.step()


def exported(hook: Hook, folder: Path) -> dict[str, dict[str, list[Any]]]:
    export(open_run(hook.run_url), folder)
    return contents(folder)


def assert_whole(hook: Hook, steps: int) -> None:
    """The store has all rows, and health names the event files only."""
    run = open_run(hook.run_url)
    assert run.losses()["value"].to_pylist() == [float(step) for step in range(steps)]
    assert [(end.state, end.segments) for end in run.ends()] == [("completed", len(run.index.segments))]
    assert set(hook.health["faults"]) == {"tensorboard"}
    assert hook.health["counts"]["rows"] == steps
    assert "dropped_rows" not in hook.health["counts"]


def test_they_contain_what_the_export_writes(tmp_path: Path) -> None:
    hook, training = watched_training(tmp_path / "store", run="r", tensorboard=tmp_path / "live")

    def evaluate(step: int, _: Any) -> None:
        if step % 10 == 0:
            for batch in range(3):
                hook.log(loss=float(batch), accuracy=step / 40, mode="eval")

    training.run(40, evaluate)
    hook.close()
    assert hook.health["faults"] == {}
    live = contents(tmp_path / "live")
    assert list(live) == ["eval-0", "train-0"]
    assert live == exported(hook, tmp_path / "exported")
    assert len(live["train-0"]["histogram 0.weight_gradient"]) == 40
    assert live["train-0"]["scalar 0.weight_update/update_ratio"]
    assert [value for _, _, value in live["eval-0"]["scalar loss"]] == [1.0] * 4
    assert {len(files) for files in (event_files(tmp_path / "live"), live)} == {2}


def test_they_are_written_during_the_run(tmp_path: Path) -> None:
    hook = Hook(tmp_path / "store", run="r", config=FAST, tensorboard=tmp_path / "live")
    log_steps(hook, range(5))
    eventually(lambda: bool(event_files(tmp_path / "live")))
    eventually(lambda: "loss" in accumulated(tmp_path / "live" / "train-0").Tags()["scalars"])
    hook.close()


def test_an_attempt_has_its_own_file_and_supersedes_later_steps(tmp_path: Path) -> None:
    for first, end in ((0, 10), (6, 8)):
        hook = Hook(tmp_path / "store", run="r", first_step=first, tensorboard=tmp_path / "live")
        log_steps(hook, range(first, end))
        hook.close()
    assert len(event_files(tmp_path / "live")) == 2
    live = contents(tmp_path / "live")["train-0"]["scalar loss"]
    assert live == exported(hook, tmp_path / "exported")["train-0"]["scalar loss"]
    assert [step for step, *_ in live] == list(range(8))


def test_each_rank_has_its_own_folder(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    environment = {
        "WATCHSTEP_STORE": str(tmp_path / "store"),
        "WATCHSTEP_TENSORBOARD": str(tmp_path / "live"),
        "TMPDIR": str(tmp_path_factory.mktemp("t")),
    }
    with node(2, environment) as ranks:
        do_all(ranks, "record 10")
        do_all(ranks, "close")
    live = contents(tmp_path / "live")
    assert list(live) == ["train-0", "train-1"]
    export(open_run(tmp_path / "store" / "default" / "r"), tmp_path / "exported")
    assert live == contents(tmp_path / "exported")


def test_a_folder_that_disappears_is_made_again(tmp_path: Path) -> None:
    hook = Hook(tmp_path / "store", run="r", config=FAST, tensorboard=tmp_path / "live")
    log_steps(hook, range(5))
    eventually(lambda: bool(event_files(tmp_path / "live")))
    shutil.rmtree(tmp_path / "live")
    log_steps(hook, range(5, 10))
    eventually(lambda: "tensorboard" in hook.health["faults"])
    log_steps(hook, range(10, 15))
    hook.close()
    assert_whole(hook, 15)
    assert "FileNotFoundError" in hook.health["faults"]["tensorboard"]
    assert hook.health["counts"]["faults"] == 1
    steps = [step for step, *_ in contents(tmp_path / "live")["train-0"]["scalar loss"]]
    assert steps[-5:] == list(range(10, 15))
    assert 15 - len(steps) >= hook.health["counts"]["dropped_tensorboard_rows"] > 0


def test_a_folder_that_cannot_be_made_is_counted_once(tmp_path: Path) -> None:
    hook = Hook(tmp_path / "store", run="r", config=FAST, tensorboard=tmp_path / "live" / "r")
    (tmp_path / "live").write_text("in the way")
    for part in range(3):
        log_steps(hook, range(5 * part, 5 * part + 5))
        eventually(
            lambda due=5 * part + 5: (  # type: ignore[misc]
                hook.health["counts"].get("dropped_tensorboard_rows", 0) == due
            )
        )
    hook.close()
    assert_whole(hook, 15)
    assert hook.health["counts"]["faults"] == 1


@pytest.mark.ci
def test_a_full_disk_leaves_whole_events(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        hook, training = watched_training(tmp_path / "store", run="r", tensorboard=disk)
        training.run(200)
        hook.close()
        assert "No space left" in hook.health["faults"]["tensorboard"]
        assert hook.health["counts"]["dropped_tensorboard_rows"] > 0
        live, whole = contents(disk), exported(hook, tmp_path / "exported")
        assert [step for step, *_ in whole["train-0"]["scalar loss"]] == list(range(200))
        assert 0 < len(live["train-0"]["scalar loss"]) < 200
        for tag, events in live["train-0"].items():
            steps = {step for step, *_ in events}
            assert events == [event for event in whole["train-0"][tag] if event[0] in steps]
        assert open_run(hook.run_url).damaged == {}


def test_a_folder_that_does_not_answer_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, append = threading.Event(), EventFile.append

    def hang(file: EventFile, data: bytes) -> None:
        released.wait(60)
        append(file, data)

    monkeypatch.setattr(EventFile, "append", hang)
    hook = Hook(tmp_path / "store", run="r", config=FAST, tensorboard=tmp_path / "live")
    log_steps(hook, range(20))
    eventually(lambda: hook.health["counts"].get("rows") == 20)
    hook.close()
    assert_whole(hook, 20)
    assert "TimeoutError" in hook.health["faults"]["tensorboard"]
    released.set()


@pytest.mark.parametrize("place", ["", "file", "file/below", "s3://bucket/live", "nul\0", 5, True, b"live"])
def test_what_cannot_be_a_folder_is_refused(tmp_path: Path, place: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = str(tmp_path / place) if isinstance(place, str) and place.startswith("file") else place
    with pytest.raises(ConfigError, match="tensorboard="):
        Hook(tmp_path / "store", tensorboard=folder)
    assert not (tmp_path / "store").exists()


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WATCHSTEP_TENSORBOARD", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="WATCHSTEP_TENSORBOARD="):
        Hook(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    for setting, argument in (("from_environment", None), ("", None), ("file", "argument")):
        monkeypatch.setenv("WATCHSTEP_TENSORBOARD", setting)
        with Hook(tmp_path / "store", tensorboard=argument) as hook:
            log_steps(hook, range(3))
        assert hook.health["faults"] == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "argument",
        "file",
        "from_environment",
        "store",
    ]
