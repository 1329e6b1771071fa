"""Baselines of earlier runs: which runs count, what is pinned, and that live runs and backtests agree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import select

from tests.sdk.format.blocks import Row, tensor
from tests.services.driving import Driven, make_service
from tests.services.recording import LOSS, PROJECT, Recording, Value, exploding_from, healthy
from watchstep.format import documents, layout
from watchstep.format.documents import AttemptDocument, EndState
from watchstep.store.store import Store
from watchstep_rules.backtest.backtest import backtest_run
from watchstep_rules.config.rule_config import MinimumDuration, RuleConfig
from watchstep_rules.signals.baseline import architecture_of
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Attempt, PinnedBaseline, RunSummaryRow, Upkeep
from watchstep_services.evaluation.baselines import program_of
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
SOUND = 5
WEIGHT = tensor("layer.weight", "weights", shape=(4, 5))


def large(step: int, tensor: str) -> float:
    """A loss that is ten times as high as usual from step 20 on."""
    return 10.0 if tensor == "loss" and step >= 20 else 1.0


@pytest.fixture
def compared(sqlite: Database, folder_store: Store) -> Driven:
    return Driven(make_service(sqlite, folder_store, RULES))


@pytest.fixture
def on_each_database(database: Database, folder_store: Store) -> Driven:
    """What is compared is the same on each; these statements are not."""
    return Driven(make_service(database, folder_store, RULES))


@dataclass(frozen=True)
class Program:
    """How a run was started."""

    file: str = "train.py"
    digest: str = "d0"
    arguments: str = ""
    world_size: int = 1

    @property
    def environment(self) -> dict[str, str]:
        command = f"/usr/bin/python {self.file} {self.arguments}".strip()
        return {"program": self.file, "program digest": self.digest, "command": command}


TRAIN = Program()


def begun(store: Store, run: str, program: Program = TRAIN) -> Recording:
    """A run of a program, with its documents and no rows."""
    recording = Recording(store, run)
    claim = AttemptDocument("a1", 1, program.world_size, "raise", environment=program.environment)
    recording.store.create(layout.attempt_document("a1"), documents.encode(claim))
    return recording.begin()


def recorded(
    driven: Driven,
    store: Store,
    run: str,
    value: Value = healthy,
    program: Program = TRAIN,
    state: EndState = "completed",
) -> int:
    """A run that has ended, is judged and has had its upkeep."""
    recording = begun(store, run, program)
    run_id = driven.register(run)
    for worker in range(program.world_size):
        driven.judge(run_id, recording.write(0, 0, 9, value, worker))
        driven.announce(run_id, recording.write(1, 10, LAST, value, worker))
    for worker in range(program.world_size):
        recording.end(state, LAST, worker)
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


def test_the_sixth_run_is_compared_with_five_earlier_ones(
    on_each_database: Driven, folder_store: Store
) -> None:
    for number in range(SOUND):
        recorded(on_each_database, folder_store, f"sound-{number}")
    assert not pinned(on_each_database)
    run_id = recorded(on_each_database, folder_store, "next", large)
    phase, since, finding = on_each_database.alerts(run_id)["unlike_earlier_runs"]
    assert (phase, since) == ("firing", 21)
    assert finding is not None
    assert (
        finding["message"] == "mean of loss is 10, above the range 0.5 to 2 of 5 earlier runs in this phase"
    )


def test_a_run_like_the_earlier_ones_raises_no_alert(compared: Driven, folder_store: Store) -> None:
    for number in range(SOUND + 1):
        run_id = recorded(compared, folder_store, f"sound-{number}")
    assert pinned(compared) == 1
    assert compared.alerts(run_id) == {}


@pytest.mark.ci
def test_a_backtest_judges_an_attempt_by_the_baseline_that_was_pinned_to_it(
    compared: Driven, folder_store: Store
) -> None:
    for number in range(SOUND):
        recorded(compared, folder_store, f"sound-{number}")
    run_id = recorded(compared, folder_store, "next", large)
    recorded(compared, folder_store, "fifth", large)  # would widen a baseline that were made now
    for due in unwritten(compared.service):
        write_journal(compared.service, due)
    live = [finding["step"] for config, _, finding in compared.findings() if finding["tensor"] == "loss"]
    (attempt,) = backtest_run(f"{folder_store.location}/vision/next", RULES[:1]).attempts
    assert [finding.step for finding in attempt.outcomes[0].findings] == live[: LAST - 19]
    assert compared.alerts(run_id)["unlike_earlier_runs"][1] == 21


def test_a_restarted_service_judges_by_the_pinned_baseline(compared: Driven, folder_store: Store) -> None:
    for number in range(SOUND):
        recorded(compared, folder_store, f"sound-{number}")
    recording = begun(folder_store, "next")
    run_id = compared.register("next")
    compared.judge(run_id, recording.write(0, 0, 9))
    with compared.service.database.write() as session:
        for row in session.execute(select(RunSummaryRow)).scalars():
            session.delete(row)
    again = compared.restarted()
    again.judge(run_id, recording.write(1, 10, LAST, large))
    assert again.alerts(run_id)["unlike_earlier_runs"][:2] == ("firing", 21)


def test_ticks_before_the_first_rows_keep_no_attempt_from_its_baseline(
    sqlite: Database, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = (*RULES, RuleConfig(rule="stalled_training", params={"threshold": 60.0}))
    driven = Driven(make_service(sqlite, folder_store, rules, silent_seconds=1e9))
    for number in range(SOUND):
        recorded(driven, folder_store, f"sound-{number}")
    recording = begun(folder_store, "next")
    run_id = driven.register("next")
    discover(driven.service, run_id)
    with monkeypatch.context() as patched:
        for seconds in (0, 100):
            patched.setattr(claiming, "clock_of", lambda row, after=seconds: row.now_ns + after * 10**9)
            driven.evaluate(run_id)
    with sqlite.read() as session:
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
    for number in range(SOUND):
        recorded(compared, folder_store, f"sound-{number}")
    compared.judge(run_id, recording.write(1, 10, LAST, large))
    assert compared.alerts(run_id) == {}


OTHERS = {
    "another file": (TRAIN, Program("other.py", "d1"), healthy, "completed"),
    "the file edited": (TRAIN, Program(digest="d1"), healthy, "completed"),
    "an argument": (Program(arguments="--lr 0.1"), Program(arguments="--lr 0.2"), healthy, "completed"),
    "workers": (TRAIN, Program(world_size=2), healthy, "completed"),
    "an unknown file": (Program(digest=""), Program(digest=""), healthy, "completed"),
    "an alert": (TRAIN, TRAIN, exploding_from(30), "completed"),
    "a failure": (TRAIN, TRAIN, healthy, "failed"),
}


@pytest.mark.ci
@pytest.mark.parametrize("other", OTHERS)
def test_only_completed_runs_of_the_same_program_without_an_alert_count(
    sqlite: Database, folder_store: Store, other: str
) -> None:
    compared = Driven(make_service(sqlite, folder_store, RULES))
    program, of_other, value, state = OTHERS[other]
    for number in range(SOUND - 1):
        recorded(compared, folder_store, f"sound-{number}", program=program)
    recorded(compared, folder_store, "other", value, of_other, cast("EndState", state))
    run_id = recorded(compared, folder_store, "next", large, program)
    assert not pinned(compared)
    assert compared.alerts(run_id) == {}


@pytest.mark.parametrize(
    "seed", ["--seed {}", "--data-seed={}", "trainer.seed={}", "--random_state {} --quick"]
)
def test_runs_that_differ_in_the_seed_count(compared: Driven, folder_store: Store, seed: str) -> None:
    for number in range(SOUND + 1):
        recorded(compared, folder_store, f"sound-{number}", program=Program(arguments=seed.format(number)))
    assert pinned(compared) == 1


@pytest.mark.ci
def test_a_lower_loss_is_no_deviation(compared: Driven, folder_store: Store) -> None:
    def small(step: int, tensor: str) -> float:
        return 0.1 if tensor == "loss" and step >= 20 else 1.0

    for number in range(SOUND):
        recorded(compared, folder_store, f"sound-{number}")
    run_id = recorded(compared, folder_store, "next", small)
    assert pinned(compared) == 1
    assert compared.alerts(run_id) == {}


def test_a_run_with_another_parameter_is_not_compared(compared: Driven, folder_store: Store) -> None:
    document = AttemptDocument("a1", 1, environment=TRAIN.environment)
    assert architecture_of((WEIGHT,)) != architecture_of(()) == architecture_of((LOSS,))
    assert program_of(document)
    for number in range(SOUND):
        recorded(compared, folder_store, f"sound-{number}")
    recording = begun(folder_store, "next")
    run_id = compared.register("next")
    compared.judge(run_id, recording.write_rows(0, [Row(0, LOSS, [1.0]), Row(0, WEIGHT, [1.0] * 20)]))
    assert not pinned(compared)


def test_a_run_whose_rows_exceed_the_memory_has_no_summary_and_its_upkeep_continues(
    compared: Driven, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watchstep_rules.baseline._MEGABYTES", 0.001)
    run_id = recorded(compared, folder_store, "large")
    assert summarized(compared) == set()
    row = compared.one(select(Upkeep.summarized_ns).filter_by(run_id=run_id))
    problem = compared.one(select(Upkeep.problem).filter_by(run_id=run_id))
    assert (row is not None, problem) == (True, "")


def test_a_run_that_is_deleted_leaves_no_summary(on_each_database: Driven, folder_store: Store) -> None:
    ids = [recorded(on_each_database, folder_store, f"sound-{number}") for number in range(SOUND + 1)]
    with on_each_database.service.database.write() as session:
        for run_id in ids:
            delete_rows(session, run_id)
    assert summarized(on_each_database) == set()
    assert pinned(on_each_database) == 0


def test_a_damaged_baseline_on_the_store_is_named_by_a_backtest(
    compared: Driven, folder_store: Store
) -> None:
    recorded(compared, folder_store, "run")
    run_store = folder_store.child("vision/run/")
    run_store.put(layout.baseline_document("a1"), b'{"tensors": 1}')
    (attempt,) = backtest_run(f"{folder_store.location}/vision/run", RULES).attempts
    assert attempt.notes[-1] == "baselines/a1.json: not a baseline (ValidationError)"


@pytest.mark.ci
def test_a_baseline_of_the_rule_config_is_not_replaced(sqlite: Database, folder_store: Store) -> None:
    own = {"tensors": {"loss": {"shape": [], "statistic": "mean", "phases": [[0.5, 0.6]]}}}
    config = replace_params(RULES[0], {"baseline": own})
    driven = Driven(make_service(sqlite, folder_store, (config,)))
    for number in range(SOUND + 1):
        run_id = recorded(driven, folder_store, f"sound-{number}")
    assert driven.findings()[-1][2]["message"].startswith("mean of loss is 1, above the range 0.5 to 0.6")
    assert pinned(driven) == 1
    assert driven.alerts(run_id)["unlike_earlier_runs"][0] == "inactive"  # one step is in that phase, not two


def replace_params(config: RuleConfig, params: dict[str, object]) -> RuleConfig:
    return config.model_copy(update={"params": params})


@pytest.mark.ci
def test_the_order_of_arrival_changes_nothing(compared: Driven, folder_store: Store) -> None:
    for number in range(SOUND):
        recorded(compared, folder_store, f"whole-{number}", program=Program(digest="whole"))
        recorded(compared, folder_store, f"parts-{number}", program=Program(digest="parts"))
    whole = recorded(compared, folder_store, "whole", large, Program(digest="whole"))
    recording = begun(folder_store, "parts", Program(digest="parts"))
    parts = compared.register("parts")
    for seq, step in enumerate(range(0, LAST + 1, 2)):
        compared.judge(parts, recording.write(seq, step, step + 1, large))
    assert compared.alerts(parts) == compared.alerts(whole) != {}


@pytest.mark.ci
def test_a_store_that_takes_no_baseline_does_not_keep_a_run_from_being_judged(
    compared: Driven, folder_store: Store
) -> None:
    for number in range(SOUND):
        recorded(compared, folder_store, f"sound-{number}")
    folder = Path(folder_store.location) / PROJECT / "next"
    folder.mkdir()
    (folder / layout.BASELINES.rstrip("/")).touch()  # no folder can be made here
    run_id = recorded(compared, folder_store, "next", exploding_from(30))
    assert compared.alerts(run_id).keys() == {"exploding_gradient"}
    assert not pinned(compared)
