from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from tests.services.api.conftest import Api
from tests.services.driving import Driven, make_service
from tests.services.recording import PROJECT, Recording, exploding_from, nan_from
from watchstep.store.store import Store
from watchstep_rules.backtest.backtest import (
    Failed,
    Replayed,
    Task,
    backtest_run,
    judge_run,
    read_report,
    report,
    result_as_data,
    result_from_data,
)
from watchstep_rules.backtest.sweep import parse_sweep, variations
from watchstep_rules.config.rule_config import RuleConfig, WebhookAction
from watchstep_services.core.settings import load_settings
from watchstep_services.db.encryption import open_encrypted_database
from watchstep_services.db.models import Backtest, BacktestResult
from watchstep_services.db.schema import upgrade
from watchstep_services.evaluation import backtests
from watchstep_services.evaluation.backtests import due_backtests, judge_next
from watchstep_services.scheduler import celery_app
from watchstep_services.scheduler.queue import WorkQueue

PLACE = f"/v1/projects/{PROJECT}/backtests"
NAN = {"rule": "non_finite_values", "actions": ["stop"]}


@pytest.fixture
def recorded(api: Api) -> Api:
    for run, value in (("a1", nan_from(4)), ("a2", exploding_from(20)), ("b", exploding_from(23))):
        api.driven.recording(run=run).begin().write_all([9, 19, 29], value)
        api.driven.register(run)
    return api


def created(api: Api, **body: Any) -> dict[str, Any]:
    answer = api.call("POST", PLACE, body)
    assert answer.status_code == 202, answer.text
    backtest: dict[str, Any] = answer.json()
    return backtest


def test_runs_are_evaluated_one_by_one_and_nothing_is_stopped(recorded: Api) -> None:
    backtest = created(
        recorded, runs=["a*", "b"], rules=[NAN, {"rule": "exploding_gradient"}], sweep=["growth=1e8"]
    )
    assert (backtest["state"], backtest["runs"], backtest["evaluated_runs"], backtest["report"]) == (
        "waiting",
        3,
        0,
        None,
    )
    service = recorded.driven.service
    assert due_backtests(service) == (backtest["id"],)
    assert judge_next(service, backtest["id"])
    half = recorded.call("GET", f"{PLACE}/{backtest['id']}").json()
    assert (half["state"], half["evaluated_runs"], half["report"]) == ("running", 1, None)
    assert judge_next(service, backtest["id"])
    assert not judge_next(service, backtest["id"])
    assert not judge_next(service, backtest["id"])
    assert due_backtests(service) == ()
    done = recorded.call("GET", f"{PLACE}/{backtest['id']}").json()
    assert done["state"] == "done"
    results, varied = read_report(done["report"])
    assert [result.outcome.run for result in results if isinstance(result, Replayed)] == ["a1", "a2", "b"]
    first = results[0]
    assert isinstance(first, Replayed)
    assert first.outcome.attempts[0].outcomes[0].fired[0].step == 4
    assert [len(swept["fired"]) for swept in done["report"]["sweep"]] == [2, 0]
    assert [variation.current for variation in varied] == [True, False]
    assert recorded.driven.actions(1) == []


def test_the_default_rules_apply_if_none_are_specified(recorded: Api) -> None:
    backtest = created(recorded, runs=["b"])
    judge_next(recorded.driven.service, backtest["id"])
    (run,) = recorded.call("GET", f"{PLACE}/{backtest['id']}").json()["report"]["runs"]
    assert len(run["attempts"][0]["rules"]) > 5


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"runs": ["c"]}, 404, "vision/c"),
        ({"runs": ["../b"]}, 404, "vision/../b"),
        ({"runs": []}, 422, "runs"),
        ({"runs": ["b"], "rules": [{"rule": "nothing"}]}, 422, "nothing"),
        ({"runs": ["b"], "sweep": ["nothing=1"]}, 422, "nothing"),
        ({"runs": ["b"], "store": "s3://other"}, 422, "store"),
    ],
)
def test_an_invalid_backtest_is_refused(recorded: Api, body: Any, status: int, message: str) -> None:
    answer = recorded.call("POST", PLACE, body)
    assert (answer.status_code, message in answer.text) == (status, True), answer.text


def test_a_backtest_belongs_to_its_project(recorded: Api) -> None:
    backtest = created(recorded, runs=["b"])
    assert recorded.status("GET", f"/v1/projects/other/backtests/{backtest['id']}") == 404
    assert recorded.status("GET", f"/v1/projects/vision/backtests/{2**63}") == 422
    assert recorded.status("GET", f"{PLACE}/{backtest['id']}", project="other") == 403


