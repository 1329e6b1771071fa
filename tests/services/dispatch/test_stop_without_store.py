"""A store that refuses or does not answer delays no stop of the job: the failed request to the workers counts as a failed try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select

from tests.sdk.store.faulty_s3 import Fault, FaultyS3
from tests.services.driving import Driven
from tests.services.jobs import STUBBORN, WILLING, launch
from tests.services.recording import Recording, nan_from
from watchstep.format.control import ControlDocument
from watchstep.store import cloud
from watchstep.store.cloud import S3Access
from watchstep.store.store import Store
from watchstep_launch.backend import JobHandle
from watchstep_launch.backends.local.backend import Local
from watchstep_services.core.settings import load_settings
from watchstep_services.core.store_location import StoreRegistration
from watchstep_services.db.models import ActionRow, AuditEntry, RunRow
from watchstep_services.dispatch.dispatch import dispatch
from watchstep_services.runs.control import MIRROR
from watchstep_services.runs.registration import register
from watchstep_services.runs.stops import StopStage, request_stop
from watchstep_services.serve.embedded import EmbeddedService
from watchstep_services.service.context import Service
from watchstep_services.tenancy import create_project, register_store

FAR = "far"
BUCKET = "s3://bucket/runs"
REGION = "us-east-1"
WAIT = 60.0


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """A bucket; the client's timeouts are so long that a stop that waited for them would not return."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(cloud, "_REQUEST_TIMEOUT", timedelta(seconds=600))
    with FaultyS3().serving() as server:
        yield server


@dataclass(frozen=True)
class Stopping:
    """A run on a bucket that must be stopped."""

    driven: Driven
    s3: FaultyS3
    recording: Recording
    run_id: int
    action_id: int

    def try_once(self) -> tuple[str, str, int]:
        """Outcome, detail and stage of the next try, which is due now."""
        return self.try_action(self.action_id)

    def try_action(self, action_id: int) -> tuple[str, str, int]:
        self.driven.change(ActionRow, action_id, next_ns=0)
        tried = dispatch(self.driven.service, action_id)
        assert tried is not None
        return tried.result, tried.detail, tried.stage

    def requested_document(self) -> ControlDocument:
        """The document in the database, which is the answer to announcements."""
        return ControlDocument.from_data(self.driven.run(self.run_id).control)

    def on_store(self) -> ControlDocument | None:
        key = f"/bucket/runs/{FAR}/run-1/control.json"
        data = self.s3.objects.get(key)
        return None if data is None else ControlDocument.decode(data)

    def mirrors(self) -> list[ActionRow]:
        return self.driven.actions(self.run_id, MIRROR)

    def audited(self) -> list[tuple[str, str]]:
        """Kind of each line of the audit log, and the outcome of the tries."""
        with self.driven.service.database.read() as session:
            rows = session.execute(select(AuditEntry).order_by(AuditEntry.id)).scalars()
            return [(row.kind, row.data.get("outcome", "")) for row in rows]

    def how(self) -> str:
        (done,) = self.driven.events(self.run_id, "stop.done")
        return str(done["data"]["how"])


def open_bucket(s3: FaultyS3) -> Store:
    return Store.open(BUCKET, access=S3Access(region=REGION, endpoint=s3.endpoint))


def with_project(service: Service, s3: FaultyS3) -> None:
    with service.database.write() as session:
        placed = StoreRegistration(BUCKET, region=REGION, endpoint=s3.endpoint)
        create_project(session, FAR, register_store(session, "bucket", placed))


def stopping(
    driven: Driven, s3: FaultyS3, job: JobHandle | None, *, on_stop: str = "raise", world_size: int = 1
) -> Stopping:
    """The owner's rule has requested a stop, and nothing has been done yet."""
    with_project(driven.service, s3)
    recording = Recording(open_bucket(s3), project=FAR)
    recording.begin(on_stop=on_stop, world_size=world_size)  # type: ignore[arg-type]
    run_id = register(driven.service, FAR, "run-1", (), "operator")
    if job is not None:
        driven.bind(run_id, job)
    driven.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
    (action,) = driven.actions(run_id)
    return Stopping(driven, s3, recording, run_id, action.id)


def local(driven: Driven) -> Local:
    backend = driven.service.backends["local"]
    assert isinstance(backend, Local)
    return backend


