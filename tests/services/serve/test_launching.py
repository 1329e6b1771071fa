"""A program that the service launches records what its project's capture document names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.services.jobs import eventually
from watchstep.platform.transport import ServiceAddress, Transport
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService
from watchstep_services.serve.launching import LaunchedProgram, launch_local

PROGRAM = "import os; print(os.environ.get('WATCHSTEP_CAPTURE', 'none'), flush=True)"


def output(service: EmbeddedService, folder: Path, run: str) -> str:
    log = folder / f"{run}.log"
    launch_local(
        service.service,
        LaunchedProgram("vision", run, (sys.executable, "-c", PROGRAM), folder, log),
        service.recorder_token,
    )
    eventually(lambda: log.exists() and log.read_text().endswith("\n"))
    return log.read_text().strip()


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
