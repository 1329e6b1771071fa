"""Evaluations that are too large for one claim, and reads that do not finish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import event

from tests.services.driving import Driven, statements
from tests.services.evaluation.claims.test_fairness import due_since
from tests.services.recording import Recording, exploding_from, nan_from
from watchstep.format.layout import SegmentKey
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.core.failpoints import listening
from watchstep_services.core.settings import nanoseconds
from watchstep_services.db.models import RunRow
from watchstep_services.evaluation import collect, context
from watchstep_services.evaluation.unfinished_reads import CAREFUL, CONDEMNED
from watchstep_services.runs.claim import Claim, claim, claim_longest_due, release, take_turn, wait_for_turn
from watchstep_services.service import rule_time
from watchstep_services.service.judging import Judged, judge_all

_JUDGE_ALL = "watchstep_services.evaluation.evaluate.judge_all"
_LEASE_NS = nanoseconds(60.0)
MOST_DEATHS = 3 * CONDEMNED


def claimed(driven: Driven, run_id: int, lease_ns: int = _LEASE_NS) -> Claim:
    claimed = claim(driven.service.database, run_id, lease_ns)
    assert claimed is not None
    return claimed


def next_due(driven: Driven, requested: int) -> Claim | None:
    return claim_longest_due(driven.service.database, requested, "mine", _LEASE_NS)


def test_one_run_of_a_project_has_the_turn_and_the_others_are_not_claimed_until_it_ends(
    driven: Driven,
) -> None:
    database = driven.service.database
    first, second = (due_since(driven, "vision", name, 50.0) for name in ("first", "second"))
    other = due_since(driven, "speech", "other", 1.0)
    in_turn = claimed(driven, first)
    assert take_turn(database, in_turn)
    assert take_turn(database, in_turn)  # again, by the same claim
    waiting = claimed(driven, second)
    assert not take_turn(database, waiting)
    wait_for_turn(database, waiting, waiting.now_ns)
    assert take_turn(database, claimed(driven, other))  # of another project

    assert next_due(driven, other) is None
    release(database, in_turn, None)
    following = next_due(driven, other)
    assert following is not None
    assert (following.run_id, following.waits_for_turn) == (second, True)
    assert take_turn(database, following)
    release(database, following, None)
    assert not claimed(driven, second).waits_for_turn


def test_the_turn_of_a_process_that_died_ends_with_its_lease(driven: Driven) -> None:
    database = driven.service.database
    first, second = (due_since(driven, "vision", name, 50.0) for name in ("first", "second"))
    assert take_turn(database, claimed(driven, first, lease_ns=1))
    waiting = claimed(driven, second)
    assert take_turn(database, waiting)
    # The first run is claimed again: the turn of its earlier claim has no effect.
    assert not take_turn(database, claimed(driven, first))


def test_a_run_that_waits_for_its_turn_reads_its_segments_once(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, run_id = driven_sqlite.begin()
    driven_sqlite.announce(run_id, recording.write(0, 0, 4, nan_from(0)))
    other = due_since(driven_sqlite, "vision", "other", 1.0)
    in_turn = claimed(driven_sqlite, other)
    assert take_turn(driven_sqlite.service.database, in_turn)
    monkeypatch.setattr(collect, "LARGE_ROWS", 1)
    fetched: list[str] = []

    def fetch(run_store: Store, key: SegmentKey) -> bytes:
        fetched.append(key.path)
        return run_store.get(key.path)

    monkeypatch.setattr(collect, "fetch", fetch)
    for _ in range(3):
        assert driven_sqlite.evaluate(run_id).outcome == "idle"
    assert len(fetched) == 1
    release(driven_sqlite.service.database, in_turn, None)
    assert driven_sqlite.evaluate(run_id).outcome == "committed"
    assert driven_sqlite.run(run_id).last_step == 4


def test_an_evaluation_reads_up_to_a_number_of_rows_and_the_next_ones_read_the_rest(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, run_id = driven_sqlite.begin()
    recording.write_all([1, 3, 5, 7, 9])
    driven_sqlite.announce(run_id, *recording.written["w0"])
    monkeypatch.setattr(collect, "LARGE_ROWS", 1)
    assert [driven_sqlite.evaluate(run_id).more for _ in range(5)] == [True, True, True, True, False]
    assert driven_sqlite.run(run_id).last_step == 9


def test_a_large_evaluation_is_postponed_while_another_goes_on_and_then_done(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for name in ("first", "second"):
        recording = driven_sqlite.recording(run=name).begin()
        runs.append(driven_sqlite.register(name))
        driven_sqlite.announce(runs[-1], recording.write(0, 0, 4, nan_from(0)))
    first, second = runs
    outcomes: list[str] = []

    def judge_beside(*inputs: Any) -> list[Judged]:
        monkeypatch.setattr(_JUDGE_ALL, judge_all)
        outcomes.append(driven_sqlite.evaluate(second).outcome)
        return judge_all(*inputs)

    monkeypatch.setattr(_JUDGE_ALL, judge_beside)
    monkeypatch.setattr(collect, "LARGE_ROWS", 1)
    assert driven_sqlite.evaluate(first).outcome == "committed"
    assert outcomes == ["idle"]
    assert driven_sqlite.run(second).last_step == -1
    assert driven_sqlite.evaluate(second).outcome == "committed"
    assert driven_sqlite.run(second).last_step == 4


def test_projects_that_wait_for_a_large_evaluation_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("watchstep_services.service.rule_time.time.monotonic", lambda: clock[0])
    turn = rule_time.LargeTurn()
    assert turn.take("third")  # has one of the two turns throughout
    assert turn.take("many")
    assert not turn.take("many")
    assert not turn.take("other")
    turn.release("many")
    clock[0] += 1.0
    assert not turn.take("many")  # the other waits, and has had no turn
    assert turn.take("other")
    turn.release("other")
    clock[0] += 1.0
    assert turn.take("many")  # no other waits
    turn.release("many")
    clock[0] += 1.0
    assert turn.take("other")
    assert not turn.take("many")
    turn.release("other")
    clock[0] += 60.0  # nobody waits that long without asking again
    assert turn.take("other")


def test_large_evaluations_of_one_project_delay_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("watchstep_services.service.rule_time.time.monotonic", lambda: clock[0])
    turn = rule_time.LargeTurn()
    assert turn.take("many")
    assert not turn.take("many")  # its next run waits
    clock[0] += 1.0
    for _ in range(3):
        assert turn.take("other")  # although its last turn was later
        turn.release("other")
        clock[0] += 1.0


def test_a_project_that_had_its_turn_and_does_not_try_again_delays_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("watchstep_services.service.rule_time.time.monotonic", lambda: clock[0])
    turn = rule_time.LargeTurn()
    assert turn.take("first")
    assert not turn.take("first")  # another worker evaluates the run that was refused here
    clock[0] += 1.0
    assert turn.take("second")
    turn.release("first")
    turn.release("second")
    assert turn.take("second")  # although its last turn was later


def test_a_large_evaluation_is_left_to_the_next_process_if_this_one_ends(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, run_id = driven.begin()
    driven.announce(run_id, recording.write(0, 0, 4, nan_from(0)))
    with monkeypatch.context() as patch:
        patch.setattr(collect, "LARGE_ROWS", 1)
        driven.service.stopping.set()
        assert driven.evaluate(run_id).outcome == "idle"
    run = driven.run(run_id)
    assert (run.last_step, run.lease_until_ns, run.health) == (-1, 0, {})
    assert next_due(driven, run_id) is not None


def test_a_usual_evaluation_is_finished_while_the_process_ends(driven: Driven) -> None:
    recording, run_id = driven.begin()
    driven.announce(run_id, recording.write(0, 0, 4, nan_from(0)))
    driven.service.stopping.set()
    assert driven.evaluate(run_id).outcome == "committed"


def test_many_rows_for_many_rules_take_the_turn(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, run_id = driven_sqlite.begin()
    driven_sqlite.announce(run_id, recording.write(0, 0, 4, nan_from(0)))
    in_turn = claimed(driven_sqlite, due_since(driven_sqlite, "vision", "other", 1.0))
    assert take_turn(driven_sqlite.service.database, in_turn)
    assert driven_sqlite.evaluate(run_id).outcome == "committed"
    driven_sqlite.announce(run_id, recording.write(1, 5, 9, nan_from(0)))
    monkeypatch.setattr(collect, "LARGE_PRODUCT", 10)
    assert driven_sqlite.evaluate(run_id).outcome == "idle"
    release(driven_sqlite.service.database, in_turn, None)
    assert driven_sqlite.evaluate(run_id).outcome == "committed"


def test_many_steps_for_the_sql_rules_of_a_recorder_take_the_turn(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = "SELECT tensor, mean AS value FROM statistics WHERE mean > 1e30"
    recording, run_id = driven_sqlite.begin((RuleConfig(rule="sql", name="query", params={"query": query}),))
    in_turn = claimed(driven_sqlite, due_since(driven_sqlite, "vision", "other", 1.0))
    assert take_turn(driven_sqlite.service.database, in_turn)
    monkeypatch.setattr(collect, "LARGE_QUERIES", 5)
    driven_sqlite.announce(run_id, recording.write(0, 0, 3))
    assert driven_sqlite.evaluate(run_id).outcome == "committed"
    driven_sqlite.announce(run_id, recording.write(1, 4, 8))
    assert driven_sqlite.evaluate(run_id).outcome == "idle"


def test_an_evaluation_reads_no_more_rows_than_requested_rules_judge_within_their_time(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, run_id = driven_sqlite.begin([RuleConfig(rule="loss_spike"), RuleConfig(rule="overfit")])
    first, second = recording.write(0, 0, 4), recording.write(1, 5, 9)
    monkeypatch.setattr(collect, "LARGE_PRODUCT", 2)  # two rows for each of the two rules
    driven_sqlite.announce(run_id, first, second)
    assert [driven_sqlite.evaluate(run_id).more for _ in range(2)] == [True, False]
    assert driven_sqlite.run(run_id).last_step == 9


def test_long_names_take_the_turn(driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules keep several copies of each name in their states: some kilobytes of rows take seconds."""
    recording, run_id = driven_sqlite.begin()
    driven_sqlite.announce(run_id, recording.write(0, 0, 4, nan_from(0)))
    in_turn = claimed(driven_sqlite, due_since(driven_sqlite, "vision", "other", 1.0))
    assert take_turn(driven_sqlite.service.database, in_turn)
    monkeypatch.setattr(collect, "LARGE_WORDS", 3000)
    assert driven_sqlite.evaluate(run_id).outcome == "committed"
    driven_sqlite.announce(run_id, recording.write(1, 5, 9, nan_from(0)))
    monkeypatch.setattr(collect, "LARGE_WORDS", 30)
    assert driven_sqlite.evaluate(run_id).outcome == "idle"