@pytest.mark.ci
@pytest.mark.parametrize("fault", ["denied", "stall"])
def test_a_job_is_terminated_after_its_grace_time_and_the_tombstone_follows(
    driven: Driven, s3: FaultyS3, tmp_path: Path, fault: Fault
) -> None:
    wait = WAIT if fault == "denied" else 0.1
    driven = driven.with_settings(grace_seconds=0.2, store_wait_seconds=wait)
    backend = local(driven)
    job, other = launch(backend, tmp_path, WILLING), launch(backend, tmp_path, WILLING, "other")
    stop = stopping(driven, s3, job)
    s3.fault = fault

    outcome, detail, stage = stop.try_once()
    assert (outcome, stage) == ("error", StopStage.REQUESTED)
    assert detail.startswith("store s3://bucket/runs: ")
    assert "receive the request only in answers to their announcements" in detail
    assert stop.requested_document().stop is not None
    assert stop.requested_document().tombstone
    assert backend.status(job).state == "running"
    action = driven.finish(stop.action_id)

    assert (action.state, stop.how()) == ("done", "terminated")
    assert backend.status(job).state == "ended"
    assert backend.status(other).state == "running", "the job that was bound, and no other"
    backend.kill(other)
    assert [line[0] for line in stop.audited()].count("requested") == 1
    assert ("tried", "error") in stop.audited()

    (mirror,) = stop.mirrors()
    assert mirror.state == "pending"
    assert stop.on_store() is None
    s3.fault = "none"
    s3.released.set()
    driven.service.bulkhead.close()
    assert driven.with_settings(store_wait_seconds=WAIT).finish(mirror.id).state == "done"
    assert stop.on_store() == stop.requested_document()


def test_a_job_that_ignores_sigterm_is_killed_after_another_grace_time(
    driven_sqlite: Driven, s3: FaultyS3, tmp_path: Path
) -> None:
    driven = driven_sqlite.with_settings(grace_seconds=0.1)
    job = launch(local(driven), tmp_path, STUBBORN)
    stop = stopping(driven, s3, job)
    s3.fault = "denied"
    assert driven.finish(stop.action_id).state == "done"
    assert stop.how() == "killed"
    signals = [
        signal
        for _, detail in driven.tries(stop.action_id)
        for signal in ("SIGTERM", "SIGKILL")
        if signal in detail
    ]
    # The try that kills names SIGKILL only if the process has not ended before it is polled again.
    assert signals in (["SIGTERM"], ["SIGTERM", "SIGKILL"])


def test_a_program_that_does_not_listen_is_terminated_at_the_first_try(
    driven_sqlite: Driven, s3: FaultyS3, tmp_path: Path
) -> None:
    driven = driven_sqlite.with_settings(grace_seconds=3600.0)
    job = launch(local(driven), tmp_path, WILLING)
    stop = stopping(driven, s3, job, on_stop="ignore")
    s3.fault = "denied"
    outcome, _, stage = stop.try_once()
    assert outcome == "done" or (outcome, stage) == ("advanced", StopStage.TERMINATED)
    assert driven.finish(stop.action_id).state == "done"
    assert stop.requested_document().tombstone
    assert len(stop.mirrors()) == 1


@pytest.mark.ci
def test_without_a_job_it_is_tried_until_the_store_answers(driven_sqlite: Driven, s3: FaultyS3) -> None:
    driven = driven_sqlite.with_settings(max_tries=2)
    stop = stopping(driven, s3, None)
    s3.fault = "denied"
    for _ in range(5):
        assert stop.try_once()[::2] == ("error", StopStage.PENDING)
    s3.fault = "none"
    assert stop.try_once() == ("advanced", "asked all workers to stop at step 8", StopStage.REQUESTED)
    assert stop.on_store() == stop.requested_document()


def test_workers_that_are_reached_within_the_grace_time_stop_by_themselves(
    driven_sqlite: Driven, s3: FaultyS3, tmp_path: Path
) -> None:
    job = launch(local(driven_sqlite), tmp_path, WILLING)
    stop = stopping(driven_sqlite, s3, job)
    s3.fault = "denied"
    assert stop.try_once()[::2] == ("error", StopStage.REQUESTED)
    s3.fault = "none"
    (mirror,) = stop.mirrors()
    assert driven_sqlite.finish(mirror.id).state == "done"
    document = stop.on_store()
    assert document is not None
    assert document.stop is not None
    assert document.stop.agreed
    stop.recording.end("stopped", 8)
    local(driven_sqlite).stop(job)
    assert driven_sqlite.finish(stop.action_id).state == "done"
    assert stop.how() == "cooperative"


