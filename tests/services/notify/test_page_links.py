"""Links of notifications and of alert events to the web page."""

from __future__ import annotations

from pathlib import Path

from tests.services.driving import Driven
from tests.services.notify.alerting import PUBLIC, fire, picture_name, reachable, with_receiver
from tests.services.recording import Recording, damage_from
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.channels.notification import Notification
from watchstep_services.db.clock import read_clock
from watchstep_services.notify import samples
from watchstep_services.notify.flush import flush_due

HOOK = {"kind": "webhook", "url": "https://hooks.example/a"}


def notification(driven: Driven, run_id: int) -> Notification:
    flush_due(driven.service)
    (action,) = [action for action in driven.actions(run_id) if action.kind == "notify"]
    return Notification.from_data(action.payload["notification"])


def test_an_alert_and_its_events_lead_to_its_page(
    driven_sqlite: Driven, folder_store: Store, tmp_path: Path
) -> None:
    driven = with_receiver(reachable(driven_sqlite, tmp_path, public_url=f"{PUBLIC}/"), HOOK)
    run_id = fire(driven, folder_store)
    made = notification(driven, run_id)
    page = f"{PUBLIC}/projects/vision/runs/run-1/alerts/{picture_name(driven).fingerprint}"
    assert (made.url, made.page, made.run_url) == (page, "alert", f"{PUBLIC}/projects/vision/runs/run-1")
    (event,) = [event for event in driven.events(run_id) if event["type"].endswith("alert.firing")]
    assert event["data"]["url"] == page
    assert made.source == event["source"] == "http://service.test/v1/projects/vision/runs/run-1"
    with driven.service.database.read() as session:
        preview = samples.of_alert(driven.service, session, driven.run(run_id), "mine", read_clock(session))
    assert preview.url == page
    tested = [samples.example(driven.service, "vision", status, 1) for status in ("firing", "resolved")]
    assert {(test.url, test.page) for test in tested} == {(f"{PUBLIC}/projects/vision", "runs")}
    assert tested[0].group_key == tested[1].group_key
    assert tested[0].id != tested[1].id


def test_several_alerts_lead_to_the_run_and_of_several_runs_to_their_list(
    driven_sqlite: Driven, folder_store: Store, tmp_path: Path
) -> None:
    names = ("first", "second")
    rules = [RuleConfig.model_validate({"rule": "non_finite_values", "name": name}) for name in names]
    for group_by, runs, expected in (
        (["run"], ["a"], (f"{PUBLIC}/projects/vision/runs/a", "run")),
        (["severity"], ["b", "c"], (f"{PUBLIC}/projects/vision", "runs")),
    ):
        driven = with_receiver(reachable(driven_sqlite, tmp_path), HOOK, group_by=group_by)
        run_ids = []
        for run in runs:
            recording = Recording(folder_store, run=run).begin()
            run_ids.append(driven.register(run, rules=rules))
            driven.announce(run_ids[-1], recording.write(0, 0, 7, damage_from(5)))
            driven.settle(run_ids[-1])
        made = notification(driven, run_ids[0])
        assert (made.url, made.page) == expected
        assert all("/alerts/" in alert.url for alert in made.alerts)


def test_without_a_public_url_nothing_leads_to_an_address_that_only_this_machine_has(
    driven_sqlite: Driven, folder_store: Store
) -> None:
    driven = with_receiver(driven_sqlite, HOOK)
    run_id = fire(driven, folder_store)
    made = notification(driven, run_id)
    assert (made.url, made.run_url, made.alerts[0].url) == ("", "", "")
    assert made.command == "watchstep runs alerts vision/run-1 --service http://service.test"
    (event,) = [event for event in driven.events(run_id) if event["type"].endswith("alert.firing")]
    assert event["data"]["url"] == ""
