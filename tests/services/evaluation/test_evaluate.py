"""The evaluation of announced rows, attempts that fail, and the cache of earlier rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text, update

from tests.rules.custom.programs import LOUD, python
from tests.sdk.format.blocks import Row, tensor
from tests.services.driving import RULES, Driven, make_service, statements
from tests.services.recording import NAN, PROJECT, Recording, exploding_from, healthy, nan_from
from watchstep.errors import StoreError
from watchstep.format import documents, layout
from watchstep.format.layout import SegmentKey
from watchstep.store.store import Store
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sandbox import pool
from watchstep_rules.engine.rule_inputs import History, Lookback
from watchstep_rules.rule import Finding
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Project, RuleConfigRow, RuleStateRow, RunRow
from watchstep_services.evaluation import commit as committing
from watchstep_services.evaluation import evaluate as evaluating
from watchstep_services.runs.claim import claim
from watchstep_services.runs.registration import register
from watchstep_services.service import judging
from watchstep_services.service.caches import HistoryCache
from watchstep_services.service.judging import FINDINGS_KEPT, judge_all

BAD_STEP = 100
"""Rows from this step on make the first attempt's evaluation fail."""
DEFAULT_REACH = Lookback.of(DEFAULT_RULES)


def test_segments_are_judged_and_an_alert_fires(driven: Driven) -> None:
    recording, run_id = driven.begin()
    recording.write_all([3, 7], nan_from(5))
    driven.announce(run_id, *recording.written["w0"])

    result = driven.evaluate(run_id)

    assert result.outcome == "committed"
    phase, step, finding = driven.alerts(run_id)["non_finite_values"]
    assert (phase, step) == ("firing", 5)
    assert finding is not None
    assert finding["tensor"] == "loss"
    assert driven.run(run_id).last_step == 7
    assert driven.run(run_id).cursor == '{"a1/node/w0":2}'
    fired = driven.events(run_id, "alert.firing")[0]
    assert fired["data"]["evidence"]["segments"] == [recording.written["w0"][1].path]
    assert fired["data"]["finding"]["value"] == 1.0
    assert [action.id for action in driven.actions(run_id)] == list(result.actions)


def test_nothing_to_judge_leaves_everything(driven: Driven) -> None:
    driven.recording().begin()
    run_id = driven.register()
    assert driven.evaluate(run_id).outcome == "idle"
    assert driven.run(run_id).ticks == 0


def test_a_run_that_another_holds_is_left_alone(driven: Driven) -> None:
    recording, run_id = driven.begin()
    driven.announce(run_id, recording.write(0, 0, 3))
    assert claim(driven.service.database, run_id, 10**12) is not None
    assert driven.evaluate(run_id).outcome == "busy"
    assert driven.segments(run_id) == {("w0", 0): "announced"}


def test_a_worker_whose_epoch_was_taken_commits_nothing(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, run_id = driven.begin()
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(2)))
    judge = judge_all

    def overtaken(*args: object) -> object:
        monkeypatch.setattr(evaluating, "judge_all", judge)
        # the lease ends while the rules run
        driven.change(RunRow, lease_until_ns=0)
        assert driven.restarted().evaluate(run_id).outcome == "committed"
        return judge(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluating, "judge_all", overtaken)
    assert driven.evaluate(run_id).outcome == "fenced"
    assert driven.event_types(run_id) == ["run.started", "alert.firing", "stop.requested"]
    assert len(driven.actions(run_id)) == 1
    assert driven.run(run_id).ticks == 1


