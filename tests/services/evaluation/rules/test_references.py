"""Reference runs: pinned once when an attempt begins, and never outside of the project."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rules.saved import OUTPUT, WEIGHT, away, mark, registered, save
from tests.sdk.format.blocks import Row, block_of, tensor
from tests.services.driving import Driven, make_service
from tests.services.recording import LOSS, PROJECT, Recording
from watchstep.errors import BadNameError, FormatError
from watchstep.format import layout
from watchstep.format.layout import references_document
from watchstep.reading.run import open_run
from watchstep.store.store import Store
from watchstep_rules.backtest.backtest import AttemptOutcome, backtest_run
from watchstep_rules.config.rule_config import KeepFiring, RuleConfig
from watchstep_rules.engine.saved_tensors import SavedTensors
from watchstep_rules.references import (
    JudgedAttempt,
    PinnedReferences,
    current_references,
    pin_references,
    read_references,
    references_of,
    saved_tensors_of,
)
from watchstep_rules.signals.reference import MOST_TENSORS, OWN_RUN, CheckedReference
from watchstep_services.core.store_location import StoreRegistration
from watchstep_services.db.engine import Database
from watchstep_services.db.models import RunRow
from watchstep_services.evaluation import evaluate as evaluating
from watchstep_services.evaluation.commit import commit
from watchstep_services.evaluation.journal import unwritten, write_journal
from watchstep_services.evaluation.references import ReferenceCache
from watchstep_services.runs.stops import digest_of
from watchstep_services.tenancy import find_project, move_project, register_store

STATISTICS = RuleConfig(
    rule="similar_across_runs", name="statistics", params={"run": "good", "figure": "mean"}
)
ELEMENTS = RuleConfig(
    rule="similar_across_runs", name="elements", params={"run": "good", "elementwise": True}
)
AMAZONS = RuleConfig(
    rule="sagemaker_similar_across_runs", params={"other_trials": ["good"], "collection_names": "losses"}
)
RULES = (STATISTICS, ELEMENTS, AMAZONS)


@pytest.fixture(autouse=True)
def _rule() -> Iterator[None]:
    with registered():
        yield


def full(value: float) -> np.ndarray[Any, Any]:
    return np.full((2, 2), value, np.float32)


def rows_of(recording: Recording, value: float, first: int = 0) -> list[Row]:
    """A loss at each of ten steps, and a saved weight at the first."""
    save(recording.store, first, {WEIGHT: full(value)}, collection="weights", attempt=recording.attempt)
    losses = [Row(step, LOSS, [value]) for step in range(first, first + 10)]
    return [*losses, mark(first, first + 1, collection="weights")]


def recorded(
    driven: Driven, store: Store, run: str, value: float, attempt: str = "a1"
) -> tuple[Recording, int]:
    """A run with ten steps, which the service has judged."""
    recording = Recording(store, run, attempt)
    if attempt == "a1":
        recording.begin()
    else:
        recording.begin(started_ns=2)
    run_id = driven.register(run)
    driven.judge(run_id, recording.write_rows(0, rows_of(recording, value)))
    return recording, run_id


def found(driven: Driven, run_id: int) -> list[tuple[str, int, str]]:
    return sorted(
        (name, since, (finding or {}).get("tensor", ""))
        for name, (phase, since, finding) in driven.alerts(run_id).items()
        if phase == "firing"
    )


ALL_FIRE = [
    ("elements", 0, "0.weight"),
    ("sagemaker_similar_across_runs", 0, "loss"),
    ("statistics", 0, "loss"),
]


def health_of(driven: Driven, run_id: int) -> dict[str, str]:
    return {event["data"]["name"]: event["data"]["problem"] for event in driven.events(run_id, "rule.error")}


def judged_again(recording: Recording, configs: Sequence[RuleConfig] = RULES) -> AttemptOutcome:
    return backtest_run(open_run(recording.store), configs).attempts[-1]


def fired(attempt: AttemptOutcome) -> list[tuple[str, int, str]]:
    return sorted(
        (outcome.config.name, change.since_step, change.finding.tensor if change.finding else "")
        for outcome in attempt.outcomes
        for change in outcome.fired
    )


def end(driven: Driven, recording: Recording, run_id: int) -> None:
    recording.end("completed", 9)
    driven.discover(run_id)
    driven.change(RunRow, run_id, state="completed")
    for due in unwritten(driven.service):
        write_journal(driven.service, due)


@pytest.mark.ci
def test_references_are_pinned_once_and_later_changes_change_no_result(
    database: Database, folder_store: Store
) -> None:
    driven = Driven(make_service(database, folder_store, RULES))
    good, good_id = recorded(driven, folder_store, "good", 1.0)
    other, other_id = recorded(driven, folder_store, "other", 3.0)
    assert found(driven, other_id) == ALL_FIRE
    pinned = other.store.get(references_document("a1"))
    document = PinnedReferences.decode(pinned, "x")
    assert (document.attempts, document.problems) == ({"good": "a1"}, {})
    assert set(document.statistics) == {"good mean", "good rms"}
    # The reference run records on, and again under a new attempt, which would be equal.
    driven.judge(good_id, good.write_rows(1, rows_of(good, 3.0, 10)))
    recorded(driven, folder_store, "good", 3.0, "a2")
    driven.announce(other_id, other.write_rows(1, rows_of(other, 1.0, 10)))
    driven.restarted().settle(other_id)
    # Steps 10 to 19 are not in the pinned statistics; the saved tensors of the pinned attempt are compared.
    assert driven.alerts(other_id)["elements"][:2] == ("firing", 0)
    assert other.store.get(references_document("a1")) == pinned
    end(driven, other, other_id)
    attempt = judged_again(other)
    assert attempt.notes == ()
    assert fired(attempt) == ALL_FIRE
    live = [
        json.dumps(finding) for config, _, finding in driven.findings() if finding["step"] >= 0 and config
    ]
    again = [
        json.dumps(json.loads(finding.model_dump_json()))
        for outcome in attempt.outcomes
        for finding in outcome.findings
    ]
    assert set(again) <= set(live)
    # A later attempt is compared with the newest attempt of the reference run.
    recorded(driven, folder_store, "other", 3.0, "a2")
    assert PinnedReferences.decode(other.store.get(references_document("a2")), "x").attempts == {"good": "a2"}
    assert health_of(driven, other_id) == {}


def test_an_equal_run_fires_nothing(driven: Driven, folder_store: Store) -> None:
    driven = Driven(make_service(driven.service.database, folder_store, RULES))
    recorded(driven, folder_store, "good", 1.0)
    _, equal_id = recorded(driven, folder_store, "equal", 1.0)
    assert (found(driven, equal_id), health_of(driven, equal_id)) == ([], {})


def test_a_run_without_a_finite_value_keeps_no_other_rule_from_evaluation(
    sqlite: Database, folder_store: Store
) -> None:
    driven = Driven(make_service(sqlite, folder_store, (*RULES, RuleConfig(rule="non_finite_values"))))
    recorded(driven, folder_store, "good", float("nan"))
    _, other_id = recorded(driven, folder_store, "other", float("nan"))
    assert "non_finite_values" in driven.alerts(other_id)


def test_a_missing_run_is_reported_and_stays_missing(sqlite: Database, folder_store: Store) -> None:
    driven = Driven(make_service(sqlite, folder_store, (*RULES, RuleConfig(rule="non_finite_values"))))
    other, other_id = recorded(driven, folder_store, "other", float("nan"))
    assert set(driven.alerts(other_id)) == {"non_finite_values"}
    problems = health_of(driven, other_id)
    assert "run 'good': its statistics were not stored when this attempt began" in problems["statistics"]
    assert "run 'good' had no attempt to compare with when this attempt began" in problems["elements"]
    document = read_references(other.store, "a1")
    assert document is not None
    assert document.problems == {"good": "run 'good' has no attempt in this project"}
    recorded(driven, folder_store, "good", 1.0)  # too late for this attempt
    driven.judge(other_id, other.write_rows(1, rows_of(other, 3.0, 10)))
    assert set(driven.alerts(other_id)) == {"non_finite_values"}
    assert judged_again(other).notes[:1] != ("run good is compared with as it is now",)


def test_a_backtest_of_a_new_rule_compares_with_the_run_as_it_is(
    sqlite: Database, folder_store: Store
) -> None:
    driven = Driven(make_service(sqlite, folder_store, ()))
    recorded(driven, folder_store, "good", 1.0)
    other, other_id = recorded(driven, folder_store, "other", 3.0)
    end(driven, other, other_id)
    assert read_references(other.store, "a1") is None
    attempt = judged_again(other)
    assert fired(attempt) == ALL_FIRE
    assert any("run good is compared with as it is now" in note for note in attempt.notes)
    pin_references(JudgedAttempt(other.store, "a1"), RULES, {"good": "a1"})
    assert judged_again(other).notes == ()
    # A statistic that was not pinned is added, and the pinned ones remain.
    rms = RuleConfig(rule="similar_across_runs", name="largest", params={"run": "good", "figure": "max"})
    references, notes = references_of(other.store, "a1", [*RULES, rms])
    assert references is not None
    assert set(references.statistics) == {"good mean", "good rms", "good max"}
    assert len(notes) == 1


@pytest.mark.parametrize(
    "name", ["../other/good", "..", ".", "/etc", "a/b", "good/../../other/good", "%2e%2e", "a\\b", ""]
)
def test_a_run_of_another_project_cannot_be_reached(folder_store: Store, name: str) -> None:
    for project in (PROJECT, "other"):
        Recording(folder_store, "good", project=project).begin()
    mine = Recording(folder_store, "mine").begin()
    save(mine.store, 10, {OUTPUT: full(1.0)})
    for run in ("good", name.rpartition("/")[2] or "x"):
        save(folder_store.child(f"other/{run}/"), 10, {OUTPUT: full(1.0)}) if layout._NAME.fullmatch(
            run
        ) else None
    config = away(reference=name)
    references = current_references(mine.store, mine.attempt, [config])
    assert references.attempts == {}
    # Not even if the name and an attempt were pinned by somebody who may write to the run.
    hostile = PinnedReferences({name: "a1"})
    reader: SavedTensors = saved_tensors_of(mine.store, "a1", hostile)
    if not name:
        assert reader.block(config, block_of([mark(10)]))[0].references == (None,)
        return
    with pytest.raises(BadNameError):
        reader.block(config, block_of([mark(10)]))
    mine.store.put(references_document("a1"), hostile.encode())
    with pytest.raises(FormatError, match="does not contain references"):
        read_references(mine.store, "a1")


@pytest.mark.ci
def test_a_reference_may_be_on_another_store_of_the_project(
    sqlite: Database, folder_store: Store, tmp_path: Path
) -> None:
    driven = Driven(make_service(sqlite, folder_store, RULES))
    recorded(driven, folder_store, "good", 1.0)
    second = Store.open(tmp_path / "second", create=True)
    with sqlite.write() as session:
        registered_store = register_store(session, "second", StoreRegistration(second.location))
        move_project(session, find_project(session, PROJECT), registered_store, "")
    _, mine_id = recorded(driven, second, "mine", 3.0)
    assert found(driven, mine_id) == ALL_FIRE


def test_a_name_in_another_project_is_no_run_of_this_one(sqlite: Database, folder_store: Store) -> None:
    driven = Driven(make_service(sqlite, folder_store, RULES))
    Recording(folder_store, "good", project="other").begin()
    _, other_id = recorded(driven, folder_store, "mine", 3.0)
    assert found(driven, other_id) == []
    assert set(health_of(driven, other_id)) == {"statistics", "elements", "sagemaker_similar_across_runs"}


def test_of_a_run_with_many_tensors_the_first_are_compared(sqlite: Database, folder_store: Store) -> None:
    driven = Driven(make_service(sqlite, folder_store, ()))
    good = Recording(folder_store, "good").begin()
    infos = [
        tensor(f"layer{number:04}.weight", "weights", order=number) for number in range(MOST_TENSORS + 100)
    ]
    good.write_rows(0, [Row(0, LOSS, [1.0]), *(Row(0, info, [1.0]) for info in infos)])
    mine = Recording(folder_store, "mine").begin()
    pin_references(JudgedAttempt(mine.store, "a1"), [STATISTICS], {"good": "a1"})
    references = read_references(mine.store, "a1")
    assert references is not None
    (statistics,) = references.statistics.values()
    assert len(statistics) == MOST_TENSORS
    assert "loss" in statistics
    assert "layer0000.weight" in statistics
    assert f"layer{MOST_TENSORS + 99:04}.weight" not in statistics
    assert driven.alerts(driven.register("mine")) == {}


@pytest.mark.ci
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"attempts": [], "statistics": {}, "problems": {}}',
        b'{"attempts": {"a/b": "a1"}, "statistics": {}, "problems": {}}',
        b'{"attempts": {"a": "../x"}, "statistics": {}, "problems": {}}',
        b'{"attempts": {"a": 3}, "statistics": {}, "problems": {}}',
        b'{"attempts": null, "statistics": null, "problems": null}',
        b"[" * 100_000,
    ],
    ids=range(10),
)
def test_a_damaged_document_is_reported_and_other_rules_are_judged(
    sqlite: Database, folder_store: Store, data: bytes
) -> None:
    driven = Driven(make_service(sqlite, folder_store, (*RULES, RuleConfig(rule="non_finite_values"))))
    recorded(driven, folder_store, "good", 1.0)
    mine = Recording(folder_store, "mine")
    mine.store.put(references_document("a1"), data)
    _, mine_id = recorded(driven, folder_store, "mine", float("nan"))
    assert set(driven.alerts(mine_id)) == {"non_finite_values"}
    assert set(health_of(driven, mine_id)) == {"statistics", "elements", "sagemaker_similar_across_runs"}
    notes = judged_again(mine).notes
    assert any("does not contain references" in note for note in notes)


def test_other_rules_are_judged_though_a_link_is_in_the_place_of_the_document(
    sqlite: Database, folder_store: Store
) -> None:
    driven = Driven(make_service(sqlite, folder_store, (*RULES, RuleConfig(rule="non_finite_values"))))
    recorded(driven, folder_store, "good", 1.0)
    document = Path(folder_store.location) / PROJECT / "mine" / references_document("a1")
    document.parent.mkdir(parents=True)
    document.symlink_to(document)
    _, mine_id = recorded(driven, folder_store, "mine", float("nan"))
    assert set(driven.alerts(mine_id)) == {"non_finite_values"}
    assert set(health_of(driven, mine_id)) == {"statistics", "elements", "sagemaker_similar_across_runs"}


def test_hostile_statistics_are_the_problem_of_the_rule(sqlite: Database, folder_store: Store) -> None:
    driven = Driven(make_service(sqlite, folder_store, (*RULES, RuleConfig(rule="non_finite_values"))))
    statistics: dict[str, Any] = {"good mean": {"loss": [[3, 1.0], [1, 1.0]]}, "good rms": 7}
    mine = Recording(folder_store, "mine")
    mine.store.put(references_document("a1"), PinnedReferences({"good": "a1"}, statistics).encode())
    _, mine_id = recorded(driven, folder_store, "mine", float("nan"))
    assert set(driven.alerts(mine_id)) == {"non_finite_values"}
    assert {"statistics", "sagemaker_similar_across_runs"} <= set(health_of(driven, mine_id))
    assert "evaluation" not in driven.run(mine_id).health


def test_a_damaged_object_of_the_reference_run_is_reported_and_the_others_are_compared(
    folder_store: Store,
) -> None:
    mine, good = (Recording(folder_store, run).begin() for run in ("mine", "good"))
    for step in (10, 20, 30):
        save(mine.store, step, {WEIGHT: full(3.0)}, collection="weights")
        save(good.store, step, {WEIGHT: full(1.0)}, collection="weights")
    good.store.put("tensors/a1/0/20-train-weights.safetensors", b"damaged")
    reader = saved_tensors_of(mine.store, "a1", PinnedReferences({"good": "a1"}))
    marks = block_of([mark(step, collection="weights") for step in (10, 20, 30)])
    block, problem = reader.block(ELEMENTS, marks)
    assert [reference is not None for reference in block.references] == [True, False, True]
    assert problem.startswith("run 'good': snapshot tensors/a1/0/20-train-weights.safetensors")


def test_a_tensor_is_found_in_the_object_of_another_collection(folder_store: Store) -> None:
    mine, good = (Recording(folder_store, run).begin() for run in ("mine", "good"))
    save(mine.store, 10, {WEIGHT: full(3.0)}, collection="mine")
    save(good.store, 10, {WEIGHT: full(1.0)}, collection="weights")
    reader = saved_tensors_of(mine.store, "a1", PinnedReferences({"good": "a1"}))
    block, problem = reader.block(ELEMENTS, block_of([mark(10, collection="mine")]))
    assert problem == ""
    assert block.references[0] is not None
    assert float(block.references[0][0, 0]) == 1.0


def test_a_rule_that_is_added_to_a_running_attempt_reports_that_nothing_was_pinned(
    sqlite: Database, folder_store: Store
) -> None:
    driven = Driven(make_service(sqlite, folder_store, ()))
    recorded(driven, folder_store, "good", 1.0)
    other, other_id = recorded(driven, folder_store, "other", 3.0)
    later = Driven(make_service(sqlite, folder_store, RULES))
    later.register("other")
    from watchstep_services.runs.rule_configs import apply_owner_rules

    apply_owner_rules(sqlite, RULES)
    later.judge(other_id, other.write_rows(1, rows_of(other, 3.0, 10)))
    assert found(later, other_id) == []
    assert "or the rule was added later" in health_of(later, other_id)["statistics"]


def test_a_backtest_states_that_a_reference_run_does_not_exist(sqlite: Database, folder_store: Store) -> None:
    driven = Driven(make_service(sqlite, folder_store, ()))
    recorded(driven, folder_store, "good", 1.0)
    other, other_id = recorded(driven, folder_store, "other", 3.0)
    end(driven, other, other_id)
    Recording(folder_store, run="empty").begin()  # nothing is recorded
    configs = [
        RuleConfig(rule="similar_across_runs", name=run, params={"run": run})
        for run in ("nosuch", "good", "empty")
    ]
    attempt = judged_again(other, configs)
    assert attempt.notes == (
        "run good is compared with as it is now, because no references to it were stored when the attempt began",
        "run empty has no attempt to compare with",
        "no run nosuch in this project",
    )
    assert {outcome.config.name: outcome.health.value for outcome in attempt.outcomes}["nosuch"] == "error"


def test_references_are_pinned_within_the_turn_for_large_evaluations(
    sqlite: Database, folder_store: Store
) -> None:
    driven = Driven(make_service(sqlite, folder_store, RULES))
    recorded(driven, folder_store, "good", 1.0)
    other = Recording(folder_store, "other").begin()
    other_id = driven.register("other")
    driven.announce(other_id, other.write_rows(0, rows_of(other, 3.0)))
    for project in ("another project", "a third project"):
        assert driven.service.large_turn.take(project)
    for _ in range(3):
        assert driven.evaluate(other_id).outcome == "idle"
    assert driven.run(other_id).waits_for_turn
    assert read_references(other.store, "a1") is None
    driven.service.large_turn.release("a third project")
    assert driven.evaluate(other_id).outcome == "committed"
    assert found(driven, other_id) == ALL_FIRE
    assert not driven.run(other_id).waits_for_turn
    # Of an attempt whose references are known, small evaluations need no turn; a new process reads them within it.
    assert driven.service.large_turn.take("a third project")
    driven.announce(other_id, other.write_rows(1, [Row(step, LOSS, [3.0]) for step in range(10, 12)]))
    assert driven.evaluate(other_id).outcome == "committed"
    driven.announce(other_id, other.write_rows(2, [Row(step, LOSS, [3.0]) for step in range(12, 14)]))
    assert driven.restarted().evaluate(other_id).outcome == "idle"


def test_a_run_that_compares_with_none_needs_no_turn(sqlite: Database, folder_store: Store) -> None:
    driven = Driven(make_service(sqlite, folder_store, (RuleConfig(rule="non_finite_values"),)))
    for project in ("another project", "a third project"):
        assert driven.service.large_turn.take(project)
    _, run_id = recorded(driven, folder_store, "usual", float("nan"))
    assert set(driven.alerts(run_id)) == {"non_finite_values"}


@pytest.mark.parametrize(
    "document",
    [
        PinnedReferences({"good": "a1"}, {"good mean": {"loss": [(3, 1.0), (1, 1.0)]}}).encode(),  # type: ignore[dict-item]
        b"damaged",
    ],
    ids=["statistics", "object"],
)
def test_what_a_recorder_wrote_is_read_and_checked_once(
    sqlite: Database, folder_store: Store, monkeypatch: pytest.MonkeyPatch, document: bytes
) -> None:
    rules = tuple(STATISTICS.model_copy(update={"name": f"rule {number}"}) for number in range(20))
    driven = Driven(make_service(sqlite, folder_store, rules))
    recorded(driven, folder_store, "good", 1.0)
    mine = Recording(folder_store, "mine")
    mine.store.put(references_document("a1"), document)
    decoded: list[str] = []
    checked: list[Any] = []
    decode, from_data = PinnedReferences.decode, CheckedReference.from_data

    def counted(data: bytes, key: str) -> PinnedReferences:
        decoded.append(key)
        return decode(data, key)

    def counted_statistics(data: Any, most_points: int) -> CheckedReference:
        checked.append(data)
        return from_data(data, most_points)

    recording, run_id = mine.begin(), driven.register("mine")
    monkeypatch.setattr(PinnedReferences, "decode", counted)
    monkeypatch.setattr(CheckedReference, "from_data", counted_statistics)
    for seq in range(4):
        first = 10 * seq
        rows = [Row(step, LOSS, [3.0]) for step in range(first, first + 10)]
        driven.judge(run_id, recording.write_rows(seq, rows))
    assert driven.run(run_id).last_step == 39
    assert decoded == ["references/a1.json"]
    assert len(checked) <= 1
    problems = health_of(driven, run_id)
    assert len(problems) == len(rules)
    assert all("object references/a1.json does not contain" in problem for problem in problems.values())
    assert mine.store.get(references_document("a1")) == document


def test_results_are_committed_with_the_original_rule_configs(
    sqlite: Database, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the statistics of the reference run, a grant to stop would not be for the config, and each cached config would be large."""
    driven = Driven(make_service(sqlite, folder_store, RULES))
    recorded(driven, folder_store, "good", 1.0)
    outcomes = []

    def committed(service: Any, claim: Any, outcome: Any) -> Any:
        outcomes.append(outcome)
        return commit(service, claim, outcome)

    monkeypatch.setattr(evaluating, "commit", committed)
    _, other_id = recorded(driven, folder_store, "other", 3.0)
    assert found(driven, other_id) == ALL_FIRE
    configs = [judged.config for outcome in outcomes for judged in outcome.judged]
    assert {digest_of(config) for config in configs} == {digest_of(config) for config in RULES}
    cached = driven.service.rule_states.get((other_id, "a1"), driven.run(other_id).epoch + 1)
    assert cached is not None
    assert not any(loaded.config.params.get("reference") for loaded in cached if loaded.config)


