"""Baselines of earlier runs: which runs count, what is pinned, and that live runs and backtests agree."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select

from tests.services.driving import Driven, make_service
from tests.services.recording import PROJECT, Recording, Value, exploding_from, healthy
from watchstep.format import documents, layout
from watchstep.format.documents import RunDocument
from watchstep.store.store import Store
from watchstep_rules.backtest.backtest import backtest_run
from watchstep_rules.config.rule_config import MinimumDuration, RuleConfig
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Attempt, PinnedBaseline, RunSummaryRow
from watchstep_services.evaluation.journal import unwritten, write_journal
from watchstep_services.retention import delete_rows, upkeep
from watchstep_services.runs import claim as claiming
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.lifecycle import advance_run

RULES = (
    RuleConfig(rule="unlike_earlier_runs", **{"for": MinimumDuration(steps=2)}),
    RuleConfig(rule="exploding_gradient"),
)
LAST = 39


def large(step: int, tensor: str) -> float:
    """A loss that is ten times as high as usual from step 20 on."""
    return 10.0 if tensor == "loss" and step >= 20 else 1.0


@pytest.fixture
def compared(database: Database, folder_store: Store) -> Driven:
    return Driven(make_service(database, folder_store, RULES))


def begun(store: Store, run: str, program: str = "train.py") -> Recording:
    """A run of a program, with its documents and no rows."""
    recording = Recording(store, run)
    document = RunDocument(recording.project, run, 1, environment={"program": program})
    recording.store.create(layout.RUN_DOCUMENT, documents.encode(document))
    return recording.begin()


def recorded(
    driven: Driven, store: Store, run: str, value: Value = healthy, program: str = "train.py"
) -> int:
    """A run that has ended, is judged and has had its upkeep."""
    recording = begun(store, run, program)
    run_id = driven.register(run)
    driven.judge(run_id, recording.write(0, 0, 9, value))
    driven.announce(run_id, recording.write(1, 10, LAST, value))
    recording.end("completed", LAST)
    driven.discover(run_id)
    advance_run(driven.service, run_id)
    upkeep(driven.service)
    return run_id


def pinned(driven: Driven) -> int:
    with driven.service.database.read() as session:
        return len(session.execute(select(PinnedBaseline)).all())


def summarized(driven: Driven) -> set[int]:
    with driven.service.database.read() as session:
        return set(session.execute(select(RunSummaryRow.run_id)).scalars())


def test_the_fourth_run_is_compared_with_three_earlier_ones(compared: Driven, folder_store: Store) -> None:
    for number in range(3):
        recorded(compared, folder_store, f"sound-{number}", large if number == 9 else healthy)
    assert not pinned(compared)
    run_id = recorded(compared, folder_store, "fourth", large)
    phase, since, finding = compared.alerts(run_id)["unlike_earlier_runs"]
    assert (phase, since) == ("firing", 21)
    assert finding is not None
    assert (
        finding["message"] == "mean of loss is 10, above the range 0.5 to 2 of 3 earlier runs in this phase"
    )


def test_a_run_like_the_earlier_ones_raises_no_alert(compared: Driven, folder_store: Store) -> None:
    for number in range(4):
        run_id = recorded(compared, folder_store, f"sound-{number}")
    assert pinned(compared) == 1
    assert compared.alerts(run_id) == {}


@pytest.mark.ci
def test_a_backtest_judges_an_attempt_by_the_baseline_that_was_pinned_to_it(
    compared: Driven, folder_store: Store
) -> None:
    for number in range(3):
        recorded(compared, folder_store, f"sound-{number}")
    run_id = recorded(compared, folder_store, "fourth", large)
    recorded(compared, folder_store, "fifth", large)  # would widen a baseline that were made now
    for due in unwritten(compared.service):
        write_journal(compared.service, due)
    live = [finding["step"] for config, _, finding in compared.findings() if finding["tensor"] == "loss"]
    (attempt,) = backtest_run(f"{folder_store.location}/vision/fourth", RULES[:1]).attempts
    assert [finding.step for finding in attempt.outcomes[0].findings] == live[: LAST - 19]
    assert compared.alerts(run_id)["unlike_earlier_runs"][1] == 21


def test_a_restarted_service_judges_by_the_pinned_baseline(compared: Driven, folder_store: Store) -> None:
    for number in range(3):
        recorded(compared, folder_store, f"sound-{number}")
    recording = begun(folder_store, "fourth")
    run_id = compared.register("fourth")
    compared.judge(run_id, recording.write(0, 0, 9))
    with compared.service.database.write() as session:
        for row in session.execute(select(RunSummaryRow)).scalars():
            session.delete(row)
    again = compared.restarted()
    again.judge(run_id, recording.write(1, 10, LAST, large))
    assert again.alerts(run_id)["unlike_earlier_runs"][:2] == ("firing", 21)


def test_ticks_before_the_first_rows_keep_no_attempt_from_its_baseline(
    database: Database, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = (*RULES, RuleConfig(rule="stalled_training", params={"threshold": 60.0}))
    driven = Driven(make_service(database, folder_store, rules, silent_seconds=1e9))
    for number in range(3):
        recorded(driven, folder_store, f"sound-{number}")
    recording = begun(folder_store, "fourth")
    run_id = driven.register("fourth")
    discover(driven.service, run_id)
    with monkeypatch.context() as patched:
        for seconds in (0, 100):
            patched.setattr(claiming, "clock_of", lambda row, after=seconds: row.now_ns + after * 10**9)
            driven.evaluate(run_id)
    with database.read() as session:
        attempt = session.execute(select(Attempt).filter_by(run_id=run_id)).scalar_one()
    assert (attempt.ticks > 0, attempt.largest) == (True, -1)
    driven.judge(run_id, recording.write(0, 0, 9, large), recording.write(1, 10, LAST, large))
    assert pinned(driven) == 1
    assert driven.alerts(run_id)["unlike_earlier_runs"][:2] == ("firing", 21)


def test_an_attempt_keeps_having_no_baseline_once_it_was_judged_without(
    compared: Driven, folder_store: Store
) -> None:
    recording = begun(folder_store, "early")
    run_id = compared.register("early")
    compared.judge(run_id, recording.write(0, 0, 9))
    for number in range(3):
        recorded(compared, folder_store, f"sound-{number}")
    compared.judge(run_id, recording.write(1, 10, LAST, large))
    assert compared.alerts(run_id) == {}


@pytest.mark.ci
def test_runs_of_another_program_and_runs_with_alerts_do_not_count(
    compared: Driven, folder_store: Store
) -> None:
    sound = [recorded(compared, folder_store, f"sound-{number}") for number in range(2)]
    other = recorded(compared, folder_store, "other", program="other.py")
    faulty = recorded(compared, folder_store, "faulty", exploding_from(30))
    assert "exploding_gradient" in compared.alerts(faulty)
    assert summarized(compared) == {*sound, other}
    run_id = recorded(compared, folder_store, "next", large)
    assert not pinned(compared)
    assert compared.alerts(run_id) == {}


@pytest.mark.ci
def test_a_deliberate_change_becomes_part_of_the_baseline(compared: Driven, folder_store: Store) -> None:
    for number in range(3):
        recorded(compared, folder_store, f"sound-{number}")
    changed = [recorded(compared, folder_store, f"changed-{number}", large) for number in range(2)]
    assert "unlike_earlier_runs" in compared.alerts(changed[0])
    assert compared.alerts(changed[1]) == {}  # the first of them is in its baseline


def test_a_run_that_is_deleted_leaves_no_summary(compared: Driven, folder_store: Store) -> None:
    ids = [recorded(compared, folder_store, f"sound-{number}") for number in range(4)]
    with compared.service.database.write() as session:
        for run_id in ids:
            delete_rows(session, run_id)
    assert summarized(compared) == set()
    assert pinned(compared) == 0


def test_a_damaged_baseline_on_the_store_is_named_by_a_backtest(
    compared: Driven, folder_store: Store
) -> None:
    recorded(compared, folder_store, "run")
    run_store = folder_store.child("vision/run/")
    run_store.put(layout.baseline_document("a1"), b'{"tensors": 1}')
    (attempt,) = backtest_run(f"{folder_store.location}/vision/run", RULES).attempts
    assert attempt.notes[-1] == "baselines/a1.json: not a baseline (ValidationError)"


@pytest.mark.ci
def test_a_baseline_of_the_rule_config_is_not_replaced(database: Database, folder_store: Store) -> None:
    own = {"tensors": {"loss": {"shape": [], "statistic": "mean", "phases": [[5.0, 6.0]]}}}
    config = replace_params(RULES[0], {"baseline": own})
    driven = Driven(make_service(database, folder_store, (config,)))
    for number in range(4):
        run_id = recorded(driven, folder_store, f"sound-{number}")
    assert driven.findings()[-1][2]["message"].startswith("mean of loss is 1, below the range 5 to 6")
    assert pinned(driven) == 1
    assert driven.alerts(run_id)["unlike_earlier_runs"][0] == "inactive"  # one step is in that phase, not two


def replace_params(config: RuleConfig, params: dict[str, object]) -> RuleConfig:
    return config.model_copy(update={"params": params})


@pytest.mark.ci
def test_the_order_of_arrival_changes_nothing(compared: Driven, folder_store: Store) -> None:
    for number in range(3):
        recorded(compared, folder_store, f"whole-{number}", program="whole.py")
        recorded(compared, folder_store, f"parts-{number}", program="parts.py")
    whole = recorded(compared, folder_store, "whole", large, "whole.py")
    recording = begun(folder_store, "parts", "parts.py")
    parts = compared.register("parts")
    for seq, step in enumerate(range(0, LAST + 1, 2)):
        compared.judge(parts, recording.write(seq, step, step + 1, large))
    assert compared.alerts(parts) == compared.alerts(whole) != {}


@pytest.mark.ci
def test_a_store_that_takes_no_baseline_does_not_keep_a_run_from_being_judged(
    compared: Driven, folder_store: Store
) -> None:
    for number in range(3):
        recorded(compared, folder_store, f"sound-{number}")
    folder = Path(folder_store.location) / PROJECT / "fourth"
    folder.mkdir()
    (folder / layout.BASELINES.rstrip("/")).touch()  # no folder can be made here
    run_id = recorded(compared, folder_store, "fourth", exploding_from(30))
    assert compared.alerts(run_id).keys() == {"exploding_gradient"}
    assert not pinned(compared)