class KilledError(BaseException):
    """The process is gone: nothing that handles errors may catch it."""


@dataclass
class Workers:
    """Processes that evaluate a run one after the other, each until it is killed."""

    driven: Driven
    run_id: int
    dead: bool = False
    deaths: int = 0

    def kill(self) -> None:
        """End the process that is working now."""
        self.dead = True
        raise KilledError

    def settle(self) -> None:
        """Work until there is nothing to do at once; each process that dies leaves its lease, which ends."""
        more = True
        while more and self.deaths < MOST_DEATHS:
            try:
                more = self.driven.evaluate(self.run_id).more
            except KilledError:
                self.dead, self.driven, more = False, self.driven.restarted(), True
                self.deaths += 1
                self.driven.change(RunRow, self.run_id, lease_until_ns=1)


@pytest.fixture
def workers(driven: Driven) -> Any:
    """Workers on a run; a dead one reaches the database no more."""
    driven.recording().begin()
    found = Workers(driven, driven.register())

    def refuse(_connection: object) -> None:
        if found.dead:
            raise KilledError

    event.listen(driven.service.database.engine, "begin", refuse)
    yield found
    event.remove(driven.service.database.engine, "begin", refuse)


def killing(workers: Workers, monkeypatch: pytest.MonkeyPatch, *bad: SegmentKey) -> None:
    """Have every process killed that decodes one of some segments, new or as context."""
    decode = collect.decode

    def deadly(data: bytes, key: SegmentKey, *, histograms: bool) -> Any:
        if key in bad:
            workers.kill()
        return decode(data, key, histograms=histograms)

    monkeypatch.setattr(collect, "decode", deadly)
    monkeypatch.setattr(context, "decode", deadly)