def test_an_announcement_during_an_evaluation_is_not_lost(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, run_id = driven.begin()
    driven.announce(run_id, recording.write(0, 0, 3))
    judge = judge_all

    def announced_meanwhile(*args: object) -> object:
        driven.announce(run_id, recording.write(1, 4, 7))
        return judge(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluating, "judge_all", announced_meanwhile)
    driven.evaluate(run_id)
    assert driven.run(run_id).due_ns is not None


def ended_with(driven: Driven, splits: list[int], *, restart: bool) -> tuple[Any, Any, Any]:
    """What is known after the same segments were announced in portions."""
    recording = driven.recording(run="run-1").begin()
    if not recording.written:
        recording.write_all(list(range(4, 60, 5)), exploding_from(41))
    keys = recording.written["w0"]
    run_id = driven.register()
    for start, end in zip([0, *splits], [*splits, len(keys)], strict=True):
        driven.judge(run_id, *keys[start:end])
        if restart:
            driven = driven.restarted()
    return driven.findings(), driven.memories(), driven.alerts(run_id)


@pytest.mark.ci
def test_splits_and_restarts_change_nothing(tmp_path: Path, sqlite_factory: Any) -> None:
    results = []
    for number, (splits, restart) in enumerate(
        [([], False), ([1, 2, 3, 9], False), (list(range(1, 12)), True), ([10], True)]
    ):
        store = Store.open(tmp_path / f"store-{number}", create=True)
        driven = Driven(make_service(sqlite_factory(number), store))
        results.append(ended_with(driven, splits, restart=restart))
    findings, _, alerts = results[0]
    assert findings
    assert alerts["exploding_gradient"][0] in {"firing", "resolved"}
    assert alerts["exploding_gradient"][2]["step"] == 43
    assert all(result == results[0] for result in results)


REACH = Lookback.of(RULES)


def test_a_restart_rebuilds_the_history_from_the_store(driven_sqlite: Driven) -> None:
    recording, run_id = driven_sqlite.begin()
    recording.write_all(list(range(4, 60, 5)), healthy)
    keys = recording.written["w0"]
    driven_sqlite.judge(run_id, *keys[:-1])
    warm = driven_sqlite.service.histories.get((run_id, "a1"), driven_sqlite.run(run_id).cursor, REACH)
    assert warm is not None
    cold = driven_sqlite.restarted()
    cold.announce(run_id, keys[-1])
    cold.evaluate(run_id)
    driven_sqlite.service.histories.clear()
    again = cold.service.histories.get((run_id, "a1"), cold.run(run_id).cursor, REACH)
    assert again is not None
    assert again.positions == [7, 8, 9, 10, 11][-len(again.positions) :]
    # Two gradients over the window, and of the loss beside them the last row.
    assert len(warm.block) == len(again.block) == 20 * 2 + 1


def test_an_evaluation_reads_up_to_its_limit(driven: Driven) -> None:
    recording, run_id = driven.begin()
    recording.write_all([1, 3, 5, 7, 9])
    small = driven.with_settings(max_segments=2)
    small.announce(run_id, *recording.written["w0"])
    assert [small.evaluate(run_id).more for _ in range(3)] == [True, True, False]
    assert driven.run(run_id).last_step == 9


def test_findings_are_bounded_and_counted(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing, "FINDINGS_KEPT", 5)
    recording, run_id = driven.begin()
    driven.judge(run_id, recording.write(0, 0, 7, nan_from(0)), recording.write(1, 8, 9, nan_from(0)))
    assert len(driven.findings()) == 5
    assert [memory[3] for memory in driven.memories()] == [10, 0]


def _of_requested(driven: Driven) -> tuple[dict[str, list[dict[str, Any]]], dict[str, int]]:
    """The stored findings and the number of all findings, by rule config."""
    names = {row.id: row.name for row in driven.all(select(RuleConfigRow))}
    stored: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for config_id, _, finding in driven.findings():
        stored[names[config_id]].append(finding)
    return stored, {names[config_id]: count for config_id, _, _, count in driven.memories()}


REQUESTED = [
    RuleConfig(rule="non_finite_values", name=f"requested-{number}", keep_firing={"steps": number + 1})
    for number in range(3)
]
REQUESTED_BYTES = 4 * 1024 * 1024
"""Limit of stored findings of requested rules in one evaluation."""


@pytest.mark.ci
def test_stored_findings_of_requested_rules_are_limited_together(driven: Driven) -> None:
    recording, run_id = driven.begin(REQUESTED)
    driven.judge(run_id, recording.write(0, 0, 1099, nan_from(0)))
    stored, counted = _of_requested(driven)
    assert {name: [finding["step"] for finding in findings] for name, findings in stored.items()} == {
        "non_finite_values": list(range(FINDINGS_KEPT)),
        "exploding_gradient": [],
        "requested-0": list(range(667)),
        "requested-1": list(range(667)),
        "requested-2": list(range(666)),
    }
    assert counted == {
        **dict.fromkeys(("non_finite_values", *(config.name for config in REQUESTED)), 1100),
        "exploding_gradient": 0,
    }


@pytest.mark.ci
def test_stored_findings_are_limited_in_bytes(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    recording, run_id = driven.begin(REQUESTED)
    long = tensor("ü" * 1700, "gradients", order=1)
    driven.judge(run_id, recording.write_rows(0, [Row(step, long, [NAN]) for step in range(300)]))
    stored, counted = _of_requested(driven)
    sizes = {
        name: sum(len(json.dumps(finding, ensure_ascii=False).encode()) for finding in findings)
        for name, findings in stored.items()
    }
    requested = [sizes[config.name] for config in REQUESTED]
    assert 0.9 * REQUESTED_BYTES < sum(requested) <= 1.01 * REQUESTED_BYTES
    assert min(requested) > 0.9 * max(requested)
    assert len(stored["non_finite_values"]) == counted["requested-0"] == 300
    assert stored["requested-0"] == stored["non_finite_values"][: len(stored["requested-0"])]

    monkeypatch.setattr(judging, "FINDINGS_BYTES", 100_000)
    driven.judge(run_id, recording.write_rows(1, [Row(step, long, [NAN]) for step in range(300, 400)]))
    more, counted = _of_requested(driven)
    added = more["non_finite_values"][300:]
    assert 1 < len(added) < 20
    assert sum(len(json.dumps(finding, ensure_ascii=False).encode()) for finding in added) <= 101_000
    assert counted["non_finite_values"] == 400


def test_findings_are_serialized_before_the_transaction_that_writes_them(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, run_id = driven.begin(REQUESTED)
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(0)))
    serialize = Finding.model_dump_json
    with statements(driven.service.database) as executed:

        def noted(finding: Finding) -> str:
            executed.append("serialize")
            return serialize(finding)

        monkeypatch.setattr(Finding, "model_dump_json", noted)
        driven.evaluate(run_id)
    (write,) = [index for index, statement in enumerate(executed) if "INSERT INTO findings" in statement]
    before = executed[:write]
    assert before.count("serialize") == len(driven.findings()) == 8 * 4
    last = write - before[::-1].index("serialize")
    assert any("UPDATE runs" in statement for statement in before[last:]), "the transaction begins with it"


def test_a_store_that_does_not_answer_is_told_and_tried_again(driven_sqlite: Driven, tmp_path: Path) -> None:
    recording, run_id = driven_sqlite.begin()
    driven_sqlite.announce(run_id, recording.write(0, 0, 3))
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("a file where a folder was")
    with pytest.raises(StoreError):
        driven_sqlite.evaluate(run_id)
    run = driven_sqlite.run(run_id)
    assert "store" in run.health["evaluation"]
    assert (run.lease_until_ns, run.ticks) == (0, 0)
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")
    assert driven_sqlite.evaluate(run_id).outcome == "committed"
    assert "evaluation" not in driven_sqlite.run(run_id).health


def test_a_rule_that_is_no_longer_known_is_an_error_and_stops_no_other(driven: Driven) -> None:
    recording, run_id = driven.begin()
    with driven.service.database.write() as session:
        session.execute(
            update(RuleConfigRow)
            .where(RuleConfigRow.name == "exploding_gradient")
            .values(data={"rule": "gone"})
        )
    driven.announce(run_id, recording.write(0, 0, 3, nan_from(2)))
    driven.evaluate(run_id)
    assert driven.alerts(run_id)["non_finite_values"][0] == "firing"
    assert '"health":"error"' in driven.memories()[1][2]


HOARDER = """
from watchstep_rules.rule import Needs, Params, Rule, State

class Held(State):
    text: str = ""

class Hoarder(Rule[Params, Held]):
    name = "hoarder"
    summary = "for tests"
    needs = Needs(collections=("losses",))
    merge = "per_worker"

    def evaluate(self, params, state, context, block, now):
        return Held.model_construct(text="\\ud800"), []
"""


@pytest.mark.ci
def test_a_state_that_cannot_be_kept_silences_no_other_rule(driven: Driven) -> None:
    hoarder = RuleConfig(rule="python", name="hoarder", params={"source": HOARDER, "class": "Hoarder"})
    recording = driven.recording().begin()
    recording.write_all([3, 7], nan_from(5))
    run_id = register(driven.service, PROJECT, recording.run, (hoarder,), "operator")
    driven.announce(run_id, *recording.written["w0"])
    assert driven.evaluate(run_id).outcome == "committed"
    assert driven.alerts(run_id)["non_finite_values"][:2] == ("firing", 5)
    kept = [json.loads(memory) for _, _, memory, _ in driven.memories()]
    assert sorted(one["health"] for one in kept) == ["error", "ok", "ok"]


class JudgingError(Exception):
    """A fault of the service."""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Judging raises at any row from the bad step on."""

    def judge(configs: Any, before: Any, arrived: Any, *others: Any) -> Any:
        if len(arrived) and int(arrived.step.max()) >= BAD_STEP:
            raise JudgingError("secret")
        return judge_all(configs, before, arrived, *others)

    monkeypatch.setattr(evaluating, "judge_all", judge)
    return monkeypatch


def evaluate_patiently(driven: Driven, run_id: int, times: int = 6) -> list[Exception]:
    """Evaluate as a worker does that is asked again and again; what was raised."""
    errors: list[Exception] = []
    for _ in range(times):
        try:
            driven.evaluate(run_id)
        except (JudgingError, StoreError) as error:
            errors.append(error)
    return errors


def test_a_later_attempt_is_judged_while_an_earlier_one_fails(
    driven_sqlite: Driven, failing: pytest.MonkeyPatch
) -> None:
    first = driven_sqlite.recording(attempt="a1").begin()
    second = driven_sqlite.recording(attempt="a2").begin(started_ns=2)
    run_id = driven_sqlite.register()
    driven_sqlite.announce(run_id, first.write(0, BAD_STEP, BAD_STEP + 3))
    driven_sqlite.announce(
        run_id, *(second.write(seq, 4 * seq, 4 * seq + 3, nan_from(5)) for seq in range(2))
    )
    errors = evaluate_patiently(driven_sqlite, run_id)
    assert errors
    assert driven_sqlite.alerts(run_id)["non_finite_values"][:2] == ("firing", 5)
    health = driven_sqlite.run(run_id).health
    assert "JudgingError" in health["failed_attempts"]["a1"]
    assert "secret" not in str(health)
    assert driven_sqlite.run(run_id).lease_until_ns == 0

    driven_sqlite.announce(run_id, second.write(2, 8, 11))
    assert driven_sqlite.evaluate(run_id).outcome == "committed"  # it comes before the attempt that fails

    failing.undo()
    driven_sqlite.settle(run_id)
    assert set(driven_sqlite.segments(run_id).values()) == {"read"}
    assert driven_sqlite.run(run_id).health == {}


def test_a_failing_attempt_is_tried_again_after_a_pause_and_others_at_once(
    driven: Driven, failing: pytest.MonkeyPatch
) -> None:
    del failing
    recording, run_id = driven.begin()
    driven.announce(run_id, recording.write(0, BAD_STEP, BAD_STEP + 3))

    def due_in_seconds() -> float:
        with driven.service.database.read() as session:
            now = read_clock(session)
        due = driven.run(run_id).due_ns
        assert due is not None
        return (due - now) / 1e9

    with pytest.raises(JudgingError):
        driven.evaluate(run_id)
    assert due_in_seconds() <= 0
    with pytest.raises(JudgingError):
        driven.evaluate(run_id)
    assert due_in_seconds() > 1


@pytest.mark.ci
@pytest.mark.parametrize("attempt", ["a1", "a2"])
def test_a_segment_that_the_store_cannot_give_holds_up_its_writer_alone(
    driven_sqlite: Driven, monkeypatch: pytest.MonkeyPatch, attempt: str
) -> None:
    first = driven_sqlite.recording(attempt="a1").begin(world_size=2)
    other = driven_sqlite.recording(attempt=attempt).begin(world_size=2)
    run_id = driven_sqlite.register()
    bad = first.write(0, 0, 3)
    refuse(monkeypatch, driven_sqlite, bad)
    driven_sqlite.announce(run_id, bad)
    driven_sqlite.announce(run_id, first.write(1, 4, 7), other.write(0, 0, 7, nan_from(5), worker=1))
    evaluate_patiently(driven_sqlite, run_id)
    assert driven_sqlite.segments(run_id) == {
        ("w0", 0): "announced",
        ("w0", 1): "announced",
        ("w1", 0): "read",
    }
    assert driven_sqlite.alerts(run_id)["non_finite_values"][:2] == ("firing", 5)
    health = driven_sqlite.run(run_id).health
    assert "refused" in str(health)
    assert driven_sqlite.run(run_id).due_ns is not None

    monkeypatch.undo()
    driven_sqlite.settle(run_id)
    assert set(driven_sqlite.segments(run_id).values()) == {"read"}
    assert driven_sqlite.run(run_id).health == {}


def refuse(monkeypatch: pytest.MonkeyPatch, driven: Driven, bad: SegmentKey) -> None:
    """Have the run's store refuse to give one object."""
    kind = type(driven.service.stores.of_run(place_of(driven), "run-1"))
    get = kind.get

    def refused(store: Any, key: str, *, limit: int | None = None) -> bytes:
        if key == bad.path:
            raise StoreError(f"object {key}: refused", "allow it")
        return bytes(get(store, key, limit=limit))

    monkeypatch.setattr(kind, "get", refused)


def place_of(driven: Driven) -> Any:
    """Where the project of the runs is."""
    with driven.service.database.read() as session:
        return session.get_one(Project, PROJECT).place


def test_a_commit_that_fails_lets_the_run_go(driven: Driven) -> None:
    recording, run_id = driven.begin()
    driven.announce(run_id, recording.write(0, 0, 3))
    with driven.service.database.write() as session:
        session.execute(text("ALTER TABLE ticks RENAME TO gone"))
    with pytest.raises(Exception, match="ticks"):
        driven.evaluate(run_id)
    assert driven.run(run_id).lease_until_ns == 0
    with driven.service.database.write() as session:
        session.execute(text("ALTER TABLE gone RENAME TO ticks"))
    driven.settle(run_id)
    assert driven.segments(run_id) == {("w0", 0): "read"}


def test_a_document_that_is_too_large_is_damaged_and_holds_up_nothing(driven_sqlite: Driven) -> None:
    recording, run_id = driven_sqlite.begin()
    large = b" " * (documents.MAX_BYTES + 1)
    for key in (layout.attempt_document("a2"), layout.end_document("a1", 0)):
        recording.store.put(key, large)
    recording.write(0, 0, 3, nan_from(2))
    driven_sqlite.discover(run_id)
    assert driven_sqlite.alerts(run_id)["non_finite_values"][0] == "firing"
    assert set(driven_sqlite.run(run_id).health["documents"]) == {
        layout.attempt_document("a2"), layout.end_document("a1", 0)
    }  # fmt: skip


@pytest.mark.ci
def test_a_rule_that_ends_its_process_is_tried_for_another_project_at_once(
    sqlite: Database, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_now", lambda: 1000.0)
    source = LOUD.replace("        together =", "        os._exit(7)\n        together =", 1)
    driven = Driven(make_service(sqlite, folder_store, (python(source, "Loud"),)))
    for project in ("first", "second"):
        segment = Recording(folder_store, project=project).begin().write(0, 0, 9)
        run_id = register(driven.service, project, "run-1", (), "recorder")
        driven.announce(run_id, segment)
        driven.evaluate(run_id)
    with sqlite.read() as session:
        memories: list[Any] = list(
            session.execute(select(RuleStateRow.state).order_by(RuleStateRow.config_id)).scalars()
        )
    assert len(memories) == 2
    for memory in memories:
        assert "its process ended with 7" in memory
        assert "started again in" not in memory


def test_the_cache_holds_for_one_cursor_and_forgets_the_oldest() -> None:
    cache = HistoryCache(rows=2)
    for run in (1, 2, 3):
        cache.put((run, "a1"), "{}", DEFAULT_REACH, History.empty())
    assert cache.get((1, "a1"), "{}", DEFAULT_REACH) is None
    assert cache.get((3, "a1"), "{}", DEFAULT_REACH) is not None
    assert cache.get((3, "a1"), '{"a1/node/w0":1}', DEFAULT_REACH) is None
    assert cache.get((3, "a1"), "{}", Lookback()) is None
