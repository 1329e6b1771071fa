"""The service in one process, and launches in it."""

from __future__ import annotations

import json
import math
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from sqlalchemy import select, update

from tests.services.announcing import announcing
from tests.services.channels.http_server import HttpServer, status
from tests.services.channels.smtp_server import SmtpServer, smtp_server
from tests.services.jobs import STUBBORN, eventually, launch
from tests.services.recording import PROJECT, Recording, damage_from, exploding_from
from watchstep.capture.service.location import ServiceNote
from watchstep.errors import ConfigError, MissingStoreError, NotFoundError
from watchstep.format.control import ControlDocument
from watchstep.platform.transport import ServiceAddress, Transport
from watchstep.store.store import Store
from watchstep_launch.backends.local.backend import Local
from watchstep_services.auth import identify
from watchstep_services.channels.webhook import new_secret
from watchstep_services.core.settings import NANOSECONDS, Settings, load_settings
from watchstep_services.db.clock import read_clock
from watchstep_services.db.encryption import open_encrypted_database
from watchstep_services.db.models import ActionRow, EventRow, RunRow
from watchstep_services.runs.claim import claim
from watchstep_services.serve.embedded import EmbeddedService, expire_leases, pause_before
from watchstep_services.serve.launching import LaunchedProgram, launch_local

RUN = f"/v1/projects/{PROJECT}/runs/run-1"
WAIT = 60.0
CLIENT = httpx.Client(timeout=WAIT)  # each takes 50 ms of processor time to make
PROGRAM = "import os; print(os.environ.get('WATCHSTEP_CAPTURE', 'none'), flush=True)"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(
        home=tmp_path / "home",
        store=str(tmp_path / "store"),
        sweep_seconds=0.05,
        listing_seconds=0.05,
        grace_seconds=0.2,
    )


@pytest.fixture
def embedded(settings: Settings) -> Iterator[EmbeddedService]:
    with EmbeddedService(settings) as service:
        yield service


def call(service: EmbeddedService, method: str, path: str, body: Any = None) -> Any:
    headers = {"authorization": f"Bearer {service.operator_token}"}
    answer = CLIENT.request(method, service.url + path, json=body, headers=headers)
    assert answer.is_success, answer.text
    return answer.json()


def happened(service: EmbeddedService, kind: str) -> bool:
    with service.database.read() as session:
        return session.execute(select(EventRow).filter_by(type=f"io.watchstep.{kind}")).first() is not None


@pytest.mark.ci
def test_a_recorded_nan_stops_the_job(embedded: EmbeddedService, folder_store: Store, tmp_path: Path) -> None:
    recording = Recording(folder_store).begin(on_stop="raise")
    backend = embedded.service.backends["local"]
    assert isinstance(backend, Local)
    job = launch(backend, tmp_path, STUBBORN)
    bound = {"backend": job.backend, "id": job.id, "identity": dict(job.identity)}
    call(
        embedded,
        "POST",
        f"/v1/projects/{PROJECT}/runs",
        {"run": "run-1", "attempt": "a1", "job": bound},
    )
    key = recording.write(0, 0, 7, damage_from(5))
    call(embedded, "POST", f"{RUN}/announcements", announcing(key))
    assert embedded.wait_until(lambda: happened(embedded, "run.ended"), WAIT)

    run = call(embedded, "GET", RUN)
    assert (run["state"], run["job"]["state"], run["job"]["exit_code"]) == ("stopped", "ended", -9)
    events = call(embedded, "GET", f"{RUN}/events")["events"]
    # That it runs is for a sweep to see, which judging does not wait for.
    events = [event for event in events if event["type"] != "io.watchstep.run.started"]
    events = [event for event in events if not event["data"].get("inhibited_by")]
    assert [event["type"].removeprefix("io.watchstep.") for event in events] == [
        "alert.firing",
        "stop.requested",
        "stop.done",
        "run.ended",
    ]
    firing, requested, done = (event["data"] for event in events[:3])
    assert firing["evidence"]["segments"] == [key.path]
    assert requested["cause"] == done["cause"] == events[0]["id"]
    assert (done["how"], done["stopped_at_step"]) == ("killed", 7)
    stop = ControlDocument.decode(recording.store.get("control.json")).stop
    assert stop is not None
    assert stop.step == 8


