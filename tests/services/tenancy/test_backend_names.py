"""A backend is found by its kind, whatever an admin called it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.services.driving import Driven
from tests.services.jobs import STUBBORN, eventually, launch
from tests.services.recording import PROJECT, Recording, nan_from
from watchstep.store.store import Store
from watchstep_launch.backends.local.backend import Local
from watchstep_services.runs.lifecycle import advance_run
from watchstep_services.runs.registration import bind_job
from watchstep_services.tenancy import allow_backends, register_backend


@pytest.mark.parametrize("name", ["box", "gpu-1"])
def test_a_job_on_a_backend_of_any_name_is_seen_and_stopped(
    driven: Driven, folder_store: Store, tmp_path: Path, name: str
) -> None:
    driven = driven.with_settings(grace_seconds=0.0)
    backend = driven.service.backends["local"]
    assert isinstance(backend, Local)
    recording = Recording(folder_store).begin(on_stop="ignore")
    run_id = driven.register()
    with driven.service.database.write() as session:
        register_backend(session, name, "local", {})
        allow_backends(session, PROJECT, [name])
    job = launch(backend, tmp_path, STUBBORN)
    bind_job(driven.service, run_id, recording.attempt, replace(job, backend=name), "operator")
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    driven.settle(run_id)
    assert advance_run(driven.service, run_id) == "running"
    (action,) = driven.actions(run_id)
    assert driven.finish(action.id).state == "done"
    eventually(lambda: backend.status(job).state == "ended")
    assert [
        event["data"]["how"] for event in driven.events(run_id) if event["type"] == "io.watchstep.stop.done"
    ] == ["killed"]
    assert advance_run(driven.service, run_id) == "stopped"
