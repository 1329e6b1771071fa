"""Earlier rows that are read again from the store: from segments, from the compacted run, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.services.driving import Driven, make_service
from tests.services.recording import Recording, exploding_from
from watchstep.errors import StoreError
from watchstep.reading.compaction import compact
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.core.failpoints import listening
from watchstep_services.db.engine import Database

ENDS = [4, 9, 14, 19, 24]
LATE = exploding_from(27)

MakeDatabase = Callable[[int], Database]


def judged(driven: Driven, recording: Recording) -> int:
    """A run of which five segments were judged."""
    recording.write_all(ENDS, LATE)
    run_id = driven.register()
    driven.announce(run_id, *recording.written["w0"])
    driven.settle(run_id)
    return run_id


def nothing(recording: Recording) -> None:
    del recording


def compacted(recording: Recording) -> None:
    assert compact(recording.store, delete_after=0.0).deleted == len(ENDS)


def compacted_and_damaged(recording: Recording) -> None:
    compact(recording.store)
    for key in recording.written["w0"]:
        recording.store.put(key.path, b"damaged")


def late_result(driven: Driven, store: Store, change: Callable[[Recording], None]) -> tuple[Any, ...]:
    """What is known once a late segment was judged by another process, after something changed the store."""
    recording = Recording(store).begin()
    run_id = judged(driven, recording)
    change(recording)
    cold = driven.restarted()
    cold.announce(run_id, recording.write(len(ENDS), 25, 31, LATE))
    cold.settle(run_id)
    assert set(cold.segments(run_id).values()) == {"read"}
    kinds = [kind for kind in cold.event_types(run_id) if kind.startswith("rule.")]
    return cold.findings(), cold.memories(), cold.alerts(run_id), cold.run(run_id).health, kinds


@pytest.mark.parametrize("change", [compacted, compacted_and_damaged])
def test_a_compacted_run_gives_the_context_of_its_segments(
    tmp_path: Path, sqlite_factory: MakeDatabase, change: Callable[[Recording], None]
) -> None:
    results = []
    for number, change_store in enumerate((nothing, change)):
        store = Store.open(tmp_path / str(number), create=True)
        results.append(late_result(Driven(make_service(sqlite_factory(number), store)), store, change_store))
    assert results[0] == results[1]
    findings, _, alerts, health, _ = results[0]
    assert findings
    assert alerts["exploding_gradient"][0] == "firing"
    assert health == {}


@pytest.mark.parametrize("damage", ["deleted", "damaged"])
def test_a_run_is_judged_without_context_that_is_lost(
    driven: Driven, folder_store: Store, damage: str
) -> None:
    recording = Recording(folder_store).begin()
    run_id = judged(driven, recording)
    for key in recording.written["w0"]:
        if damage == "deleted":
            recording.store.delete(key.path)
        else:
            recording.store.put(key.path, b"damaged")
    cold = driven.restarted()
    cold.announce(run_id, recording.write(len(ENDS), 25, 31, LATE))
    cold.settle(run_id)
    assert cold.segments(run_id)["w0", len(ENDS)] == "read"
    health = cold.run(run_id).health
    assert health["lost_context"] >= 1
    assert recording.written["w0"][4].path in health["last_lost_context"]
    (error,) = [event for event in cold.events(run_id) if event["type"] == "io.watchstep.rule.error"]
    assert error["data"]["name"] == "exploding_gradient"
    assert "earlier rows" in error["data"]["problem"]

    cold.announce(run_id, recording.write(len(ENDS) + 1, 32, 40, LATE))
    cold.restarted().settle(run_id)
    assert cold.run(run_id).health["lost_context"] == health["lost_context"]
    assert cold.event_types(run_id).count("rule.ok") == 1


def test_a_rule_that_waits_for_all_workers_reports_steps_that_it_could_not_judge(
    sqlite: Database, folder_store: Store
) -> None:
    waits = RuleConfig(rule="loss_not_decreasing", name="waits")
    driven = Driven(make_service(sqlite, folder_store, (waits,), allowed_lateness_seconds=36000.0))
    recording = Recording(folder_store).begin(world_size=2)
    run_id = driven.register()
    first = recording.write(0, 0, 9)
    driven.announce(run_id, first)
    driven.settle(run_id)
    recording.store.delete(first.path)
    cold = driven.restarted()
    cold.announce(run_id, recording.write(0, 0, 9, worker=1))
    cold.settle(run_id)
    assert cold.segments(run_id) == {("w0", 0): "read", ("w1", 0): "read"}
    assert cold.run(run_id).health["lost_context"] == 1
    (error,) = [event for event in cold.events(run_id) if event["type"] == "io.watchstep.rule.error"]
    assert "steps after -1 among them were not evaluated" in error["data"]["problem"]


def test_a_store_that_is_away_loses_no_context(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    run_id = judged(driven, recording)
    cold = driven.restarted()
    cold.announce(run_id, recording.write(len(ENDS), 25, 31, LATE))
    saved = {entry.key: recording.store.get(entry.key) for entry in recording.store.entries("")}

    def unmount(point: str, _subject: object) -> None:
        if point == "evaluate.read":
            for key in saved:
                recording.store.delete(key)

    with listening(unmount), pytest.raises(StoreError, match="has no object of the run"):
        cold.evaluate(run_id)
    for key, data in saved.items():
        recording.store.put(key, data)
    cold.settle(run_id)
    assert cold.run(run_id).health == {}
    assert cold.alerts(run_id)["exploding_gradient"][0] == "firing"
