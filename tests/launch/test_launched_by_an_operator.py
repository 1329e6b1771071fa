"""A real launch by an operator's token, against a service of production's kind that demands tokens and keeps to the run's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.services.jobs import eventually
from watchstep.client import Client
from watchstep.stopping import EXIT_STOPPED
from watchstep_launch import Estimator, JobStatus, Local
from watchstep_rules import non_finite_values
from watchstep_services.auth import create_token, id_of
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

pytestmark = pytest.mark.ci

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
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedService]:
    settings = load_settings(home=tmp_path / "home", store=str(tmp_path / "store"))
    monkeypatch.setenv("WATCHSTEP_JOBS", str(tmp_path / "jobs"))
    with EmbeddedService(settings) as running:
        monkeypatch.setenv("WATCHSTEP_SERVICE", running.url)
        yield running


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