@pytest.mark.parametrize("grace", [0.1, 3600.0])
def test_a_store_that_refuses_after_a_stop_request_delays_nothing(
    driven_sqlite: Driven, s3: FaultyS3, tmp_path: Path, grace: float
) -> None:
    driven = driven_sqlite.with_settings(grace_seconds=grace)
    job = launch(local(driven), tmp_path, WILLING)
    stop = stopping(driven, s3, job, world_size=2)
    assert stop.try_once()[::2] == ("advanced", StopStage.REQUESTED)
    s3.fault = "denied"
    outcome, detail, stage = stop.try_once()
    if grace > 1:
        assert (outcome, stage) == ("waiting", StopStage.REQUESTED)
        local(driven).kill(job)
        return
    while outcome == "waiting":
        outcome, detail, stage = stop.try_once()
    assert outcome == "done" or (outcome, stage) == ("advanced", StopStage.TERMINATED)
    assert "cannot list 'stops/a1/23/'; job local:" in detail, "why no agreement was waited for"
    assert driven.finish(stop.action_id).state == "done"
    assert stop.how() == "terminated"


def test_workers_of_unknown_number_get_no_agreed_step(
    driven_sqlite: Driven, s3: FaultyS3, tmp_path: Path
) -> None:
    driven = driven_sqlite.with_settings(grace_seconds=3600.0)
    with_project(driven.service, s3)
    recording = Recording(open_bucket(s3), project=FAR).begin(world_size=2)
    run_id = register(driven.service, FAR, "run-1", (), "operator")
    job = launch(local(driven), tmp_path, WILLING)
    driven.bind(run_id, job)
    with driven.service.database.write() as session:
        action_id = request_stop(session, driven.service.base_url, run_id, "a1", ("", "enough"))
    assert action_id is not None
    stop = Stopping(driven, s3, recording, run_id, action_id)
    s3.fault = "denied"
    assert stop.try_once()[::2] == ("error", StopStage.REQUESTED), "it may listen: its grace time is its own"
    requested = stop.requested_document().stop
    assert requested is not None
    assert not requested.agreed
    s3.fault = "none"
    assert stop.try_once()[0] == "waiting", "two are waited for, now that they are registered"
    local(driven).kill(job)


def test_a_tombstone_is_not_given_up(driven: Driven, s3: FaultyS3, tmp_path: Path) -> None:
    driven = driven.with_settings(max_tries=2, grace_seconds=0.0)
    stop = stopping(driven, s3, launch(local(driven), tmp_path, WILLING))
    s3.fault = "denied"
    assert driven.finish(stop.action_id).state == "done"
    (mirror,) = stop.mirrors()
    for _ in range(6):
        assert stop.try_action(mirror.id)[0] == "error"
    with driven.service.database.write() as session:
        row = session.get_one(RunRow, stop.run_id)
        row.control = ControlDocument.from_data(row.control).without_tombstone().as_data()
    assert driven.finish(mirror.id).state == "failed", "nothing need be there any more"


@pytest.mark.ci
def test_a_stop_that_people_request_reaches_a_job_whose_store_refuses(s3: FaultyS3, tmp_path: Path) -> None:
    """The whole service, its threads and its API."""
    settings = load_settings(
        home=tmp_path / "home",
        store=str(tmp_path / "store"),
        sweep_seconds=0.05,
        retry_seconds=0.05,
        grace_seconds=0.2,
    )
    backend = Local()
    job = launch(backend, tmp_path, WILLING)
    with EmbeddedService(settings) as embedded:
        service = embedded.service
        with_project(service, s3)
        Recording(open_bucket(s3), project=FAR).begin()
        run_id = register(service, FAR, "run-1", (), "operator")
        Driven(service).bind(run_id, job)
        s3.fault = "denied"
        answer = httpx.post(
            f"{embedded.url}/v1/projects/{FAR}/runs/run-1/stop",
            json={"reason": "enough"},
            headers={"authorization": f"Bearer {embedded.operator_token}"},
        )
        assert answer.status_code == 202
        assert embedded.wait_until(lambda: backend.status(job).is_over, WAIT)
        s3.fault = "none"
        path = f"/bucket/runs/{FAR}/run-1/control.json"
        assert embedded.wait_until(lambda: path in s3.objects, WAIT)
    assert ControlDocument.decode(s3.objects[path]).tombstone == "enough"
