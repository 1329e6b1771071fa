"""A training that goes on in a project that is archived meanwhile."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import httpx
import pytest

from watchstep import Hook, open_run
from watchstep.capture.config import Bounds, CaptureConfig
from watchstep_services.auth import create_token
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

CONFIG = CaptureConfig(
    collections={"losses": CaptureConfig().chosen["losses"]}, system=None, bounds=Bounds(close_seconds=60)
)


def test_the_recorder_takes_the_refusal_for_a_fault_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedService(load_settings(home=tmp_path / "home", store=str(tmp_path / "store"))) as service:
        headers = {"authorization": f"Bearer {create_token(service.database, 'admin')}"}
        monkeypatch.setenv("WATCHSTEP_SERVICE", service.url)
        monkeypatch.setenv("WATCHSTEP_TOKEN", service.recorder_token)

        def change(body: dict[str, object]) -> None:
            answer = httpx.patch(f"{service.url}/v1/projects/p", json=body, headers=headers, timeout=60)
            assert answer.is_success, answer.text

        run = {"run": "r"}
        made = httpx.post(f"{service.url}/v1/projects/p/runs", json=run, headers=headers, timeout=60)
        assert made.is_success, made.text
        change({"archived": True})
        with (
            caplog.at_level(logging.WARNING),
            Hook(tmp_path / "store", project="p", run="r", config=CONFIG) as hook,
        ):
            for loss in (1.0, 0.5):
                hook.log(loss=loss)
                hook.step()
        faults = hook.health["faults"]
        assert list(faults) == ["service"]
        assert "project 'p': archived" in faults["service"]
        assert sum("watchstep: service:" in line for line in caplog.messages) == 1
    assert open_run(tmp_path / "store" / "p" / "r").steps() == [0, 1]
    assert json.loads((tmp_path / "store" / "p" / "r" / "run.json").read_bytes())["run"] == "r"