def test_the_points_of_cached_references_are_limited() -> None:
    def references(points: int) -> PinnedReferences:
        return PinnedReferences({}, {"x": CheckedReference({"a": [(step, 1.0) for step in range(points)]})})

    cache = ReferenceCache(points=10)
    for number, points in enumerate((4, 4, 4)):
        cache.put(("run", str(number)), references(points))
    assert [cache.get(("run", str(number))) is not None for number in range(3)] == [False, True, True]
    cache.put(("run", "1"), references(4))
    cache.put(("run", "large"), references(100))
    assert [cache.get(("run", name)) is not None for name in ("1", "2", "large")] == [False, False, True]
    cache.put(("run", "small"), references(1))
    assert [cache.get(("run", name)) is not None for name in ("large", "small")] == [False, True]


# Earlier attempts of the same run


RATE = tensor("optimizer:learning_rate/0", "metrics", role="metric", shape=())
RESUME = RuleConfig(rule="resume_mismatch", keep_firing=KeepFiring(steps=100))


def rates(first: int, value: float) -> list[Row]:
    return [
        Row(step, info, [value if info is RATE else 1.0])
        for step in range(first, first + 30)
        for info in (LOSS, RATE)
    ]


def test_an_attempt_is_compared_with_those_before_it(sqlite: Database, folder_store: Store) -> None:
    driven = Driven(make_service(sqlite, folder_store, [RESUME]))
    recording = Recording(folder_store, "mine").begin()
    run_id = driven.register("mine")
    driven.judge(run_id, recording.write_rows(0, rates(0, 0.01)))
    assert found(driven, run_id) == []
    assert read_references(recording.store, "a1") is None  # nothing precedes it
    assert '"health":"no_data"' in driven.memories()[0][2]
    second = Recording(folder_store, "mine", "a2").begin(started_ns=2)
    driven.judge(run_id, second.write_rows(0, rates(20, 0.1)))
    assert found(driven, run_id) == [("resume_mismatch", 20, RATE.name)]
    pinned = read_references(second.store, "a2")
    assert pinned is not None
    assert pinned.attempts == {OWN_RUN: "a1"}
    third = Recording(folder_store, "mine", "a3").begin(started_ns=3)
    driven.judge(run_id, third.write_rows(0, rates(40, 0.1)))
    assert found(driven, run_id) == []  # it continues the second

    for attempt, expected in (("a1", []), ("a2", [("resume_mismatch", 20, RATE.name)]), ("a3", [])):
        outcome = next(
            entry
            for entry in backtest_run(open_run(second.store), [RESUME]).attempts
            if entry.attempt == attempt
        )
        assert fired(outcome) == expected
        assert not [note for note in outcome.notes if "compared with" in note]


def test_an_attempt_of_many_from_the_beginning_is_not_compared(sqlite: Database, folder_store: Store) -> None:
    driven = Driven(make_service(sqlite, folder_store, [RESUME]))
    run_id = driven.register("mine")
    for number in range(18):
        recording = Recording(folder_store, "mine", f"a{number:02}").begin(started_ns=number + 1)
        driven.judge(run_id, recording.write_rows(0, rates(0, 0.01)))
    stored = [read_references(recording.store, f"a{number:02}") for number in (16, 17)]
    assert [pinned and dict(pinned.attempts) for pinned in stored] == [{OWN_RUN: "a15"}, {}]
