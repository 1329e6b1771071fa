"""States of runs, and how they ended."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from tests.sdk.reading.stored import new_run, small_run
from watchstep.format import documents
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.documents import AttemptDocument, EndDocument
from watchstep.format.layout import CONTROL_DOCUMENT, ENDS, BundleKey, attempt_document
from watchstep.reading.outcome import RuleStop
from watchstep.reading.run import open_run
from watchstep.reading.run_documents import find_runs
from watchstep.store.store import Store

# States


STOP_REQUESTED = ControlDocument().with_stop(StopRequest("a", 7, "a NaN"))


def begin(store: Store, attempt: str = "a", started_ns: int = 1, workers: int = 1) -> None:
    document = AttemptDocument(attempt, started_ns, world_size=workers)
    store.put(f"attempts/{attempt}.json", documents.encode(document))


def end(store: Store, states: Sequence[str], attempt: str = "a") -> None:
    """Write how workers ended: a state, and a reason behind a colon."""
    for worker, described in enumerate(states):
        state, _, reason = described.partition(": ")
        document = EndDocument(worker, cast("documents.EndState", state), 9, 100 - worker, 1, "w", reason)
        store.put(f"end/{attempt}/{worker}.json", documents.encode(document))


def state_of(folder: Path) -> str:
    (entry,) = find_runs(Store.open(folder))
    return entry.state


def test_a_run_without_an_attempt_is_only_created(tmp_path: Path) -> None:
    new_run(tmp_path)
    assert state_of(tmp_path) == "created"


@pytest.mark.parametrize(
    ("ends", "unrequested", "requested"),
    [
        ([], "open", "stopping"),
        (["completed"], "open", "open"),
        (["completed", "completed"], "completed", "completed"),
        (["failed"], "failed", "failed"),
        (["failed: SIGTERM"], "failed", "stopped"),
        (["failed: SIGTERM; SystemExit: 7", "failed"], "failed", "stopped"),
        (["failed: ValueError: SIGTERM"], "failed", "failed"),
        (["stopped", "failed"], "stopped", "stopped"),
        (["failed", "completed"], "failed", "failed"),
    ],
)
def test_an_attempt_of_two_workers(tmp_path: Path, ends: list[str], unrequested: str, requested: str) -> None:
    store = new_run(tmp_path)
    begin(store, workers=2)
    end(store, ends)
    assert state_of(tmp_path) == unrequested
    store.put(CONTROL_DOCUMENT, STOP_REQUESTED.encode())
    assert state_of(tmp_path) == requested
    assert store.get(CONTROL_DOCUMENT) == STOP_REQUESTED.encode()


def test_the_newest_attempt_counts_and_its_own_stop(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    begin(store, "a", 1)
    end(store, ["failed"], "a")
    store.put(CONTROL_DOCUMENT, STOP_REQUESTED.encode())
    begin(store, "b", 2)
    assert state_of(tmp_path) == "open"
    end(store, ["failed"], "b")
    assert state_of(tmp_path) == "failed"


@pytest.mark.parametrize("key", ["attempts/a.json", "end/a/0.json", CONTROL_DOCUMENT])
def test_what_cannot_be_read_is_reported(tmp_path: Path, key: str) -> None:
    store = new_run(tmp_path)
    begin(store)
    end(store, ["completed"])
    store.put(key, b"{")
    assert state_of(tmp_path) == "damaged"


def test_ends_of_a_claim_that_was_lost(tmp_path: Path) -> None:
    end(new_run(tmp_path), ["completed"])
    assert state_of(tmp_path) == "completed"


def pipe(file: Path) -> None:
    os.mkfifo(file)


def link_to_itself(file: Path) -> None:
    file.symlink_to(file)


def oversized(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(1 << 40)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("key", "make"),
    [
        *itertools.product(["run.json", CONTROL_DOCUMENT], [pipe, link_to_itself, oversized]),
        ("attempts/b.json", oversized),
    ],
)
def test_a_bad_object_in_place_of_a_document_damages_its_run_alone(
    tmp_path: Path, key: str, make: Callable[[Path], None]
) -> None:
    begin(new_run(tmp_path))
    begin(new_run(tmp_path, "good"))
    file = tmp_path / "default" / "r" / key
    file.unlink(missing_ok=True)
    make(file)
    entries = {entry.run: entry for entry in find_runs(Store.open(tmp_path))}
    assert (entries["good"].state, entries["good"].damage) == ("open", "")
    assert entries["r"].state == "damaged"
    assert key in entries["r"].damage


@pytest.mark.timeout(120)
def test_documents_beyond_the_bound_are_not_read(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    padded = json.loads(documents.encode(AttemptDocument("a", 1))) | {"of a later version": "x" * 60_000}
    for number in range(200):
        store.put(f"attempts/a{number}.json", json.dumps(padded | {"attempt": f"a{number}"}).encode())
    (entry,) = find_runs(Store.open(tmp_path))
    assert (entry.state, entry.damage) == (
        "damaged",
        "attempts/: more than 8 MiB of documents; the rest is not read",
    )


@pytest.mark.ci
def test_many_honest_attempts_are_all_read(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    for number in range(2000):
        begin(store, f"a{number}", 1 + (number * 7919) % 2000)
    newest = next(number for number in range(2000) if 1 + (number * 7919) % 2000 == 2000)
    end(store, ["completed"], f"a{newest}")
    assert state_of(tmp_path) == "completed"


@pytest.mark.parametrize("attempt", ["../../good", "/etc", "b"])
def test_an_attempt_that_claims_another_name_is_damaged(tmp_path: Path, attempt: str) -> None:
    store = new_run(tmp_path)
    store.put("attempts/a.json", documents.encode(AttemptDocument(attempt, 1)))
    assert state_of(tmp_path) == "damaged"


def test_a_damaged_end_leaves_the_others_readable(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    begin(store, workers=2)
    end(store, ["completed", "completed"])
    store.put("end/a/1.json", b"{")
    run = open_run(tmp_path / "default" / "r")
    assert [read.worker for read in run.ends()] == [0]
    assert list(run.damaged) == ["end/a/1.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every folder")
def test_a_project_that_cannot_be_listed_is_omitted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(new_run(tmp_path))
    (tmp_path / "private").mkdir(mode=0)
    assert [entry.project for entry in find_runs(Store.open(tmp_path))] == ["default"]
    assert "private" in caplog.text


# Outcomes


RULE = "rule nan_or_inf: bad from step 7: 3 NaN of 8 elements"


@pytest.mark.parametrize(
    ("state", "reason", "sentence", "marks"),
    [
        ("completed", "", "Run r completed; it ended after step 11.", []),
        (
            "failed",
            "ValueError: bad batch",
            "Run r failed; it ended after step 11. ValueError: bad batch.",
            [(11, "failed: ended after step 11")],
        ),
        (
            "stopped",
            "an operator",
            "Run r was stopped; it ended after step 11. An operator.",
            [(11, "stopped: ended after step 11")],
        ),
        (
            "stopped",
            RULE,
            "Run r was stopped by rule nan_or_inf: bad from step 7, ended after step 11, 5 steps lost. 3 NaN of 8 elements.",
            [(7, "nan_or_inf: bad from step 7"), (11, "stopped: ended after step 11")],
        ),
    ],
)
def test_what_happened_is_said(
    tmp_path: Path, state: documents.EndState, reason: str, sentence: str, marks: list[tuple[int, str]]
) -> None:
    run = open_run(small_run(tmp_path))
    run.store.put(attempt_document("a"), documents.encode(documents.AttemptDocument("a", 1)))
    end = documents.EndDocument(0, state, 11, 1, 3, "w0", reason)
    run.store.put(f"{ENDS}a/0.json", documents.encode(end))
    outcome = run.outcome()
    assert outcome.as_sentence("r") == sentence
    assert [(mark.step, mark.text) for mark in outcome.marks()] == marks


def test_the_reason_of_a_stop_request_counts_more_than_that_of_a_worker(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path))
    run.store.put(attempt_document("a"), documents.encode(documents.AttemptDocument("a", 1)))
    end = documents.EndDocument(0, "failed", 11, 1, 3, "w0", f"{documents.TERMINATED}: ended")
    run.store.put(f"{ENDS}a/0.json", documents.encode(end))
    run.store.put(CONTROL_DOCUMENT, ControlDocument().with_stop(StopRequest("a", 11, RULE)).encode())
    outcome = run.outcome()
    assert (outcome.state, outcome.rule_stop) == ("stopped", RuleStop("nan_or_inf", 7, "3 NaN of 8 elements"))


def test_steps_of_earlier_attempts_are_not_those_after_which_a_run_ended(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path))
    for started, (attempt, last) in enumerate((("a", 11), ("a.2", 4))):
        run.store.put(
            attempt_document(attempt), documents.encode(documents.AttemptDocument(attempt, started + 1))
        )
        end = documents.EndDocument(0, "completed", last, 1, 3, "w0")
        run.store.put(f"{ENDS}{attempt}/0.json", documents.encode(end))
    assert run.outcome().as_sentence("r") == "Run r completed; it ended after step 4."
    assert [end.last_step for end in run.ends("a.2")] == [4]
    assert sorted(end.last_step for end in run.ends()) == [4, 11]


def test_a_run_that_records_is_open_and_bundles_are_marked(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path))
    run.store.put(attempt_document("a"), documents.encode(documents.AttemptDocument("a", 1)))
    run.store.put(BundleKey("a", 0, 9, "gate").path, b"")
    outcome = run.outcome()
    assert outcome.as_sentence("r") == (
        "Run r is recording, or ended without an end document; the last step is 11."
    )
    assert [(mark.step, mark.kind) for mark in outcome.marks()] == [(9, "note")]
    run.store.put(CONTROL_DOCUMENT, b"not json")
    assert run.outcome().as_sentence("r").startswith("Run r has a damaged document. Control document: ")
