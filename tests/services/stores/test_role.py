"""The role of a store, on moto. Moto does not enforce policies, so denials by AWS are not tested."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from tests.conftest import S3
from watchstep.errors import ConfigError, StoreError
from watchstep.store.cloud import S3Access
from watchstep.store.store import Store
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.stores import role
from watchstep_services.stores.opening import Stores, check_store, failed
from watchstep_services.stores.role import RoleCredentials, project_policy, scoped_credentials

ROLE = "arn:aws:iam::123456789012:role/watchstep"


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
