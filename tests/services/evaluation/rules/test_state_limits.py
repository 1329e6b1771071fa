"""The names of an attempt's tensors, and the rule states that repeat them, are limited."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import select

from tests.sdk.format.blocks import Row, block_of, gradient
from tests.services.driving import RULES, Driven
from tests.services.recording import NAN, Recording, damage_from
from watchstep.format import segment
from watchstep.format.layout import SegmentKey, references_document
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import JudgingLimits
from watchstep_services.db.models import RuleConfigRow, RuleStateRow
from watchstep_services.evaluation import collect as collecting
from watchstep_services.service import judging


def write_new_tensors(
    recording: Recording, seq: int, step: int, names: list[str], value: float = NAN
) -> SegmentKey:
    """Write a segment of gradients that no other segment has."""
    key = recording.key(seq, step, step)
    rows = [Row(step, gradient(name, order=number + 9), [value]) for number, name in enumerate(names)]
    recording.store.put(key.path, segment.encode(block_of(rows)))
    return key


def test_a_segment_with_too_many_new_tensor_names_is_rejected_and_the_others_are_judged(
    driven_sqlite: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "WORD_BYTES", 2500)
    recording = Recording(folder_store).begin()
    keys = [
        recording.write(0, 0, 0),
        write_new_tensors(recording, 1, 1, ["a" * 500], 1.0),
        write_new_tensors(recording, 2, 2, ["b" * 500, "c" * 500]),
        recording.write(3, 3, 3, damage_from(3)),
    ]
    run_id = driven_sqlite.register()
    for key in keys:  # in separate evaluations, so that the names of earlier rows count
        driven_sqlite.announce(run_id, key)
        driven_sqlite.settle(run_id)
    assert driven_sqlite.segments(run_id) == {
        ("w0", 0): "read",
        ("w0", 1): "read",
        ("w0", 2): "corrupt",
        ("w0", 3): "read",
    }
    assert "bytes of new words" in driven_sqlite.run(run_id).health["last_corrupt"]
    assert driven_sqlite.alerts(run_id)["non_finite_values"][:2] == ("firing", 3)


def test_a_segment_with_too_many_rows_is_rejected(
    driven_sqlite: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "SEGMENT_ROWS", 9)
    recording = Recording(folder_store).begin()
    run_id = driven_sqlite.register()
    driven_sqlite.announce(
        run_id, recording.write(0, 0, 2), recording.write(1, 3, 6), recording.write(2, 7, 7, damage_from(7))
    )
    driven_sqlite.settle(run_id)
    assert driven_sqlite.segments(run_id) == {("w0", 0): "read", ("w0", 1): "corrupt", ("w0", 2): "read"}
    assert "contains 12 rows" in driven_sqlite.run(run_id).health["last_corrupt"]
    assert driven_sqlite.alerts(run_id)["non_finite_values"][:2] == ("firing", 7)


def test_the_largest_rule_states_over_the_limit_are_discarded_and_their_rules_report_an_error(
    driven_sqlite: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(folder_store).begin()
    run_id = driven_sqlite.register()
    driven_sqlite.announce(run_id, recording.write(0, 0, 4))
    driven_sqlite.settle(run_id)
    limit = sum(len(state) for _, _, state, _ in driven_sqlite.memories()) + 3000
    monkeypatch.setattr(judging, "STATE_CHARACTERS", limit)
    driven_sqlite.announce(run_id, write_new_tensors(recording, 1, 5, [f"{n:0200}" for n in range(20)]))
    driven_sqlite.settle(run_id)
    states = [state for _, _, state, _ in driven_sqlite.memories()]
    assert sum(map(len, states)) <= limit
    problems = [json.loads(state)["problem"] for state in states if json.loads(state)["health"] == "error"]
    assert problems
    assert all("rule state of" in problem for problem in problems)
    driven_sqlite.announce(run_id, recording.write(2, 6, 6, damage_from(6)))
    driven_sqlite.settle(run_id)
    assert driven_sqlite.run(run_id).last_step == 6
    assert driven_sqlite.alerts(run_id)["non_finite_values"][:2] == ("firing", 6)


def test_rules_that_a_recorder_requested_are_evaluated_last(
    driven_sqlite: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = RuleConfig(rule="non_finite_values", name="requested")
    recording = Recording(folder_store).begin()
    run_id = driven_sqlite.register(rules=(requested,))
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


@pytest.mark.parametrize("statistics", [5, [], {"loss": [[0, float("nan")], [0, 1.0]]}, {"loss": 5}])
def test_damaged_references_affect_the_rule_that_compares_only(
    driven_sqlite: Driven, folder_store: Store, statistics: object
) -> None:
    compares = RuleConfig(rule="similar_across_runs", params={"run": "other", "figure": "rms"})
    recording = Recording(folder_store).begin()
    run_id = driven_sqlite.register(rules=(compares,))
    document = {"attempts": {"other": "a1"}, "statistics": {"other rms": statistics}, "problems": {}}
    recording.store.put(references_document("a1"), json.dumps(document).encode())
    driven_sqlite.announce(run_id, recording.write(0, 0, 4, damage_from(3)))
    driven_sqlite.settle(run_id)
    assert driven_sqlite.run(run_id).last_step == 4
    assert driven_sqlite.alerts(run_id)["non_finite_values"][:2] == ("firing", 3)
