"""Stores that are opened by a role, and credentials that are lent."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import S3
from tests.services.jobs import eventually
from tests.services.stores.iam import Request, allowed
from watchstep import Hook, open_run
from watchstep.capture.config import Bounds, CaptureConfig
from watchstep.errors import ConfigError, StoreError
from watchstep.store.cloud import S3Access
from watchstep.store.store import Store
from watchstep_services.auth import create_token
from watchstep_services.core.settings import load_settings
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.serve.embedded import EmbeddedService
from watchstep_services.stores import role
from watchstep_services.stores.opening import Stores, check_store, failed
from watchstep_services.stores.role import RoleCredentials, project_policy, scoped_credentials

ROLE = "arn:aws:iam::123456789012:role/watchstep"
EVERYTHING = json.dumps(
    {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
)
QUICK = CaptureConfig(
    collections={"losses": CaptureConfig().chosen["losses"]}, system=None, bounds=Bounds(close_seconds=60)
)


@pytest.fixture
def registration(s3: S3) -> StoreRegistration:
    s3.make_bucket("tenants")
    return StoreRegistration("s3://tenants/runs", ROLE, "acme-7f3a")


def place(registration: StoreRegistration, project: str = "vision", version: int = 1) -> StorePlace:
    return StorePlace(1, version, registration, "", project)


def test_a_place_is_read_and_written_by_its_role(registration: StoreRegistration) -> None:
    stores = Stores()
    run = stores.of_run(place(registration), "run-1")
    run.put("control.json", b"{}")
    assert run.get("control.json") == b"{}"
    assert Store.open("s3://tenants/runs").get("vision/run-1/control.json") == b"{}"
    assert stores.of(place(registration)).folders("vision/") == ["run-1"]


def test_the_role_is_assumed_with_the_external_id_and_the_projects_policy(
    registration: StoreRegistration, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[dict[str, Any]] = []

    class Client:
        def assume_role(self, **arguments: Any) -> dict[str, Any]:
            requests.append(arguments)
            later = datetime.now(timezone.utc) + timedelta(hours=1)
            return {
                "Credentials": {
                    "AccessKeyId": "k",
                    "SecretAccessKey": "s",
                    "SessionToken": "t",
                    "Expiration": later,
                }
            }

    monkeypatch.setattr(role, "_sts", lambda _registration: Client())
    at = place(registration, "vis ion"[:3])
    run = Stores().of_run(at, "run-1")
    for _ in range(3):
        run.put("a", b"")
    (once,) = requests  # credentials are cached until they are about to expire
    assert once == {
        "RoleArn": ROLE, "RoleSessionName": "watchstep-vis", "Policy": project_policy(at), "DurationSeconds": 3600,
        "ExternalId": "acme-7f3a",
    }  # fmt: skip
    scoped = scoped_credentials(at, "run-1", "a1")
    assert "run-1/end/a1/*" in requests[1]["Policy"]
    assert "secret_access_key" not in repr(scoped)
    assert len(json.dumps(requests[1]["Policy"])) > 0


def test_credentials_are_renewed_before_they_expire(s3: S3) -> None:
    s3.make_bucket("runs")
    expiries: list[datetime] = []

    def credentials(seconds: int) -> Any:
        def give() -> dict[str, Any]:
            expiries.append(datetime.now(timezone.utc) + timedelta(seconds=seconds))
            return {"access_key_id": "k", "secret_access_key": "s", "token": "t", "expires_at": expiries[-1]}

        return give

    lasting = Store.open("s3://runs", access=S3Access(credentials(3600)))
    for number in range(3):
        lasting.put(f"x{number}", b"")
    assert len(expiries) == 1
    short = Store.open("s3://runs", access=S3Access(credentials(240)))
    short.put("x", b"")
    _, first = expiries
    while len(expiries) == 2:  # obstore asks no more often than each tenth of a second
        assert datetime.now(timezone.utc) < first
        short.put("x", b"")


def test_no_other_credentials_are_tried_where_the_role_is_refused(
    registration: StoreRegistration, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service's own credentials would do, and are not used."""

    def refuse(_client: Any, _registration: Any, _policy: str, _name: str) -> dict[str, Any]:
        raise StoreError(f"role {ROLE} cannot be assumed (AccessDenied)", "let it trust the service")

    monkeypatch.setattr(role, "_assume", refuse)
    run = Stores().of_run(place(registration), "run-1")
    for what in (lambda: run.put("a", b""), lambda: run.get("a"), lambda: list(run.entries())):
        with pytest.raises(StoreError):
            what()
    assert list(Store.open("s3://tenants").entries()) == []
    (step,) = check_store(registration)
    assert (step.name, step.ok, "cannot be assumed" in step.detail) == ("role", False, True)


