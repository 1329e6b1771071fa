"""Rules over full tensors in a service: its findings are those of a backtest, and what it cannot read affects no other rule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.rules.saved import OUTPUT, WEIGHT, away, encoded, mark, registered, save
from tests.sdk.format.blocks import Row
from tests.services.driving import Driven, make_service
from tests.services.recording import LOSS, Recording
from watchstep.format.layout import SegmentKey, SnapshotKey
from watchstep.format.snapshot import INFOS
from watchstep.reading.compaction import compact
from watchstep.reading.run import open_run
from watchstep.store.store import Store
from watchstep_rules.backtest.backtest import AttemptOutcome, JudgingOrder, backtest_run
from watchstep_rules.config.rule_config import MinimumDuration, RuleConfig
from watchstep_rules.engine import saved_tensors
from watchstep_services.db.engine import Database
from watchstep_services.db.models import RuleConfigRow, RunRow
from watchstep_services.evaluation.journal import unwritten, write_journal

with registered():
    RULES = (
        away(name="own", before=2, collections=["activations", "weights"], modes=["train", "eval"]),
        away(name="sealed", before=1, merge="watermark", factor=1.5, **{"for": MinimumDuration(steps=2)}),
        away(name="narrow", tensors={"collection": "weights"}),
        RuleConfig(rule="non_finite_values"),
    )
NUMBERS = iter(range(100_000))


@pytest.fixture(autouse=True)
def _rule() -> Iterator[None]:
    with registered():
        yield


def full(value: float) -> np.ndarray[Any, Any]:
    return np.full((2, 2), value, np.float32)


def close(driven: Driven, run_id: int) -> None:
    """The run is over, and its journal is on the store."""
    driven.discover(run_id)
    driven.change(RunRow, run_id, state="completed")
    for due in unwritten(driven.service):
        write_journal(driven.service, due)


def found(driven: Driven) -> dict[int, list[Any]]:
    """Findings of a service by rule config, in the order of their steps."""
    by_config: dict[int, list[Any]] = {}
    for config_id, _, finding in driven.findings():
        by_config.setdefault(config_id, []).append(finding)
    return {config_id: sorted(findings, key=place_of) for config_id, findings in by_config.items()}


def place_of(finding: dict[str, Any]) -> tuple[Any, ...]:
    return finding["step"], finding["worker"], finding["mode"], finding["tensor"]


def judged_again(attempt: AttemptOutcome, *, sort: bool) -> dict[int, list[Any]]:
    findings = {
        number: [json.loads(finding.model_dump_json()) for finding in outcome.findings]
        for number, outcome in enumerate(attempt.outcomes, 1)
        if outcome.findings
    }
    return {number: sorted(each, key=place_of) for number, each in findings.items()} if sort else findings


def worker_segments(recording: Recording, random: Random, worker: int) -> list[SegmentKey]:
    """Segments of a worker with a loss at every step, and objects that are known a few steps after theirs."""
    rows: dict[int, list[Row]] = {step: [Row(step, LOSS, [1.0], worker=worker)] for step in range(40)}
    for step in range(5, 36, 5):
        for collection, info in (("activations", OUTPUT), ("weights", WEIGHT)):
            value = random.choice([0.0, 1.0, 1.0, 3.0, 9.0])
            save(recording.store, step, {info: full(value)}, worker=worker, collection=collection)
            learned = step + random.randint(0, 4)
            rows[learned].append(mark(step, learned, worker=worker, collection=collection))
    cuts = sorted({0, 40, *random.choices(range(40), k=3)})
    return [
        recording.write_rows(seq, [row for step in range(start, end) for row in rows[step]], worker)
        for seq, (start, end) in enumerate(pairwise(cuts))
    ]


@pytest.mark.ci
@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_a_backtest_finds_what_the_service_found(
    driven_sqlite: Driven, folder_store: Store, seed: int
) -> None:
    random, number = Random(seed), next(NUMBERS)
    recording = Recording(folder_store, f"run-{number}").begin(world_size=2)
    service = Driven(make_service(driven_sqlite.service.database, folder_store, RULES))
    queues = [worker_segments(recording, random, worker) for worker in (0, 1)]
    run_id = service.register(recording.run)
    while any(queues):
        for queue in random.sample(queues, 2):
            service.announce(run_id, *[queue.pop(0) for _ in range(random.randint(0, len(queue)))])
        if random.random() < 0.3:
            service = service.restarted()
        service.settle(run_id)
    for worker in (0, 1):
        recording.end("completed", 39, worker)
    close(service, run_id)
    with service.service.database.read() as session:
        config_ids = [row.id for row in session.query(RuleConfigRow).filter_by(run_id=run_id).order_by("id")]
    live = {config_ids.index(key) + 1: each for key, each in found(service).items() if key in config_ids}
    (attempt,) = backtest_run(open_run(recording.store), RULES).attempts
    assert (attempt.order, attempt.notes) == (JudgingOrder.JOURNAL, ())
    assert judged_again(attempt, sort=True) == live
    alerts = service.alerts(run_id)
    for outcome in attempt.outcomes:
        assert outcome.problem == ""
        assert bool(outcome.transitions) == (outcome.config.name in alerts)
    # Rows from compacted segments, and judged by steps, lead to the same findings.
    compact(recording.store)
    (again,) = backtest_run(open_run(recording.store), RULES).attempts
    assert judged_again(again, sort=True) == live
    for entry in list(recording.store.entries("journal/")):
        recording.store.delete(entry.key)
    (by_steps,) = backtest_run(open_run(recording.store), RULES).attempts
    assert by_steps.order is JudgingOrder.STEPS
    assert judged_again(by_steps, sort=True) == live


def test_a_backtest_without_a_journal_judges_more_objects_than_one_evaluation_may_read(
    folder_store: Store,
) -> None:
    recording = Recording(folder_store).begin()
    count = 3 * saved_tensors.EVALUATION_OBJECTS
    for step in range(count):
        save(recording.store, step, {OUTPUT: full(9.0)})
    recording.write_rows(0, [mark(step) for step in range(count)])
    recording.end("completed", count)
    (attempt,) = backtest_run(open_run(recording.store), [away()]).attempts
    assert (attempt.outcomes[0].found, attempt.outcomes[0].problem) == (count, "")


HOSTILE = json.dumps({OUTPUT.name: {"collections": ["activations"], "module": "m\0\ud800", "role": "output"}})


@pytest.mark.ci
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "does not exist, or no longer exists"),
        (encoded({OUTPUT: full(9.0)})[:-1], "invalid header"),
        (encoded({OUTPUT: full(9.0)}, metadata={INFOS: "[" * 100_000}), "invalid header"),
        (encoded({OUTPUT: full(9.0)}, metadata={INFOS: HOSTILE}), ""),
    ],
    ids=["deleted", "truncated", "recursion", "text that databases refuse"],
)
def test_an_object_that_cannot_be_read_is_the_problem_of_its_rules_alone(
    database: Database, folder_store: Store, content: bytes | None, problem: str
) -> None:
    own = away(name="own", collections=["activations"])
    driven = Driven(make_service(database, folder_store, (own, RULES[2], RULES[3])))
    run_id = driven.register()
    recording = Recording(folder_store).begin()
    save(recording.store, 5, {OUTPUT: full(9.0)})
    save(recording.store, 15, {WEIGHT: full(9.0)}, collection="weights")
    driven.judge(run_id, recording.write_rows(0, [mark(5), Row(6, LOSS, [1.0])]))
    assert driven.alerts(run_id)["own"][0] == "firing"
    if content is not None:
        recording.store.put(SnapshotKey("a1", 0, 15, "train", "activations").path, content)
    bad = Row(16, LOSS, [float("nan")])
    driven.judge(run_id, recording.write_rows(1, [mark(15), mark(15, collection="weights"), bad]))
    alerts = driven.alerts(run_id)
    assert {name: phase for name, (phase, _, _) in alerts.items()} == {
        "own": "firing",
        "narrow": "firing",
        "non_finite_values": "firing",
    }
    errors = [
        event["data"]["problem"]
        for event in driven.events(run_id, "rule.error")
        if event["data"]["name"] == "own"
    ]
    assert [problem in error for error in errors] == [True] * bool(problem)
    assert "evaluation" not in driven.run(run_id).health
    # The next object is read as before.
    save(recording.store, 25, {OUTPUT: full(0.0)})
    driven.judge(run_id, recording.write_rows(2, [mark(25), Row(26, LOSS, [1.0])]))
    assert driven.alerts(run_id)["own"][0] == "resolved"
