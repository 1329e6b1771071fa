"""The token of a job's recorder, and jobs that an operator launches."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.services.api.serving import serving
from tests.services.driving import Driven
from tests.services.jobs import eventually
from watchstep.capture.service.location import FoundService
from watchstep.client import Client
from watchstep.errors import ServiceError
from watchstep.platform.transport import ServiceAddress
from watchstep.stopping import EXIT_STOPPED
from watchstep_launch import Estimator, JobStatus, Local
from watchstep_launch.registration import LaunchRegistration, recorder_token
from watchstep_rules import non_finite_values
from watchstep_services.api import app
from watchstep_services.api.routes import tokens
from watchstep_services.auth import AuthenticatedCaller, Role, create_token, id_of, identify
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

SECONDS = 180.0
PROGRAM = """
import json, os, pathlib, sys, time
pathlib.Path(sys.argv[1]).write_text(json.dumps(dict(os.environ)))
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    batch = torch.randn(8, 4) if step != 12 else torch.full((8, 4), float("nan"))
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)
"""


@pytest.fixture
def url(driven_sqlite: Driven) -> Iterator[str]:
    with serving(driven_sqlite.service) as url:
        yield url


def found(url: str, operator: str, recorder: str = "") -> FoundService:
    return FoundService(ServiceAddress(url, operator), ServiceAddress(url, recorder or operator))


def held_by(driven: Driven, token: str) -> AuthenticatedCaller:
    identity = identify(driven.service.database, token)
    assert identity is not None
    return identity


def know(found: FoundService, run: str, project: str = "vision") -> None:
    LaunchRegistration(found.operator, project, run, "").register((), "")


@pytest.mark.parametrize("role", ["operator", "admin"])
def test_a_job_is_given_a_token_of_its_run(
    driven_sqlite: Driven, url: str, role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    there = found(url, create_token(driven_sqlite.service.database, role, "vision"))
    know(there, "r" * 128)
    token = recorder_token(there, "vision", "r" * 128)
    held = held_by(driven_sqlite, token)
    assert (held.role, held.project, held.run, len(held.name)) == ("recorder", "vision", "r" * 128, 128)
    assert held.expires_ns is not None
    assert recorder_token(there, "vision", "r" * 128) != token, "a launch that follows gets its own"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert token not in caplog.text


def test_so_it_is_by_a_service_of_this_machine(driven_sqlite: Driven, url: str) -> None:
    """Where its note has a recorder's token of every project beside the operator's."""
    database = driven_sqlite.service.database
    there = found(url, create_token(database, "operator"), create_token(database, "recorder"))
    know(there, "r1")
    assert held_by(driven_sqlite, recorder_token(there, "vision", "r1")).run == "r1"


@pytest.mark.parametrize("role", ["operator", "viewer"])
def test_where_none_can_be_made_it_is_told(
    driven_sqlite: Driven, url: str, role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    """The run is another operator's, or the launcher may only look."""
    database = driven_sqlite.service.database
    know(found(url, create_token(database, "operator")), "r1")
    own = create_token(database, role)
    with caplog.at_level(logging.WARNING):
        assert recorder_token(found(url, own), "vision", "r1") == own
    assert "launcher's own token" in caplog.text
    assert "WATCHSTEP_RECORDER_TOKEN" in caplog.text
    assert own not in caplog.text
    beside = create_token(database, "recorder")
    assert recorder_token(found(url, own, beside), "vision", "r1") == beside


