"""States of rules: their cache, their limits, and the health of rules."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import select, update

from tests.sdk.format.blocks import Row, gradient
from tests.services.driving import RULES, Driven, make_service, statements
from tests.services.recording import NAN, Recording, damage_from, nan_from
from watchstep.format.layout import SegmentKey, references_document
from watchstep.store.store import Store
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import JudgingLimits
from watchstep_services.core import failpoints
from watchstep_services.db.engine import Database
from watchstep_services.db.models import RuleConfigRow, RuleStateRow, RunRow, TickRow
from watchstep_services.evaluation import collect as collecting
from watchstep_services.evaluation import evaluate as evaluating
from watchstep_services.runs import rule_health
from watchstep_services.runs.claim import claim
from watchstep_services.runs.lifecycle import advance_run
from watchstep_services.runs.rule_configs import put_one, remove
from watchstep_services.service import judging
from watchstep_services.service.caches import RuleStateCache

NAN_RULE = RuleConfig(rule="non_finite_values", name="mine", **{"for": {"steps": 6}})
MINE = RuleConfig.model_validate(
    {"rule": "non_finite_values", "name": "mine", "tensors": {"include": "nothing"}}
)


def step(driven: Driven, run_id: int, recording: Recording, seq: int, *ill: Any) -> None:
    driven.announce(run_id, recording.write(seq, 4 * seq, 4 * seq + 3, *ill))


def release(driven: Driven, run_id: int) -> None:
    """As if the lease had ended."""
    driven.change(RunRow, run_id, lease_until_ns=0)


def test_an_evaluation_at_which_nothing_happens_asks_three_times(driven: Driven, database: Database) -> None:
    recording, run_id = driven.begin()
    asked = []
    for seq in range(5):
        step(driven, run_id, recording, seq)
        with statements(database) as executed:
            assert driven.evaluate(run_id).outcome == "committed"
        asked.append(len(executed))
    if database.engine.dialect.name == "postgresql":
        # Its first makes it running, which the second sees.
        assert asked[2:] == [3, 3, 3]
    assert driven.watermarks(run_id) == [(4 * seq + 3, "passed") for seq in range(5)]
    assert set(driven.segments(run_id).values()) == {"read"}


def test_what_another_process_found_meanwhile_counts(driven: Driven) -> None:
    other = driven.restarted()
    recording, run_id = driven.begin(rules=[NAN_RULE])
    for seq, turn in enumerate((driven, driven, other, driven)):
        step(turn, run_id, recording, seq, nan_from(8))
        turn.settle(run_id)
    # Steps 8 to 11 were the other's: only with them it has lasted for six at step 13.
    assert driven.alerts(run_id)["mine"][:2] == ("firing", 13)


def test_a_process_whose_commit_was_lost_asks_the_database(driven: Driven) -> None:
    recording, run_id = driven.begin(rules=[NAN_RULE])
    for seq in range(2):
        step(driven, run_id, recording, seq, nan_from(4))
        driven.settle(run_id)
    kept = driven.memories()
    step(driven, run_id, recording, 2, nan_from(4))

    def die(name: str, _what: Any) -> None:
        if name == "evaluate.writing":
            raise ConnectionError

    with failpoints.listening(die), pytest.raises(ConnectionError):
        driven.evaluate(run_id)
    assert driven.memories() == kept
    release(driven, run_id)
    driven.settle(run_id)
    assert driven.alerts(run_id)["mine"][:2] == ("firing", 9)
    assert [held[2] for held in driven.memories()] == [
        held[2] for held in _judged_by_one_that_forgets(driven)
    ]


def _judged_by_one_that_forgets(driven: Driven) -> list[tuple[int, str, str, int]]:
    before = len(driven.memories())
    recording = driven.recording(run="run-2").begin()
    run_id = driven.register("run-2", rules=[NAN_RULE])
    for seq in range(3):
        step(driven, run_id, recording, seq, nan_from(4))
        driven.restarted().settle(run_id)
    return driven.memories()[before:]


def test_one_that_was_taken_over_while_it_judged_writes_nothing(driven: Driven) -> None:
    recording, run_id = driven.begin()
    for seq in range(3):
        step(driven, run_id, recording, seq)
        driven.settle(run_id)
    step(driven, run_id, recording, 3)
    before = (
        driven.memories(),
        driven.watermarks(run_id),
        driven.segments(run_id),
        driven.run(run_id).cursor,
    )
    later: list[Any] = []

    def overtake(name: str, _what: Any) -> None:
        if name == "evaluate.judged" and not later:
            release(driven, run_id)
            later.append(claim(driven.service.database, run_id, 10**12))

    with failpoints.listening(overtake):
        assert driven.evaluate(run_id).outcome == "fenced"
    after = (driven.memories(), driven.watermarks(run_id), driven.segments(run_id), driven.run(run_id).cursor)
    assert (after, later[0].cursor) == (before, before[3])
    with driven.service.database.read() as session:
        assert len(session.execute(select(TickRow)).all()) == 3


@pytest.mark.parametrize("how", ["put", "removed", "registered"])
def test_a_rule_config_that_changes_judges_from_the_next_rows_on(how: str, driven: Driven) -> None:
    mine = NAN_RULE.model_copy(update={"hold": RuleConfig(rule="non_finite_values").hold})
    recording, run_id = driven.begin(rules=[NAN_RULE])
    for seq in range(3):
        step(driven, run_id, recording, seq)
        driven.settle(run_id)
    if how == "registered":
        driven.register(rules=[mine])
    else:
        with driven.service.database.write() as session:
            run = session.get_one(RunRow, run_id)
            if how == "put":
                put_one(session, run, mine.model_copy(update={"name": "new"}))
            else:
                put_one(session, run, mine)
                (row,) = [one for one in rows_of(session, run_id) if one.origin == "operator"]
                remove(session, run, row)
    step(driven, run_id, recording, 3, nan_from(14))
    driven.settle(run_id)
    fired = {name for name, alert in driven.alerts(run_id).items() if alert[0] == "firing"}
    expected = {
        "put": {"non_finite_values", "new"},
        "removed": {"non_finite_values"},
        "registered": {"non_finite_values", "mine"},
    }
    assert fired == expected[how]


def rows_of(session: Any, run_id: int) -> list[RuleConfigRow]:
    return list(session.execute(select(RuleConfigRow).filter_by(run_id=run_id)).scalars())


def test_registering_again_without_a_change_disturbs_nobody(driven: Driven) -> None:
    recording, run_id = driven.begin(rules=[NAN_RULE])
    step(driven, run_id, recording, 0)
    driven.settle(run_id)
    epoch = driven.run(run_id).epoch
    driven.register(rules=[NAN_RULE])
    assert driven.run(run_id).epoch == epoch


def test_the_cache_holds_for_the_next_epoch_and_forgets_the_oldest() -> None:
    cache = RuleStateCache(most_bytes=10_000)  # two attempts without configs
    for run in (1, 2, 3):
        cache.put((run, "a1"), 7, [])
    assert cache.get((1, "a1"), 8) is None
    assert cache.get((3, "a1"), 8) is not None
    assert cache.get((3, "a1"), 7) is None
    assert cache.get((3, "a1"), 9) is None
    assert cache.get((3, "a2"), 8) is None


def test_memory_changes_no_result(driven: Driven) -> None:
    """The same rows, by one process with its memory and by one that forgets after each segment."""
    found = []
    for name in ("run-1", "run-2"):
        recording, run_id = driven.recording(run=name).begin(), driven.register(name, rules=[NAN_RULE])
        for seq in range(6):
            step(driven, run_id, recording, seq, nan_from(13))
            (driven.restarted() if name == "run-2" else driven).settle(run_id)
        found.append((driven.alerts(run_id), driven.watermarks(run_id), driven.event_types(run_id)))
    assert found[0] == found[1]
    half = len(driven.memories()) // 2
    assert [held[1:] for held in driven.memories()[:half]] == [held[1:] for held in driven.memories()[half:]]


def write_new_tensors(
    recording: Recording, seq: int, step: int, names: list[str], value: float = NAN
) -> SegmentKey:
    """Write a segment of gradients that no other segment has."""
    rows = [Row(step, gradient(name, order=number + 9), [value]) for number, name in enumerate(names)]
    return recording.write_rows(seq, rows)


def test_a_segment_with_too_many_new_tensor_names_is_rejected_and_the_others_are_judged(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "WORD_BYTES", 2500)
    recording = driven_sqlite.recording().begin()
    keys = [
        recording.write(0, 0, 0),
        write_new_tensors(recording, 1, 1, ["a" * 500], 1.0),
        write_new_tensors(recording, 2, 2, ["b" * 500, "c" * 500]),
        recording.write(3, 3, 3, damage_from(3)),
    ]
    run_id = driven_sqlite.register()
    for key in keys:  # in separate evaluations, so that the names of earlier rows count
        driven_sqlite.judge(run_id, key)
    assert driven_sqlite.segments(run_id) == {
        ("w0", 0): "read",
        ("w0", 1): "read",
        ("w0", 2): "corrupt",
        ("w0", 3): "read",
    }
    assert "bytes of new words" in driven_sqlite.run(run_id).health["last_corrupt"]
    assert driven_sqlite.alerts(run_id)["non_finite_values"][:2] == ("firing", 3)


def test_a_segment_with_too_many_rows_is_rejected(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "SEGMENT_ROWS", 9)
    recording, run_id = driven_sqlite.begin()
    driven_sqlite.judge(
        run_id, recording.write(0, 0, 2), recording.write(1, 3, 6), recording.write(2, 7, 7, damage_from(7))
    )
    assert driven_sqlite.segments(run_id) == {("w0", 0): "read", ("w0", 1): "corrupt", ("w0", 2): "read"}
    assert "contains 12 rows" in driven_sqlite.run(run_id).health["last_corrupt"]
    assert driven_sqlite.alerts(run_id)["non_finite_values"][:2] == ("firing", 7)


def test_the_largest_rule_states_over_the_limit_are_discarded_and_their_rules_report_an_error(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, run_id = driven_sqlite.record(last=4)
    limit = sum(len(state) for _, _, state, _ in driven_sqlite.memories()) + 3000
    monkeypatch.setattr(judging, "STATE_CHARACTERS", limit)
    driven_sqlite.judge(run_id, write_new_tensors(recording, 1, 5, [f"{n:0200}" for n in range(20)]))
    states = [state for _, _, state, _ in driven_sqlite.memories()]
    assert sum(map(len, states)) <= limit
    problems = [json.loads(state)["problem"] for state in states if json.loads(state)["health"] == "error"]
    assert problems
    assert all("rule state of" in problem for problem in problems)
    driven_sqlite.judge(run_id, recording.write(2, 6, 6, damage_from(6)))
    assert driven_sqlite.run(run_id).last_step == 6
    assert driven_sqlite.alerts(run_id)["non_finite_values"][:2] == ("firing", 6)


def test_rules_that_a_recorder_requested_are_evaluated_last(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = RuleConfig(rule="non_finite_values", name="requested")
    recording, run_id = driven_sqlite.begin(rules=(requested,))
    driven_sqlite.announce(run_id, recording.write(0, 0, 4, damage_from(3)))
    begun: list[int] = []

    def is_over(_: JudgingLimits) -> bool:
        begun.append(1)
        return len(begun) > len(RULES)

    monkeypatch.setattr(JudgingLimits, "is_over", is_over)
    driven_sqlite.settle(run_id)
    with driven_sqlite.service.database.read() as session:
        rows = session.execute(select(RuleConfigRow.name, RuleStateRow.state).join(RuleStateRow)).all()
    health = {name: json.loads(state)["health"] for name, state in rows}
    assert health["requested"] == "error"
    assert {name: state for name, state in health.items() if name != "requested"} == {
        config.name: "ok" for config in RULES
    }


def test_rules_that_a_recorder_requested_have_a_time_limit_of_their_own(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = [
        RuleConfig(rule="non_finite_values", name="requested"),
        RuleConfig(rule="nan_or_inf", name="may stop"),
    ]
    recording, run_id = driven_sqlite.begin(rules=requested)
    with driven_sqlite.service.database.write() as session:
        session.execute(update(RuleConfigRow).filter_by(name="may stop").values(granted_stop=True))
    monkeypatch.setattr(evaluating, "REQUESTED_SECONDS", -1.0)  # used up before the first of them
    driven_sqlite.judge(run_id, recording.write(0, 0, 4, damage_from(3)))
    with driven_sqlite.service.database.read() as session:
        rows = session.execute(select(RuleConfigRow.name, RuleStateRow.state).join(RuleStateRow)).all()
    states = {name: json.loads(state) for name, state in rows}
    assert {name: state["health"] for name, state in states.items()} == {
        **{config.name: "ok" for config in RULES}, "may stop": "ok", "requested": "error",
    }  # fmt: skip
    assert "the rules that the recorder requested took more than" in states["requested"]["problem"]
    assert ("error", "requested") in told(driven_sqlite, run_id)


@pytest.mark.parametrize("statistics", [5, [], {"loss": [[0, float("nan")], [0, 1.0]]}, {"loss": 5}])
def test_damaged_references_affect_the_rule_that_compares_only(
    driven_sqlite: Driven, statistics: object
) -> None:
    compares = RuleConfig(rule="similar_across_runs", params={"run": "other", "figure": "rms"})
    recording, run_id = driven_sqlite.begin(rules=(compares,))
    document = {"attempts": {"other": "a1"}, "statistics": {"other rms": statistics}, "problems": {}}
    recording.store.put(references_document("a1"), json.dumps(document).encode())
    driven_sqlite.judge(run_id, recording.write(0, 0, 4, damage_from(3)))
    assert driven_sqlite.run(run_id).last_step == 4
    assert driven_sqlite.alerts(run_id)["non_finite_values"][:2] == ("firing", 3)


def told(driven: Driven, run_id: int) -> list[tuple[str, str]]:
    """(kind, rule config) of each event about a rule, in order."""
    return [
        (event["type"].removeprefix("io.watchstep.rule."), event["data"]["name"])
        for event in driven.events(run_id)
        if event["type"].startswith("io.watchstep.rule.")
    ]


def test_an_error_is_told_once_and_that_it_is_over(sqlite: Database, folder_store: Store) -> None:
    mine = RuleConfig(rule="non_finite_values", name="mine")
    driven = Driven(make_service(sqlite, folder_store, [mine]))
    recording, run_id = driven.begin()

    def judged_with(data: dict[str, Any], seq: int) -> None:
        with sqlite.write() as session:
            session.execute(update(RuleConfigRow).values(data=data))
        driven.announce(run_id, recording.write(seq, 10 * seq, 10 * seq + 9))
        driven.restarted().settle(run_id)  # another version is another process

    judged_with(mine.as_data(), 0)
    for seq in (1, 2):
        judged_with({"rule": "of_another_version"}, seq)
    for seq in (3, 4):
        judged_with(mine.as_data(), seq)
    assert told(driven, run_id) == [("error", "mine"), ("ok", "mine")]
    (error,) = driven.events(run_id, "rule.error")
    assert "of_another_version" in error["data"]["problem"]


def test_no_data_is_told_of_chosen_rules_after_many_steps_once_a_run(
    sqlite: Database, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_health, "NO_DATA_STEPS", 15)
    driven = Driven(make_service(sqlite, folder_store, [*DEFAULT_RULES, MINE]))
    run_id = driven.register()
    for attempt in ("a1", "a2"):
        recording = Recording(folder_store, attempt=attempt).begin()
        for seq in (0, 1, 2):
            driven.judge(run_id, recording.write(seq, 10 * seq, 10 * seq + 9))
            assert told(driven, run_id) == ([("no_data", "mine")] if seq or attempt == "a2" else [])


def test_no_data_is_told_at_the_end_of_a_short_run(sqlite: Database, folder_store: Store) -> None:
    driven = Driven(make_service(sqlite, folder_store, [*DEFAULT_RULES, MINE]))
    recording, run_id = driven.record(last=9)
    assert told(driven, run_id) == []
    recording.end("completed", 9)

    driven.discover(run_id)
    for _ in range(2):
        assert advance_run(driven.service, run_id) == "completed"
    assert told(driven, run_id) == [("no_data", "mine")]