@pytest.mark.ci
def test_a_run_that_nobody_announced_is_found(embedded: EmbeddedService, folder_store: Store) -> None:
    asked: dict[str, object] = {
        "rule": "exploding_gradient",
        "name": "mine",
        "actions": ["stop"],
        "for": {"steps": 2},
    }
    recording = Recording(folder_store).begin(rules=[asked])
    recording.write_all([9, 19, 29], exploding_from(21))
    recording.end("completed", 29)
    assert embedded.wait_until(lambda: happened(embedded, "run.ended"), WAIT)
    run = call(embedded, "GET", RUN)
    assert (run["state"], run["last_step"]) == ("completed", 29)
    told = {rule["name"]: (rule["origin"], rule["granted_stop"], rule["health"]) for rule in run["rules"]}
    assert told["mine"] == ("recorder", False, "ok")
    assert told["nan_or_inf"] == ("owner", True, "ok")
    assert call(embedded, "GET", f"{RUN}/actions")["actions"] == []
    assert {alert["name"] for alert in call(embedded, "GET", f"{RUN}/alerts")["alerts"]} >= {"mine"}


@pytest.mark.ci
def test_the_link_to_the_page_is_valid_after_a_restart(settings: Settings) -> None:
    with EmbeddedService(settings) as first:
        token = first.page_link.partition("#token=")[2]
        operator = first.operator_token
    with EmbeddedService(settings) as second:
        identities = [identify(second.database, each) for each in (token, operator)]
    assert identities[0] is not None
    assert (identities[0].role, identities[1]) == ("admin", None)


