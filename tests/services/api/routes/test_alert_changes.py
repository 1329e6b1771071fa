"""What a recorder learns of the alerts of its run, and a mirror of a real recording."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sdk.event_files import accumulated
from tests.services.api.conftest import Api
from tests.services.recording import NAN, PROJECT, Recording, nan_from
from watchstep import CaptureConfig, Hook
from watchstep.capture.mirror import service_alerts
from watchstep.store.store import Store
from watchstep_services.core.settings import load_settings
from watchstep_services.serve.embedded import EmbeddedService

PATH = f"/v1/projects/{PROJECT}/runs/run-1/alert-changes"


@pytest.fixture
def recording(folder_store: Store) -> Recording:
    return Recording(folder_store).begin()


def changes(api: Api, query: str) -> tuple[list[tuple[str, str, int]], int]:
    """(name, phase, step) of each change, and the position after them."""
    answer = api.call("GET", f"{PATH}?{query}", role="recorder", project=PROJECT)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return [(alert["name"], alert["phase"], alert["step"]) for alert in found["alerts"]], found["after"]


def test_a_recorder_reads_each_change_of_its_attempt_once(api: Api, recording: Recording) -> None:
    run_id = api.driven.register()
    assert changes(api, "attempt=a1") == ([], 0)
    api.driven.announce(run_id, recording.write(0, 0, 19, nan_from(7)))
    api.driven.settle(run_id)
    alerts, after = changes(api, "attempt=a1")
    assert alerts == [("non_finite_values", "firing", 7)]
    assert changes(api, f"attempt=a1&after={after}") == ([], after)
    assert changes(api, "attempt=a2") == ([], after)
    # An alert that fires and resolves within one evaluation has two changes.
    api.driven.announce(run_id, recording.write(1, 20, 39, lambda step, _: NAN if step == 30 else 1.0))
    api.driven.settle(run_id)
    later, last = changes(api, f"attempt=a1&after={after}")
    assert later == [
        ("non_finite_values", "resolved", 20),
        ("non_finite_values", "firing", 30),
        ("non_finite_values", "resolved", 31),
    ]
    assert changes(api, "attempt=a1") == ([*alerts, *later], last)


def test_others_than_its_recorder_may_not_read_them(api: Api, recording: Recording) -> None:
    api.driven.register()
    refused = api.call("GET", f"{PATH}?attempt=a1", role="recorder", project="other")
    assert refused.status_code in {403, 404}
    assert api.call("GET", f"{PATH}?attempt=a1", role="viewer").status_code == 403
    assert api.call("GET", f"{PATH}?attempt=..", role="recorder").status_code == 422
    missing = PATH.replace("run-1", "run-2")
    assert api.call("GET", f"{missing}?attempt=a1", role="recorder").status_code == 404


def test_a_registration_has_the_address_of_the_page(api: Api) -> None:
    body = {"run": "a b"}
    assert api.call("POST", f"/v1/projects/{PROJECT}/runs", body).status_code == 422
    assert api.call("POST", f"/v1/projects/{PROJECT}/runs", {"run": "r"}).json()["page_url"] == ""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def texts(folder: Path, name: str) -> list[str]:
    if not folder.exists():
        return []
    events = accumulated(folder)
    tag = f"watchstep/{name}/text_summary"
    if tag not in events.Tags()["tensors"]:
        return []
    return [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]


def test_a_mirror_has_the_services_alerts_and_a_link_to_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_alerts, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(service_alerts, "_INTERVAL_SECONDS", 0.1)
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - rule: non_finite_values\n    severity: critical\n")
    settings = load_settings(
        home=tmp_path / "home",
        store=str(tmp_path / "store"),
        port=free_port(),
        public_url="https://watchstep.test/",
    )
    config = CaptureConfig(overhead_budget=None, system=None)
    live = tmp_path / "live" / "watchstep"
    with EmbeddedService(settings) as service:
        monkeypatch.setenv("WATCHSTEP_SERVICE", f"http://127.0.0.1:{settings.port}")
        monkeypatch.setenv("WATCHSTEP_TOKEN", service.recorder_token)
        mirror = f"tensorboard:{live.parent}"
        with Hook(tmp_path / "store", run="r", rules=rules, config=config, mirror=mirror) as hook:
            for step in range(10):
                hook.log(loss=float("nan") if step == 7 else 1.0)
                hook.step()
            wait_for(lambda: any("non_finite_values" in text for text in texts(live, "alerts")))
            wait_for(lambda: any("watchstep.test" in text for text in texts(live, "run")))
    assert hook.health["faults"] == {}
    alert = texts(live, "alerts")[0]
    assert alert.startswith("critical non_finite_values: firing at step 7: ")
    assert "https://watchstep.test/projects/default/runs/r/alerts/" in alert
    assert "https://watchstep.test/projects/default/runs/r" in texts(live, "run")[-1]
