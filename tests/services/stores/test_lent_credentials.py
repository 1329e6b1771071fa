"""A recorder with credentials lent by the service, with a running service and moto."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import S3
from tests.services.jobs import eventually
from tests.services.stores.iam import Request, allowed
from watchstep import Hook, open_run
from watchstep.capture.config import Bounds, CaptureConfig
from watchstep.errors import ConfigError
from watchstep_services.auth import create_token
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService
from watchstep_services.stores import role

ROLE = "arn:aws:iam::123456789012:role/watchstep"
EVERYTHING = json.dumps(
    {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
)
QUICK = CaptureConfig(
    collections={"losses": CaptureConfig().chosen["losses"]}, system=None, bounds=Bounds(close_seconds=60)
)


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


def test_where_none_are_lent_its_own_are_used_and_that_is_reported_once(
    service: EmbeddedService, caplog: pytest.LogCaptureFixture
) -> None:
    faults = record("plain").health["faults"]
    assert list(faults) == ["credentials"]
    assert "no role" in faults["credentials"]
    messages = [line for line in caplog.messages if "credentials:" in line]
    assert len(messages) == 1
    assert open_run("s3://plain/runs/plain/r").steps() == [0, 1]


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