@pytest.mark.parametrize(
    ("role", "told"), [("admin", "every run of the project"), ("operator", "launcher's own token")]
)
def test_an_older_service_makes_none_of_a_run(
    driven_sqlite: Driven,
    monkeypatch: pytest.MonkeyPatch,
    role: Role,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    routers = tuple(router for router in app.ROUTERS if router is not tokens.run_tokens_router)
    monkeypatch.setattr(app, "ROUTERS", routers)
    own = create_token(driven_sqlite.service.database, role)
    with serving(driven_sqlite.service) as url, caplog.at_level(logging.WARNING):
        know(found(url, own), "r1")
        token = recorder_token(found(url, own), "vision", "r1")
    assert told in caplog.text
    assert "update the service" in caplog.text
    assert token not in caplog.text
    held = held_by(driven_sqlite, token)
    assert held.role == ("recorder" if role == "admin" else "operator")
    if role == "admin":
        assert (held.project, held.run) == ("vision", None)
        assert held.expires_ns is not None


def test_a_token_that_was_named_for_jobs_is_theirs(caplog: pytest.LogCaptureFixture) -> None:
    nowhere = "http://127.0.0.1:9"
    assert recorder_token(found(nowhere, "of an operator"), "vision", "r1", "of a job") == "of a job"
    assert recorder_token(found(nowhere, ""), "vision", "r1") == ""
    assert caplog.text == ""
    with pytest.raises(ServiceError, match="does not respond"):
        recorder_token(found(nowhere, "of an operator"), "vision", "r1")


@pytest.mark.parametrize("role", ["recorder", "viewer"])
def test_a_program_under_watchstep_run_starts_with_any_token(
    driven_sqlite: Driven, url: str, role: Role
) -> None:
    store = driven_sqlite.service.settings.store
    done = subprocess.run(
        [
            Path(sys.executable).with_name("watchstep"), "run", "--store", store, "--project", "vision", "--run", "r1",
            "--service", url, "--", sys.executable, "-S", "-c", "raise SystemExit(7)",
        ],
        env={"PATH": "/usr/bin:/bin", "WATCHSTEP_TOKEN": create_token(driven_sqlite.service.database, role)},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    if role == "viewer":
        assert "may not record\n  The program starts and records. Its rules are not evaluated" in done.stderr
        assert "hint: use a token of role recorder" in done.stderr
    else:
        assert "a recorder token may not bind a job" in done.stderr
        assert "watchstep attach --job local:" in done.stderr
        assert driven_sqlite.run(1).run == "r1"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedService]:
    settings = load_settings(home=tmp_path / "home", store=str(tmp_path / "store"))
    monkeypatch.setenv("WATCHSTEP_JOBS", str(tmp_path / "jobs"))
    with EmbeddedService(settings) as running:
        monkeypatch.setenv("WATCHSTEP_SERVICE", running.url)
        yield running


@pytest.mark.release
def test_it_records_its_run_is_stopped_and_reaches_no_other(
    service: EmbeddedService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    operator = create_token(service.service.database, "operator", "vision", name="ann")
    monkeypatch.setenv("WATCHSTEP_TOKEN", operator)
    program, told = tmp_path / "train.py", tmp_path / "environment.json"
    program.write_text(PROGRAM)
    job = Estimator(
        str(program), backend=Local(), store=tmp_path / "store", rules=[non_finite_values().stop()],
        arguments=[str(told)], project="vision",
    ).fit(wait=False)  # fmt: skip
    assert job.wait(SECONDS, show=False) == JobStatus("ended", EXIT_STOPPED)
    token = json.loads(told.read_text())["WATCHSTEP_TOKEN"]
    assert token != operator
    client = Client(service.url, operator, "vision")
    (held,) = client.tokens(job.id)
    assert (held.id, held.state) == (id_of(token), "active")
    assert held.created_by == f"ann (operator, token {id_of(operator)})"
    assert held.last_used_ns is not None, "its announcements showed it"
    health = client.run(job.id).health["recorders"]
    assert all(not one.get("faults") for one in health.values()), health

    root = f"{service.url}/v1/projects/vision/runs"
    httpx.post(root, json={"run": "hers"}, headers=bearer(operator), timeout=60).raise_for_status()
    for path in ("hers/announcements", "hers/attempts/a1/credentials"):
        assert httpx.post(f"{root}/{path}", json={}, headers=bearer(token), timeout=60).status_code == 404
    assert httpx.get(f"{root}/{job.id}", headers=bearer(token), timeout=60).status_code == 403
    assert token not in caplog.text
    assert not any(token in file.read_text() for file in (tmp_path / "jobs").rglob("*.json"))

    client.revoke_token(job.id, held.id)
    eventually(lambda: [one.state for one in client.tokens(job.id)] == ["revoked"], 60)
    refused = httpx.post(root, json={"run": job.id}, headers=bearer(token), timeout=60)
    assert refused.status_code == 401


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}