def test_without_credentials_of_its_own_the_service_reports_it(
    registration: StoreRegistration,
) -> None:
    role._client.cache_clear()
    credentials = RoleCredentials(registration, project_policy(place(registration)), "watchstep")
    with pytest.MonkeyPatch.context() as without:
        without.delenv("AWS_ACCESS_KEY_ID")
        without.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(StoreError, match="NoCredentials"):
            credentials()
    assert credentials()["token"]  # those that came later are found


def test_a_store_is_tried_step_by_step(registration: StoreRegistration) -> None:
    steps = check_store(registration)
    assert [(step.name, step.ok) for step in steps] == [
        (name, True) for name in ("role", "list", "write", "read", "create_once", "delete")
    ]
    assert list(Store.open("s3://tenants").entries()) == []
    missing = failed(check_store(StoreRegistration("s3://nobody/runs")))
    assert missing is not None
    assert (missing.name, "no such bucket" in missing.detail) == ("list", True)


def test_a_changed_registration_is_opened_anew(registration: StoreRegistration, s3: S3) -> None:
    s3.make_bucket("moved")
    stores = Stores()
    first = stores.of(place(registration))
    assert stores.of(place(registration)) is first
    assert stores.of(place(registration, "audio")) is not first
    moved = StoreRegistration("s3://moved/runs", ROLE, "acme-7f3a")
    assert stores.of(place(moved, version=2)).location == "s3://moved/runs"


def test_scoped_credentials_need_a_role_and_write_an_attempt(registration: StoreRegistration) -> None:
    with pytest.raises(ConfigError, match="no role"):
        scoped_credentials(place(StoreRegistration("s3://tenants/runs")), "r", "a1")
    credentials = scoped_credentials(place(registration), "r", "a1")
    assert credentials.expires_at > datetime.now(timezone.utc)
    assert credentials.access_key_id.startswith("ASIA")


@pytest.fixture
def service(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedService]:
    """A service with one project on a store with a role, and one without."""
    for bucket in ("own", "lent", "plain"):
        s3.make_bucket(bucket)
    settings = load_settings(home=tmp_path / "home", store="s3://own/runs", new_projects="by_admins")
    with EmbeddedService(settings) as running:
        database = running.service.database
        headers = {"authorization": f"Bearer {create_token(database, 'admin')}"}
        for name, role in (("lent", ROLE), ("plain", "")):
            store = {"name": name, "url": f"s3://{name}/runs", "role_arn": role}
            for path, body in (("stores", store), ("projects", {"name": name, "store": name})):
                answer = httpx.post(f"{running.url}/v1/{path}", json=body, headers=headers, timeout=60)
                assert answer.status_code == 201, answer.text
        monkeypatch.setenv("WATCHSTEP_SERVICE", running.url)
        monkeypatch.setenv("WATCHSTEP_TOKEN", create_token(database, "recorder"))
        monkeypatch.setenv("WATCHSTEP_CREDENTIALS", "service")
        monkeypatch.setenv("WATCHSTEP_ATTEMPT", "a1")
        yield running


def record(project: str, **arguments: Any) -> Hook:
    with Hook(f"s3://{project}/runs", project=project, run="r", config=QUICK, **arguments) as hook:
        for loss in (1.0, 0.5):
            hook.log(loss=loss)
            hook.step()
    return hook


