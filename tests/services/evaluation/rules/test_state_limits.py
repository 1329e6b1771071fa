"""The names of an attempt's tensors, and the rule states that repeat them, are limited."""

from __future__ import annotations

import json

import pytest

from tests.sdk.format.blocks import Row, block_of, gradient
from tests.services.driving import Driven
from tests.services.recording import NAN, Recording, damage_from
from watchstep.format import segment
from watchstep.format.layout import SegmentKey
from watchstep.store.store import Store
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
