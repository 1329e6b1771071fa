"""The whole way with the embedded service: record, judge, stop, read back; on a folder. Providers' servers are in tests/stores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from tests.end_to_end.programs import DEAF, FASTER_RANKS, FAULTY, FAULTY_IN_NUMPY, SEVERAL_RANKS
from watchstep import open_run
from watchstep.reading.run_documents import find_runs
from watchstep.store.store import Store
from watchstep_services.core.settings import Settings
from watchstep_services.serve.embedded import EmbeddedService
from watchstep_services.serve.launching import LaunchedProgram, launch_local

pytestmark = pytest.mark.ci

Launch = Callable[..., "Launched"]


class Launched:
    """A program that the service watches."""

    def __init__(self, service: EmbeddedService, run: str, log: Path) -> None:
        self._service = service
        # A client takes 50 ms of processor time to make.
        self._client = httpx.Client(headers={"Authorization": f"Bearer {service.operator_token}"}, timeout=30)
        self._run = run
        self._place = f"/v1/projects/test/runs/{run}"
        self.log = log
        self.url = f"{service.service.settings.store}/test/{run}"

    def close(self) -> None:
        self._client.close()

    def get(self, what: str = "") -> dict[str, Any]:
        answer = self._client.get(self._service.url + self._place + what)
        answer.raise_for_status()
        data: dict[str, Any] = answer.json()
        return data

    def wait_for(self, state: str) -> None:
        def settled() -> bool:
            return self.get()["state"] == state and all(
                action["state"] != "pending" for action in self.get("/actions")["actions"]
            )

        assert self._service.wait_until(settled, 120), (self.get(), self.get("/actions"))

    def listed(self) -> str:
        """The state that the store alone tells."""
        runs = find_runs(Store.open(self._service.service.settings.store))
        (entry,) = [entry for entry in runs if entry.run == self._run]
        return entry.state

    def fired(self) -> list[dict[str, Any]]:
        return [alert for alert in self.get("/alerts")["alerts"] if alert["fired_ns"] is not None]


@pytest.fixture(scope="module")
def grace_seconds() -> float:
    """Long enough for a process to stop itself on a busy machine."""
    return 60.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, grace_seconds: float) -> Iterator[EmbeddedService]:
    """A service for the runs of all tests, because it takes as long to start as a run."""
    folder = tmp_path_factory.mktemp("service")
    settings = Settings(
        store=str(folder / "runs"),
        home=folder / "home",
        sweep_seconds=0.2,
        listing_seconds=0.2,
        grace_seconds=grace_seconds,
    )
    with EmbeddedService(settings) as running:
        yield running


@pytest.fixture
def launch(service: EmbeddedService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    monkeypatch.setenv("WATCHSTEP_OVERHEAD_BUDGET", "none")

    def started(body: str, on_stop: Literal["ignore", "raise"] = "raise") -> Launched:
        program, log = tmp_path / "train.py", tmp_path / "log"
        program.write_text(body)
        run = tmp_path.name
        launch_local(
            service.service,
            LaunchedProgram("test", run, (sys.executable, str(program)), tmp_path, log, on_stop),
            service.recorder_token,
        )
        runs.append(Launched(service, run, log))
        return runs[-1]

    runs: list[Launched] = []
    yield started
    for launched in runs:
        launched.close()


def test_a_faulty_run_is_stopped_where_it_can_stop_itself(launch: Launch) -> None:
    launched = launch(FAULTY)
    launched.wait_for("stopped")
    (alert,) = (one for one in launched.fired() if one["rule"] == "nan_or_inf")
    finding = alert["finding"]
    assert (alert["rule"], finding["step"]) == ("nan_or_inf", 50)
    assert finding["tensor"].endswith(":gradient")
    assert launched.listed() == "stopped"
    assert launched.get()["job"]["exit_code"] == 86
    assert "Traceback" not in launched.log.read_text()
    run = open_run(launched.url)
    (end,) = run.ends()
    assert (end.state, end.last_step >= 50) == ("stopped", True)
    held = run.tensor(finding["tensor"]).statistics()
    row = held["step"].to_pylist().index(finding["step"])
    assert held["nan"].to_pylist()[row] == finding["value"]
    (stop,) = launched.get("/actions")["actions"]
    assert (stop["kind"], stop["state"]) == ("stop", "done")


@pytest.mark.release
@pytest.mark.parametrize("grace_seconds", [0.5], scope="module")
def test_a_run_that_did_not_opt_in_and_ignores_sigterm_is_killed(launch: Launch) -> None:
    launched = launch(DEAF, "ignore")
    launched.wait_for("stopped")
    assert launched.get()["job"]["exit_code"] == -9
    (stop,) = launched.get("/actions")["actions"]
    assert len(stop["tries"]) > 1


def test_a_run_that_sigterm_ends_is_told_as_stopped(launch: Launch) -> None:
    launched = launch(FAULTY_IN_NUMPY, "ignore")
    launched.wait_for("stopped")
    assert [end.state for end in open_run(launched.url).ends()] == ["failed"]  # it cannot know who ended it
    assert launched.listed() == "stopped"


@pytest.mark.release
def test_ranks_that_hand_over_to_one_are_judged_and_stopped_together(launch: Launch) -> None:
    launched = launch(SEVERAL_RANKS)
    launched.wait_for("stopped")
    (alert,) = (one for one in launched.fired() if one["rule"] == "nan_or_inf")
    finding = alert["finding"]
    assert (alert["rule"], finding["step"], finding["worker"]) == ("nan_or_inf", 50, 1)
    assert launched.listed() == "stopped"
    assert launched.get()["job"]["exit_code"] == 86
    first, second = open_run(launched.url).ends()
    assert (first.state, second.state) == ("stopped", "stopped")
    # One whose node's writer does not answer in two seconds at its end writes its last words itself.
    assert "node" in {end.writer.partition("-")[0] for end in (first, second)}


@pytest.mark.release
def test_ranks_in_collectives_that_become_faster_stop_after_the_same_step(launch: Launch) -> None:
    launched = launch(FASTER_RANKS)
    launched.wait_for("stopped")
    (action,) = [one for one in launched.get("/actions")["actions"] if one["kind"] == "stop"]
    assert "(cooperative)" in action["outcome"]
    first, second = open_run(launched.url).ends()
    assert (first.state, second.state) == ("stopped", "stopped")
    assert first.last_step == second.last_step
    assert launched.get()["job"]["exit_code"] == 86
