"""Samples of a run: by step, worker and attempt, whatever else lies on the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from watchstep import open_run
from watchstep.errors import ConfigError
from watchstep.format import documents
from watchstep.format.layout import SamplesKey, attempt_document
from watchstep.format.samples.samples import SampleBatch, encode_batch, encode_object
from watchstep.reading.samples import list_samples, read_samples
from watchstep.store.store import Store
from watchstep.wrapper.samples_command import samples_main, skip_list_main


def write(store: Store, attempt: str, worker: int, seq: int, *batches: SampleBatch) -> str:
    """Write an object with some batches; return its key."""
    steps = [batch.step for batch in batches]
    key = SamplesKey(attempt, worker, seq, min(steps), max(steps))
    records = [(seq + number, encode_batch(batch)) for number, batch in enumerate(batches)]
    store.create(key.path, encode_object(records))
    return key.path


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run of two attempts and two workers."""
    store = Store.open(tmp_path).child("default/r/")
    store.create("run.json", documents.encode(documents.RunDocument("default", "r", 1)))
    for number, attempt in enumerate(("a1", "a2")):
        document = documents.AttemptDocument(attempt, number + 1, 2)
        store.create(attempt_document(attempt), documents.encode(document))
    write(store, "a1", 0, 10, *(SampleBatch(step, (step, step + 1), "Numbers", 0, step) for step in range(5)))
    write(store, "a1", 1, 10, *(SampleBatch(step, (step + 100,), "Numbers") for step in range(5)))
    write(
        store, "a2", 0, 20, SampleBatch(4, ("again",)), SampleBatch(5, tuple(range(30)), "Numbers", 1, 9, 7)
    )
    return tmp_path / "default" / "r"


def test_the_newest_attempt_with_samples_of_a_step_counts(run_folder: Path) -> None:
    """A later attempt replaces the steps that it made again."""
    run = open_run(run_folder)
    assert [(batch.worker, batch.ids) for batch in run.samples(2)] == [(0, (2, 3)), (1, (102,))]
    assert run.samples(2, worker=1) == [SampleBatch(2, (102,), "Numbers", worker=1, attempt="a1")]
    assert [(batch.attempt, batch.ids) for batch in run.samples(4)] == [("a2", ("again",))]
    assert [batch.step for batch in run.samples(range(3, 9))] == [3, 3, 4, 5]
    assert run.samples(77) == []
    assert run.damaged == {}
    assert list_samples(run.store).steps == [range(5), range(4, 6)]
    with pytest.raises(ConfigError, match="range_steps"):
        open_run(run_folder, range_steps=(0, 3)).samples(3)


def test_damage_is_listed(run_folder: Path) -> None:
    """A damaged object, and one of somebody else, do not affect the others."""
    run = open_run(run_folder)
    damaged = run_folder / "samples" / "a1" / "1" / "99-2-3.samples"
    damaged.write_bytes(encode_object([(1, encode_batch(SampleBatch(2, (5,))))])[:-9])
    (run_folder / "samples" / "notes.txt").write_text("mine")
    assert [batch.ids for batch in run.samples(2)] == [(2, 3), (102,)]
    assert set(run.damaged) == {"samples/a1/1/99-2-3.samples", "samples/notes.txt"}


def test_the_limit_of_samples_is_that_of_a_query_and_newer_attempts_come_first(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What many attempts have of one step is not read; what exceeds the limit is reported."""
    store = Store.open(run_folder)
    for number in range(20):
        write(store, f"old{number:02}", 0, 1, SampleBatch(4, tuple(range(100))), SampleBatch(9, (number,)))
    monkeypatch.setattr("watchstep.reading.samples._MAX_SAMPLES", 80)
    attempts = [*(f"old{number:02}" for number in range(20)), "a1", "a2"]
    found = read_samples(store, attempts, range(4, 5))
    assert [(batch.attempt, batch.ids[:1]) for batch in found.batches] == [("a2", ("again",))]
    assert [batch.ids for batch in read_samples(store, attempts, range(9, 10)).batches] == [(19,)]
    assert found.damaged == {}
    whole = read_samples(store, attempts)
    assert [batch.step for batch in whole.batches if batch.attempt == "a2"] == [4, 5]
    monkeypatch.setattr("watchstep.reading.samples._MAX_SAMPLES", 40)
    part = read_samples(store, attempts)
    assert {batch.attempt for batch in part.batches} == {"a1", "a2"}
    assert "more than 40 samples" in part.damaged["samples/"]


def test_commands(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both commands show what the run has; a skip list contains the samples of all workers."""
    run = str(run_folder)
    assert _exits(samples_main, [run]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a1  worker 0  steps 0 to 4",
        "a1  worker 1  steps 0 to 4",
        "a2  worker 0  steps 4 to 5",
    ]
    _exits(samples_main, ["r", "--store", str(run_folder.parents[1]), "--step", "5"])
    assert capsys.readouterr().out.startswith("step 5  worker 0  Numbers  epoch 1 batch 9: 0, 1, 2")
    _exits(samples_main, [run, "--step", "5", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ids"], shown["left_out"], shown["attempt"]) == (list(range(30)), 7, "a2")
    _exits(samples_main, [run, "--json", "--worker", "1"])
    assert json.loads(capsys.readouterr().out) == {"attempt": "a1", "worker": 1, "first": 0, "last": 4}
    skip = tmp_path / "skip.json"
    _exits(skip_list_main, [run, "--steps", "1:2", "-o", str(skip)])
    assert "5 samples of step 1 to 2" in capsys.readouterr().out
    written = json.loads(skip.read_text())
    assert written["samples"] == [{"source": "Numbers", "ids": [1, 2, 3, 101, 102]}]
    _exits(skip_list_main, [run, "--step", "5", "-o", str(skip)])
    assert "7 further samples were not recorded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "77", "-o", "x"], "step 77"),
        (["--steps", "5:3", "-o", "x"], "'5:3'"),
        (["--step", "-1", "-o", "x"], "step -1"),
        (["--step", "1", "-o", "missing/x"], "missing/x"),
        (["--event", "x", "-o", "x"], "WATCHSTEP_SERVICE"),
    ],
)
def test_messages_name_the_value(
    run_folder: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors name what cannot be used."""
    from watchstep.errors import WatchstepError

    monkeypatch.delenv("WATCHSTEP_SERVICE", raising=False)
    with pytest.raises(WatchstepError, match=message):
        skip_list_main([str(run_folder), *arguments])


def _exits(command: object, arguments: list[str]) -> int:
    assert callable(command)
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    return int(ended.value.code or 0)