def given(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Attempts that credentials were lent for."""
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("routes.credentials")]
    assert all(line.startswith("credentials ASIA") for line in lines)
    return [line.split()[4] for line in lines]


@pytest.mark.ci
def test_an_attempt_is_recorded_by_lent_credentials_and_the_next_by_its_own(
    service: EmbeddedService, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert record("lent").health["faults"] == {}
        assert given(caplog) == ["a1"]
        assert record("lent").health["faults"] == {}  # the same launcher starts it again
    assert sorted(set(given(caplog))) == ["a1", "a1.2"]
    run = open_run("s3://lent/runs/lent/r")
    assert (run.attempts, [end.state for end in run.ends()]) == (["a1", "a1.2"], ["completed", "completed"])


@pytest.mark.ci
def test_a_token_of_one_run_is_lent_what_its_run_needs(
    service: EmbeddedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, runs = service.service.database, f"{service.url}/v1/projects/lent/runs"
    operator = {"authorization": f"Bearer {create_token(database, 'operator', 'lent')}"}
    for run in ("r", "hers"):
        httpx.post(runs, json={"run": run}, headers=operator, timeout=60).raise_for_status()
    token = httpx.post(f"{runs}/r/tokens", json={}, headers=operator, timeout=60).json()
    monkeypatch.setenv("WATCHSTEP_TOKEN", token["token"])
    with policies_sent() as policies:
        assert record("lent").health["faults"] == {}
        assert policies
        for run in ("hers", "nobodys"):
            refused = httpx.post(
                f"{runs}/{run}/attempts/a1/credentials", headers={"authorization": f"Bearer {token['token']}"}, timeout=60
            )  # fmt: skip
            assert refused.status_code == 404
    for sent in policies:
        for place, may in (("lent/r", True), ("lent/hers", False), ("lent/r2", False), ("plain/r", False)):
            key = f"runs/{place}/stats/a1/n0/w0/0000000000-0-1.arrow"
            requests = [
                Request("s3:GetObject", f"arn:aws:s3:::lent/{key}"),
                Request("s3:PutObject", f"arn:aws:s3:::lent/{key}", {"s3:if-none-match": "*"}),
                Request("s3:ListBucket", "arn:aws:s3:::lent", {"s3:prefix": f"runs/{place}/"}),
            ]
            assert [allowed(request, EVERYTHING, sent) for request in requests] == [may] * 3, (place, sent)


@contextmanager
def policies_sent() -> Iterator[list[str]]:
    """Session policies of what is lent, as the service sends them to STS; its own sessions of the project are not among them."""
    sent: list[str] = []
    client = role._client("", os.environ["AWS_ENDPOINT_URL"])

    def note(params: dict[str, Any], **_: Any) -> None:
        if params["RoleSessionName"] != "watchstep-lent":
            sent.append(params["Policy"])

    event = "before-parameter-build.sts.AssumeRole"
    client.meta.events.register(event, note)
    yield sent
    client.meta.events.unregister(event, note)


@pytest.mark.ci
def test_where_none_are_lent_its_own_are_used_and_that_is_reported_once(
    service: EmbeddedService, caplog: pytest.LogCaptureFixture
) -> None:
    faults = record("plain").health["faults"]
    assert list(faults) == ["credentials"]
    assert "no role" in faults["credentials"]
    messages = [line for line in caplog.messages if "credentials:" in line]
    assert len(messages) == 1
    assert open_run("s3://plain/runs/plain/r").steps() == [0, 1]


@pytest.mark.ci
def test_a_location_other_than_the_registered_one_is_reported(service: EmbeddedService) -> None:
    with Hook("s3://plain/runs", project="lent", run="r", config=QUICK) as hook:
        hook.log(loss=1.0)
        hook.step()
    assert "'s3://plain/runs': not registered for project 'lent'" in hook.health["faults"]["credentials"]


def test_without_any_credentials_training_continues(
    service: EmbeddedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watchstep.capture.service.client._has_own", lambda: False)
    bounds = Bounds(close_seconds=0.1, backlog_seconds=0.1)
    config = CaptureConfig(collections=QUICK.collections, system=None, bounds=bounds)
    with Hook("s3://plain/runs", project="plain", run="r", config=config) as hook:
        hook.log(loss=1.0)
        hook.step()
        eventually(lambda: "store" in hook.health["faults"], 60)
    assert "no credentials" in hook.health["faults"]["store"]


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WATCHSTEP_CREDENTIALS", "yes")
    with pytest.raises(ConfigError, match="WATCHSTEP_CREDENTIALS"):
        Hook(tmp_path)