def test_a_backtest_leaves_no_webhook_address_in_the_database(folder_store: Store, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    database = open_encrypted_database(load_settings(home=home, store=folder_store.location))
    upgrade(database)
    driven = Driven(make_service(database, folder_store))
    api = Api.of(driven)
    Recording(folder_store, run="b").begin().write_all([9, 19, 29], nan_from(4))
    api.driven.register("b")
    address = "https://hooks.example.com/services/SECRET-PATH?token=SECRET-QUERY"
    backtest = created(
        api, runs=["b"], rules=[{"rule": "non_finite_values", "actions": [{"webhook": address}]}]
    )
    while judge_next(driven.service, backtest["id"]):
        pass
    results, _ = read_report(api.call("GET", f"{PLACE}/{backtest['id']}").json()["report"])
    (result,) = results
    assert isinstance(result, Replayed)
    (action,) = result.outcome.attempts[0].outcomes[0].config.actions
    assert isinstance(action, WebhookAction)
    assert action.url.host == "hooks.example.com"
    database.close()
    for path in home.iterdir():
        assert b"SECRET" not in path.read_bytes(), path


def test_a_missing_run_is_reported_and_the_others_are_evaluated(recorded: Api, folder_store: Store) -> None:
    folder_store.delete(f"{PROJECT}/a1/run.json")
    backtest = created(recorded, runs=["a1", "b"])
    while judge_next(recorded.driven.service, backtest["id"]):
        pass
    done = recorded.call("GET", f"{PLACE}/{backtest['id']}").json()["report"]
    [failed] = done["failed"]
    assert "a1" in failed["what"]
    assert "not found" in failed["what"]
    assert [run["run"] for run in done["runs"]] == ["b"]


def test_a_dead_worker_costs_its_lease_and_a_run_that_kills_workers_is_skipped(
    recorded: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    backtest = created(recorded, runs=["b"], rules=[NAN])
    service = recorded.driven.service

    class Killed(BaseException):
        pass

    def killed(*_: object) -> Any:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(backtests, "judge_run", killed)
        for _ in range(3):
            with pytest.raises(Killed):
                judge_next(service, backtest["id"])
            assert due_backtests(service) == ()
            assert not judge_next(service, backtest["id"])  # it is claimed
            with service.database.write() as session:
                session.execute(update(Backtest).values(lease_until_ns=0))
            assert due_backtests(service) == (backtest["id"],)
    judge_next(service, backtest["id"])
    (failed,) = recorded.call("GET", f"{PLACE}/{backtest['id']}").json()["report"]["failed"]
    assert "3 workers died" in failed["what"]


def test_results_after_a_takeover_are_discarded(recorded: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    backtest = created(recorded, runs=["b"], rules=[NAN])
    service = recorded.driven.service

    def overtaken(location: str, *_more: Any) -> Replayed | Failed:
        monkeypatch.setattr(backtests, "judge_run", judge_run)
        with service.database.write() as session:
            session.execute(update(Backtest).values(lease_until_ns=0))
        assert not judge_next(service, backtest["id"])
        return Failed(location, "late", "")

    monkeypatch.setattr(backtests, "judge_run", overtaken)
    assert not judge_next(service, backtest["id"])
    with service.database.read() as session:
        (row,) = session.query(BacktestResult).all()
    assert "what" not in row.result


def test_a_run_that_takes_too_long_fails_and_the_others_are_evaluated(
    recorded: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    backtest = created(recorded, runs=["a*"], rules=[NAN])
    with monkeypatch.context() as patch:
        patch.setattr(backtests, "_RUN_SECONDS", -1.0)
        assert judge_next(recorded.driven.service, backtest["id"])
    judge_next(recorded.driven.service, backtest["id"])
    done = recorded.call("GET", f"{PLACE}/{backtest['id']}").json()["report"]
    assert [failed["what"] for failed in done["failed"]] == ["the backtest takes more than -1 s"]
    assert [run["run"] for run in done["runs"]] == ["a2"]


def test_a_process_that_ends_leaves_its_run_to_another(recorded: Api) -> None:
    backtest = created(recorded, runs=["a*"], rules=[NAN])
    service = recorded.driven.service
    service.stopping.set()
    assert not judge_next(service, backtest["id"])
    service.stopping.clear()
    assert due_backtests(service) == (backtest["id"],)
    assert recorded.driven.get(Backtest, backtest["id"]).tries == 0
    assert judge_next(service, backtest["id"])


def test_a_backtest_that_takes_long_keeps_no_process_of_production_from_other_work(
    recorded: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ends = threading.Event(), threading.Event()

    def judged(location: str, *_more: Any) -> Failed:
        began.set()
        assert ends.wait(60)
        return Failed(location, "", "")

    monkeypatch.setattr(backtests, "judge_run", judged)
    backtest = created(recorded, runs=["a1"], rules=[NAN])
    service = recorded.driven.service
    threads = WorkQueue(1)
    threads.start(service)
    monkeypatch.setattr(celery_app, "_threads_in", lambda _process: threads)
    try:
        celery_app.evaluate_backtest(backtest["id"])
        assert began.wait(60)
        assert recorded.driven.get(Backtest, backtest["id"]).state == "waiting"
    finally:
        ends.set()
        threads.close()


def test_results_survive_a_round_trip(folder_store: Store) -> None:
    Recording(folder_store).begin().write_all([9, 19, 29], nan_from(12))
    configs = (
        RuleConfig(rule="non_finite_values", inhibits=("exploding_gradient",)),
        RuleConfig(rule="exploding_gradient"),
    )
    varied = tuple(variations(configs, [parse_sweep("max_elements=0,5", configs)]))
    location = f"{folder_store.location}/{PROJECT}/run-1"
    tested = judge_run(location, Task(configs, varied))
    assert isinstance(tested, Replayed)
    assert tested.outcome == backtest_run(location, configs)
    failed = Failed("x", "y", "z")
    assert result_from_data(result_as_data(tested)) == tested
    results, _ = read_report(report([failed, tested], varied))
    assert results == [tested, failed]