def write(recording: Recording, count: int, value: Callable[[int, str], float]) -> list[SegmentKey]:
    return [recording.write(seq, 4 * seq, 4 * seq + 3, value) for seq in range(count)]


def test_a_segment_that_kills_its_readers_is_marked_and_the_others_are_judged(
    workers: Workers, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = write(Recording(folder_store), 6, nan_from(21))
    killing(workers, monkeypatch, keys[3])
    workers.driven.announce(workers.run_id, *keys)
    workers.settle()
    assert workers.deaths == CONDEMNED
    states = workers.driven.segments(workers.run_id)
    assert {seq: state for (_, seq), state in states.items() if state != "read"} == {3: "corrupt"}
    assert workers.driven.alerts(workers.run_id)["non_finite_values"][:2] == ("firing", 21)
    run = workers.driven.run(workers.run_id)
    assert run.health["corrupt_segments"] == 1
    assert keys[3].path in run.health["last_corrupt"]
    assert "killed" in run.health["last_corrupt"]
    assert (run.unfinished_claims, run.reading) == (0, "")


def test_several_of_them_are_all_found(
    workers: Workers, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = write(Recording(folder_store), 6, nan_from(21))
    killing(workers, monkeypatch, keys[1], keys[4])
    workers.driven.announce(workers.run_id, *keys)
    workers.settle()
    states = workers.driven.segments(workers.run_id)
    assert {seq for (_, seq), state in states.items() if state == "corrupt"} == {1, 4}
    assert workers.deaths == CONDEMNED + (
        CONDEMNED - CAREFUL
    )  # of the second only while segments are read one by one


def test_context_that_kills_its_readers_is_left_out_and_no_new_segment_is_blamed(
    workers: Workers, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(folder_store)
    keys = [recording.write(seq, 4 * seq, 4 * seq + 3, exploding_from(33)) for seq in range(6)]
    workers.driven.announce(workers.run_id, *keys)
    workers.settle()
    killing(workers, monkeypatch, keys[5])
    workers.driven = workers.driven.restarted()
    workers.driven.announce(workers.run_id, *(recording.write(seq, 4 * seq, 4 * seq + 3) for seq in (6, 7)))
    workers.settle()
    assert workers.deaths == CONDEMNED
    assert set(workers.driven.segments(workers.run_id).values()) == {"read"}
    health = workers.driven.run(workers.run_id).health
    assert health["lost_context"] == 1
    assert keys[5].path in health["last_lost_context"]


@pytest.mark.parametrize("deaths", [CAREFUL - 1, CAREFUL, CONDEMNED, MOST_DEATHS - 1])
def test_processes_that_die_at_other_work_condemn_nothing(
    workers: Workers, folder_store: Store, deaths: int
) -> None:
    keys = write(Recording(folder_store), 3, nan_from(9))

    def kill(point: str, _subject: object) -> None:
        if point == "evaluate.claimed" and workers.deaths < deaths:
            workers.kill()

    workers.driven.announce(workers.run_id, *keys)
    with listening(kill):
        workers.settle()
    assert workers.deaths == deaths
    assert set(workers.driven.segments(workers.run_id).values()) == {"read"}
    assert workers.driven.alerts(workers.run_id)["non_finite_values"][:2] == ("firing", 9)


def test_a_segment_is_blamed_for_deaths_in_a_row_alone(
    workers: Workers, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process dies at a segment by chance, and another at something else: nothing is marked."""
    keys = write(Recording(folder_store), 3, nan_from(9))
    decode = collect.decode

    def kill(point: str, _subject: object) -> None:
        if point == "evaluate.claimed" and workers.deaths % 2 and workers.deaths < MOST_DEATHS - 1:
            workers.kill()

    def decoded(*args: Any, **options: Any) -> Any:
        if workers.deaths < MOST_DEATHS - 2:
            workers.kill()
        return decode(*args, **options)

    monkeypatch.setattr(collect, "decode", decoded)
    workers.driven.announce(workers.run_id, *keys)
    with listening(kill):
        workers.settle()
    assert set(workers.driven.segments(workers.run_id).values()) == {"read"}


def test_an_ordinary_evaluation_notes_nothing(driven: Driven) -> None:
    recording, run_id = driven.begin()
    driven.announce(run_id, *write(recording, 3, nan_from(9)))
    with statements(driven.service.database) as executed:
        driven.settle(run_id)
    assert executed
    assert not [
        statement for statement in executed if "reading=" in statement and "lease_until_ns" not in statement
    ]
