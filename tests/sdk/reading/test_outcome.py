from __future__ import annotations

from pathlib import Path

import pytest

from tests.sdk.reading.stored import small_run
from watchstep import open_run
from watchstep.format import documents
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.layout import CONTROL_DOCUMENT, ENDS, BundleKey, attempt_document
from watchstep.reading.outcome import RuleStop

RULE = "rule nan_or_inf at step 7: 3 NaN of 8 elements"


@pytest.mark.parametrize(
    ("state", "reason", "sentence", "marks"),
    [
        ("completed", "", "Run r completed; the last step is 11.", []),
        (
            "failed",
            "ValueError: bad batch",
            "Run r failed after step 11. ValueError: bad batch.",
            [(11, "failed")],
        ),
        ("stopped", "an operator", "Run r was stopped after step 11. An operator.", [(11, "stopped")]),
        (
            "stopped",
            RULE,
            "Run r was stopped after step 11 by rule nan_or_inf, which fired at step 7. 3 NaN of 8 elements.",
            [(7, "nan_or_inf fired"), (11, "stopped")],
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
    assert [(mark.step, mark.label) for mark in outcome.marks()] == marks


def test_the_reason_of_a_stop_request_counts_more_than_that_of_a_worker(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path))
    run.store.put(attempt_document("a"), documents.encode(documents.AttemptDocument("a", 1)))
    end = documents.EndDocument(0, "failed", 11, 1, 3, "w0", f"{documents.TERMINATED}: ended")
    run.store.put(f"{ENDS}a/0.json", documents.encode(end))
    run.store.put(CONTROL_DOCUMENT, ControlDocument().with_stop(StopRequest("a", 11, RULE)).encode())
    outcome = run.outcome()
    assert (outcome.state, outcome.rule_stop) == ("stopped", RuleStop("nan_or_inf", 7))


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
