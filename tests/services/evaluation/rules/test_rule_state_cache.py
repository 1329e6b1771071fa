"""What a process remembers of a run counts only while nobody else has held it; quiet evaluations ask three times."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, select

from tests.services.driving import Driven
from tests.services.recording import Recording, nan_from
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.core import failpoints
from watchstep_services.db.engine import Database
from watchstep_services.db.models import RuleConfigRow, RunRow, TickRow
from watchstep_services.runs.claim import claim
from watchstep_services.runs.rule_configs import put_one, remove
from watchstep_services.service.caches import RuleStateCache

NAN = RuleConfig(rule="non_finite_values", name="mine", **{"for": {"steps": 6}})


class Queries:
    """Statements that a database runs from now on."""

    def __init__(self, database: Database) -> None:
        self.asked: list[str] = []
        event.listen(database.engine, "before_cursor_execute", self._ask)

    def _ask(self, _connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        self.asked.append(statement)

    def during(self, driven: Driven, run_id: int) -> int:
        """How many an evaluation runs."""
        self.asked.clear()
        assert driven.evaluate(run_id).outcome == "committed"
        return len(self.asked)


def step(driven: Driven, run_id: int, recording: Recording, seq: int, *ill: Any) -> None:
    driven.announce(run_id, recording.write(seq, 4 * seq, 4 * seq + 3, *ill))


def release(driven: Driven, run_id: int) -> None:
    """As if the lease had ended."""
    with driven.service.database.write() as session:
        session.get_one(RunRow, run_id).lease_until_ns = 0


def test_an_evaluation_at_which_nothing_happens_asks_three_times(
    driven: Driven, folder_store: Store, database: Database
) -> None:
    recording, run_id = Recording(folder_store).begin(), driven.register()
    queries, asked = Queries(database), []
    for seq in range(5):
        step(driven, run_id, recording, seq)
        asked.append(queries.during(driven, run_id))
    if database.engine.dialect.name == "postgresql":
        # Its first makes it running, which the second sees.
        assert asked[2:] == [3, 3, 3]
    assert driven.watermarks(run_id) == [(4 * seq + 3, "passed") for seq in range(5)]
    assert set(driven.segments(run_id).values()) == {"read"}


def test_what_another_process_found_meanwhile_counts(driven: Driven, folder_store: Store) -> None:
    other = driven.restarted()
    recording, run_id = Recording(folder_store).begin(), driven.register(rules=[NAN])
    for seq, turn in enumerate((driven, driven, other, driven)):
        step(turn, run_id, recording, seq, nan_from(8))
        turn.settle(run_id)
    # Steps 8 to 11 were the other's: only with them it has lasted for six at step 13.
    assert driven.alerts(run_id)["mine"][:2] == ("firing", 13)


def test_a_process_whose_commit_was_lost_asks_the_database(driven: Driven, folder_store: Store) -> None:
    recording, run_id = Recording(folder_store).begin(), driven.register(rules=[NAN])
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
        held[2] for held in _judged_by_one_that_forgets(driven, folder_store)
    ]


def _judged_by_one_that_forgets(driven: Driven, folder_store: Store) -> list[tuple[int, str, str, int]]:
    before = len(driven.memories())
    recording, run_id = Recording(folder_store, run="run-2").begin(), driven.register("run-2", rules=[NAN])
    for seq in range(3):
        step(driven, run_id, recording, seq, nan_from(4))
        driven.restarted().settle(run_id)
    return driven.memories()[before:]


def test_one_that_was_taken_over_while_it_judged_writes_nothing(driven: Driven, folder_store: Store) -> None:
    recording, run_id = Recording(folder_store).begin(), driven.register()
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
def test_a_rule_config_that_changes_judges_from_the_next_rows_on(
    how: str, driven: Driven, folder_store: Store
) -> None:
    mine = NAN.model_copy(update={"hold": RuleConfig(rule="non_finite_values").hold})
    recording, run_id = Recording(folder_store).begin(), driven.register(rules=[NAN])
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


def test_registering_again_without_a_change_disturbs_nobody(driven: Driven, folder_store: Store) -> None:
    recording, run_id = Recording(folder_store).begin(), driven.register(rules=[NAN])
    step(driven, run_id, recording, 0)
    driven.settle(run_id)
    epoch = driven.run(run_id).epoch
    driven.register(rules=[NAN])
    assert driven.run(run_id).epoch == epoch


def test_the_cache_holds_for_the_next_epoch_and_forgets_the_oldest() -> None:
    cache = RuleStateCache(runs=2)
    for run in (1, 2, 3):
        cache.put((run, "a1"), 7, [])
    assert cache.get((1, "a1"), 8) is None
    assert cache.get((3, "a1"), 8) is not None
    assert cache.get((3, "a1"), 7) is None
    assert cache.get((3, "a1"), 9) is None
    assert cache.get((3, "a2"), 8) is None


def test_memory_changes_no_result(driven: Driven, folder_store: Store) -> None:
    """The same rows, by one process with its memory and by one that forgets after each segment."""
    found = []
    for name in ("run-1", "run-2"):
        recording, run_id = Recording(folder_store, run=name).begin(), driven.register(name, rules=[NAN])
        for seq in range(6):
            step(driven, run_id, recording, seq, nan_from(13))
            (driven.restarted() if name == "run-2" else driven).settle(run_id)
        found.append((driven.alerts(run_id), driven.watermarks(run_id), driven.event_types(run_id)))
    assert found[0] == found[1]
    half = len(driven.memories()) // 2
    assert [held[1:] for held in driven.memories()[:half]] == [held[1:] for held in driven.memories()[half:]]