def test_what_was_not_done_is_done_after_a_restart(settings: Settings, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    recording.write(0, 0, 3)
    with EmbeddedService(settings) as first:
        assert first.wait_until(lambda: happened(first, "run.started"), WAIT)
    recording.write(1, 4, 7, damage_from(6))
    recording.end("failed", 7)
    with EmbeddedService(settings) as second:
        assert second.wait_until(lambda: happened(second, "run.ended"), WAIT)
        assert second.wait_until(lambda: happened(second, "stop.done"), WAIT)
        (action,) = call(second, "GET", f"{RUN}/actions")["actions"]
        assert action["state"] in {"done", "skipped"}


def test_what_a_killed_service_had_claimed_waits_for_no_lease(
    settings: Settings, folder_store: Store
) -> None:
    recording = Recording(folder_store).begin()
    recording.write(0, 0, 3)
    with EmbeddedService(settings) as first:
        assert first.wait_until(lambda: happened(first, "run.started"), WAIT)
        call(first, "POST", f"{RUN}/stop", {"reason": "enough"})
        assert first.wait_until(lambda: happened(first, "stop.requested"), WAIT)
    database = open_encrypted_database(settings)
    with database.write() as session:
        later = read_clock(session) + 3600 * NANOSECONDS
        (run_id,) = session.execute(
            update(RunRow).values(lease_until_ns=later).returning(RunRow.id)
        ).scalars()
        session.execute(update(ActionRow).values(state="pending", next_ns=later))
    expire_leases(database)
    assert claim(database, run_id, NANOSECONDS) is not None
    with database.read() as session:
        (due_ns,) = session.execute(select(ActionRow.next_ns).filter_by(kind="stop")).scalars()
        assert due_ns <= read_clock(session)
    database.close()


def test_the_service_file_is_for_its_owner_only(settings: Settings) -> None:
    place = settings.home_folder / "service.json"
    with EmbeddedService(settings) as service:
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        assert json.loads(place.read_text())["url"] == service.url
        note = ServiceNote.read(settings.home_folder)
        assert note is not None
        assert note.operator_token == service.operator_token
        with pytest.raises(ConfigError, match="another watchstep service"):
            EmbeddedService(settings).__enter__()
        token, url = service.operator_token, service.url
    assert ServiceNote.read(settings.home_folder) is None
    with EmbeddedService(settings) as again:
        answer = httpx.get(f"{again.url}/v1/rules", headers={"authorization": f"Bearer {token}"})
        assert answer.status_code == 401
        assert again.url != url or again.settings.port


@pytest.mark.ci
def test_it_leaves_no_thread_behind(settings: Settings) -> None:
    before = set(threading.enumerate())
    with EmbeddedService(settings) as service:
        assert httpx.get(f"{service.url}/readyz").json() == {"status": "ok"}
    assert set(threading.enumerate()) <= before


def test_bad_settings_are_told_and_leave_nothing(settings: Settings, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules: [{rule: no_such_rule}]")
    before = set(threading.enumerate())
    for changes in ({"rules_file": rules}, {"host": "203.0.113.1"}):
        with pytest.raises(Exception, match=r"no_such_rule|203\.0\.113\.1"):
            EmbeddedService(settings.model_copy(update=changes)).__enter__()
    assert set(threading.enumerate()) <= before


@pytest.mark.ci
def test_event_streams_close_with_the_service(settings: Settings) -> None:
    began, ended = threading.Event(), threading.Event()
    service = EmbeddedService(settings)

    def follow(url: str, token: str) -> None:
        place = f"{url}/v1/projects/{PROJECT}/events/stream"
        headers = {"authorization": f"Bearer {token}"}
        with httpx.stream("GET", place, headers=headers, timeout=WAIT) as answer:
            for _ in answer.iter_bytes():
                began.set()
        ended.set()

    with service:
        call(service, "POST", f"/v1/projects/{PROJECT}/runs", {"run": "run-1"})
        threading.Thread(target=follow, args=(service.url, service.operator_token), daemon=True).start()
        assert began.wait(WAIT)
        closing = threading.Thread(target=service.close, daemon=True)
        closing.start()
        assert ended.wait(WAIT)
        closing.join(WAIT)
        assert not closing.is_alive()


@pytest.mark.parametrize(
    ("due_ns", "seconds"),
    [(None, 1.0), (5 * 10**9, 1.0), (3 * 10**8, 0.3), (1, 0.01), (0, 0.25), (-(10**12), 0.25)],
)
def test_an_overdue_action_is_not_asked_for_without_a_pause(due_ns: int | None, seconds: float) -> None:
    assert pause_before(due_ns, 1.0) == pytest.approx(seconds)


def test_no_pause_is_longer_than_a_sweep(settings: Settings) -> None:
    assert pause_before(-1, settings.sweep_seconds) == settings.sweep_seconds


def test_a_store_that_its_home_remembers_is_not_made_anew(settings: Settings, tmp_path: Path) -> None:
    store, elsewhere = Path(settings.store), tmp_path / "elsewhere"
    with EmbeddedService(settings):
        store.rename(elsewhere)
    with EmbeddedService(settings.model_copy(update={"store": str(tmp_path / "second")})):
        pass  # another store of the same home
    for mount_point in (False, True):
        if mount_point:
            store.mkdir()
        with (
            pytest.raises(MissingStoreError, match=r"hint: restore the folder; .* remove .*store-identity"),
            EmbeddedService(settings),
        ):
            pass
    store.rmdir()
    elsewhere.rename(store)
    with EmbeddedService(settings) as service:
        assert call(service, "GET", "/v1/projects")


@pytest.mark.ci
def test_each_run_of_a_home_is_read_from_its_own_store(
    settings: Settings, folder_store: Store, s3_store: Store, tmp_path: Path
) -> None:
    """The home has served a folder, then it serves a bucket: runs on both are judged, and stopped on their own store."""
    first = Recording(folder_store).begin()
    first.write(0, 0, 3)
    with EmbeddedService(settings) as service:
        assert service.wait_until(lambda: happened(service, "run.started"), WAIT)
    with EmbeddedService(settings.model_copy(update={"store": s3_store.location})) as service:
        note = ServiceNote.read(settings.home_folder)
        assert note is not None
        assert note.stores == (s3_store.location, folder_store.location)
        (project,) = call(service, "GET", "/v1/projects")["projects"]
        assert project["locations"] == [s3_store.location, folder_store.location]

        of_bucket, of_folder = (
            Recording(s3_store, "in-bucket").begin(),
            Recording(folder_store, "in-folder").begin(),
        )
        project_url = f"/v1/projects/{PROJECT}/runs"
        body = {"run": "in-bucket", "attempt": "a1", "store": s3_store.location}
        assert call(service, "POST", project_url, body)["store"] == s3_store.location
        key = of_bucket.write(0, 0, 7, damage_from(5))
        assert not call(service, "POST", f"{project_url}/in-bucket/announcements", announcing(key))[
            "evaluated"
        ]
        of_folder.write(0, 0, 7, damage_from(5))  # found by a listing
        first.write(1, 4, 7, damage_from(6))
        for recording in (first, of_bucket, of_folder):
            url = f"{project_url}/{recording.run}"

            def is_stopped(recording: Recording = recording) -> bool:
                try:
                    stop = ControlDocument.decode(recording.store.get("control.json")).stop
                except NotFoundError:
                    return False
                return stop is not None and stop.step > 0

            assert service.wait_until(is_stopped, WAIT), recording.run
            run = call(service, "GET", url)
            assert (run["store"], run["last_step"]) == (recording.root.location, 7)
            assert run["evaluated_ns"] > 0
        assert call(service, "GET", f"{project_url}/in-folder/tensors")["tensors"]
        written = of_bucket.write(1, 8, 9)
        assert call(service, "POST", f"{project_url}/in-bucket/announcements", announcing(written))[
            "evaluated"
        ]
        # The name of a run is that of one run, on one store.
        taken = {"run": "in-folder", "store": s3_store.location}
        headers = {"authorization": f"Bearer {service.operator_token}"}
        refused = httpx.post(service.url + project_url, json=taken, headers=headers, timeout=WAIT)
        assert refused.status_code == 403
        assert f"registered on store {folder_store.location}" in refused.json()["detail"]
        # A folder has another path on another machine; a bucket does not.
        other = {"run": "elsewhere", "store": (tmp_path / "mounted").as_uri()}
        assert call(service, "POST", project_url, other)["store"] == s3_store.location
        refused = httpx.post(
            service.url + project_url,
            json={"run": "x", "store": "s3://of-others/runs"},
            headers=headers,
            timeout=WAIT,
        )
        assert refused.status_code == 403
        assert "store 's3://of-others/runs': not registered for project" in refused.json()["detail"]
    with EmbeddedService(settings) as service:
        (project,) = call(service, "GET", "/v1/projects")["projects"]
        assert project["locations"] == [folder_store.location, s3_store.location]
        assert call(service, "GET", f"/v1/projects/{PROJECT}/runs/in-bucket")["store"] == s3_store.location


@pytest.mark.ci
def test_rules_of_a_file_take_the_place_of_the_default_ones_for_runs_that_go_on(
    settings: Settings, folder_store: Store, tmp_path: Path
) -> None:
    """Their default rule could still stop the job."""
    recording = Recording(folder_store).begin(on_stop="raise")
    recording.write(0, 0, 7)

    def judging(service: EmbeddedService) -> dict[str, bool]:
        rules = call(service, "GET", RUN)["rules"]
        return {rule["name"]: rule["granted_stop"] for rule in rules if rule["origin"] == "owner"}

    with EmbeddedService(settings) as service:
        assert service.wait_until(lambda: happened(service, "run.started"), WAIT)
        assert judging(service)["nan_or_inf"]
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules: [{rule: non_finite_values, name: mine}, {rule: dead_relu}]")
    with EmbeddedService(settings.model_copy(update={"rules_file": rules})) as service:
        assert judging(service) == {"mine": False, "dead_relu": False}
        recording.write(1, 8, 15, damage_from(9))
        assert service.wait_until(lambda: happened(service, "alert.firing"), WAIT)
        assert not happened(service, "stop.requested")
        assert call(service, "GET", f"{RUN}/control")["stop"] is None
    with EmbeddedService(settings) as service:
        assert judging(service)["nan_or_inf"]
        assert "mine" not in judging(service)


def test_what_holds_tokens_is_the_owners_alone(settings: Settings) -> None:
    """Also in a folder that exists already, and of a database that another version made."""
    home = settings.home_folder
    home.mkdir(mode=0o755)
    names = ("watchstep.sqlite", "watchstep.sqlite-wal", "service.lock", "store-identity")
    for name in names:
        (home / name).touch(mode=0o644)
    with EmbeddedService(settings):
        files = [path for path in home.iterdir() if path.is_file()]
        assert {path.name for path in files} >= {*names, "watchstep.sqlite-shm", "service.json"}
        assert {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == {
            path.name: "0o600" for path in files
        }


@pytest.fixture
def mail() -> Iterator[SmtpServer]:
    with smtp_server() as running:
        yield running


def nan_for_a_while(step: int, tensor: str) -> float:
    return math.nan if tensor == "loss" and 5 <= step <= 9 else 1.0


@pytest.mark.ci
def test_mail_and_webhook_tell_that_it_fires_and_that_it_is_over(
    receiver: HttpServer,
    mail: SmtpServer,
    folder_store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WATCHSTEP_RECEIVER_SECRET", new_secret())
    receivers: dict[str, Any] = {
        "receivers": [
            {"name": "hook", "kind": "webhook", "url": receiver.url, "secret": {"env": "WATCHSTEP_RECEIVER_SECRET"}},
            {
                "name": "mail", "kind": "email", "host": "127.0.0.1", "port": mail.port, "security": "none",
                "sender": "watch@ml.example", "to": ["a@ml.example"],
            },
        ],
        "route": {"receiver": "hook", "group_wait": 0, "group_interval": 0.1},
    }  # fmt: skip
    # The tree tells the webhook; the rule itself names whom else to tell.
    rules = {
        "rules": [
            {
                "rule": "non_finite_values",
                "name": "no-nans",
                "dry_run": False,
                "actions": [{"notify": "mail"}],
            }
        ]
    }
    (tmp_path / "receivers.yaml").write_text(yaml.safe_dump(receivers), encoding="utf-8")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    receiver.answers = [status(503), status(429, retry_after="0")]  # what fails is sent again
    mail.to_messages = ["451 later"]
    settings = load_settings(
        home=tmp_path / "home",
        store=str(tmp_path / "store"),
        rules_file=tmp_path / "rules.yaml",
        receivers_file=tmp_path / "receivers.yaml",
        sweep_seconds=0.05,
        listing_seconds=0.05,
        retry_seconds=0.01,
    )
    recording = Recording(folder_store).begin()
    recording.write(0, 0, 7, nan_for_a_while)
    with EmbeddedService(settings) as service:

        def events() -> list[dict[str, Any]]:
            return [json.loads(body) for body in list(receiver.bodies)[2:]]

        assert service.wait_until(lambda: bool(events()) and bool(mail.messages), WAIT)
        recording.write(1, 8, 40, nan_for_a_while)
        assert service.wait_until(lambda: len(events()) >= 2 and len(mail.messages) >= 2, WAIT)
    firing, resolved = events()
    assert len({json.loads(body)["id"] for body in receiver.bodies[:3]}) == 1
    assert [event["type"] for event in (firing, resolved)] == [
        "io.watchstep.notification.firing",
        "io.watchstep.notification.resolved",
    ]
    assert firing["data"]["group_key"] == resolved["data"]["group_key"]
    (alert,) = firing["data"]["alerts"]
    assert (alert["name"], alert["step"], alert["labels"]["run"]) == ("no-nans", 5, "run-1")
    assert all("webhook-signature" in headers for headers in receiver.headers)
    first, last = mail.messages
    assert (first["x-watchstep-status"], last["x-watchstep-status"]) == ("firing", "resolved")
    assert first["references"] == last["references"]
    assert first["message-id"] != last["message-id"]


def output(service: EmbeddedService, folder: Path, run: str) -> str:
    log = folder / f"{run}.log"
    launch_local(
        service.service,
        LaunchedProgram("vision", run, (sys.executable, "-c", PROGRAM), folder, log),
        service.recorder_token,
    )
    eventually(lambda: log.exists() and log.read_text().endswith("\n"))
    return log.read_text().strip()


@pytest.mark.ci
def test_a_launched_program_receives_the_projects_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WATCHSTEP_CAPTURE", raising=False)
    settings = load_settings(home=tmp_path / "home", store=str(tmp_path / "store"))
    with EmbeddedService(settings) as service:
        assert output(service, tmp_path, "first") == "none"
        transport = Transport(ServiceAddress(service.url, service.operator_token), 30.0)
        transport.call("PUT", "/v1/projects/vision/capture", body={"gate": False})
        assert json.loads(output(service, tmp_path, "second")) == {"gate": False}
        monkeypatch.setenv("WATCHSTEP_CAPTURE", '{"overhead_budget": 0.5}')
        assert json.loads(output(service, tmp_path, "third")) == {"overhead_budget": 0.5}
