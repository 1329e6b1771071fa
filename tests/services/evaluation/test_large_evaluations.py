"""Runs with very many rows are judged in parts, one part at a time in each process."""

from __future__ import annotations

import pytest

from tests.services.driving import Driven
from tests.services.recording import Recording, nan_from
from watchstep.format.block import Block
from watchstep.store.store import Store
from watchstep_rules.engine.rule_inputs import JudgingProgress
from watchstep_services.evaluation import collect as collecting
from watchstep_services.service import rule_time
from watchstep_services.service.judging import Judged, Loaded, judge_all

_JUDGE_ALL = "watchstep_services.evaluation.evaluate.judge_all"


def test_an_evaluation_reads_up_to_a_number_of_rows_and_the_next_ones_read_the_rest(
    driven_sqlite: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(folder_store).begin()
    recording.write_all([1, 3, 5, 7, 9])
    run_id = driven_sqlite.register()
    driven_sqlite.announce(run_id, *recording.written["w0"])
    monkeypatch.setattr(collecting, "LARGE_ROWS", 1)
    assert [driven_sqlite.evaluate(run_id).more for _ in range(5)] == [True, True, True, True, False]
    assert driven_sqlite.run(run_id).last_step == 9


def test_a_large_evaluation_is_postponed_while_another_goes_on_and_then_done(
    driven_sqlite: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for name in ("first", "second"):
        recording = Recording(folder_store, run=name).begin()
        runs.append(driven_sqlite.register(name))
        driven_sqlite.announce(runs[-1], recording.write(0, 0, 4, nan_from(0)))
    first, second = runs
    outcomes: list[str] = []

    def judge_beside(
        configs: list[Loaded], history: Block, arrived: Block, progress: JudgingProgress
    ) -> list[Judged]:
        monkeypatch.setattr(_JUDGE_ALL, judge_all)
        outcomes.append(driven_sqlite.evaluate(second).outcome)
        return judge_all(configs, history, arrived, progress)

    monkeypatch.setattr(_JUDGE_ALL, judge_beside)
    monkeypatch.setattr(collecting, "LARGE_ROWS", 1)
    assert driven_sqlite.evaluate(first).outcome == "committed"
    assert outcomes == ["idle"]
    assert driven_sqlite.run(second).last_step == -1
    assert driven_sqlite.evaluate(second).outcome == "committed"
    assert driven_sqlite.run(second).last_step == 4


def test_projects_that_wait_for_a_large_evaluation_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("watchstep_services.service.rule_time.time.monotonic", lambda: clock[0])
    turn = rule_time.LargeTurn()
    assert turn.take("many")
    assert not turn.take("many")
    assert not turn.take("other")
    turn.release()
    clock[0] += 1.0
    assert not turn.take("many")  # the other waits, and has had no turn
    assert turn.take("other")
    turn.release()
    clock[0] += 1.0
    assert turn.take("many")  # alone
    turn.release()
    clock[0] += 1.0
    assert turn.take("other")
    assert not turn.take("many")
    turn.release()
    clock[0] += 60.0  # nobody waits that long without asking again
    assert turn.take("other")
