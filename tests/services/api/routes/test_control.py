"""Requests to the workers of a run, and documents of a project: capture and retention."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import update

from tests.services.api.conftest import Api
from tests.services.recording import Recording
from watchstep.errors import NotFoundError
from watchstep.format.control import ControlDocument, SnapshotRequest
from watchstep.store.store import Store
from watchstep_services.db.models import RunRow
from watchstep_services.dispatch.dispatch import dispatch, due_actions
from watchstep_services.retention import upkeep
from watchstep_services.stores.confined_folder import ConfinedFolder

RUN = "/v1/projects/vision/runs/run-1"
PROJECT = "/v1/projects/vision"
CAPTURE = f"{PROJECT}/capture"
DOCUMENT: dict[str, Any] = {
    "overhead_budget": 0.05,
    "collections": {"activations": None, "head": {"include": "head[.]", "tensors": {"every": 10}}},
}
NONE = {"document": None, "changed_by": "", "changed_ns": 0}


def on_store(store: Store) -> ControlDocument:
    return ControlDocument.decode(store.get("control.json"))


def act(api: Api) -> list[str]:
    """Do what is due; what came of it."""
    service = api.driven.service
    tried = [dispatch(service, action) for action in due_actions(service)]
    return [attempt.result for attempt in tried if attempt is not None]


@pytest.fixture
def recording(api: Api) -> Recording:
    begun, _ = api.driven.record(last=9)
    return begun


def test_a_snapshot_request_is_in_the_document_and_on_the_store(api: Api, recording: Recording) -> None:
    first = api.call("POST", f"{RUN}/control/snapshots", {})
    assert first.status_code == 202
    control = first.json()
    assert (control["attempt"], control["step"]) == ("a1", 10)
    second = api.call("POST", f"{RUN}/control/snapshots", {"step": 400}).json()
    assert act(api) == ["done", "done"]
    assert on_store(recording.store).snapshots == (
        SnapshotRequest(control["id"], 10, "a1"),
        SnapshotRequest(second["id"], 400, "a1"),
    )


def test_a_snapshot_of_an_attempt_that_has_ended_is_refused(api: Api, recording: Recording) -> None:
    with api.driven.service.database.write() as session:
        session.execute(update(RunRow).values(state="completed"))
    refused = api.call("POST", f"{RUN}/control/snapshots", {})
    assert refused.status_code == 409
    assert (
        "attempt a1 has ended (completed), so that no worker can record a snapshot"
        in refused.json()["detail"]
    )
    assert act(api) == []


def test_a_stop_of_an_attempt_that_has_ended_is_refused(api: Api, recording: Recording) -> None:
    with api.driven.service.database.write() as session:
        session.execute(update(RunRow).values(state="completed"))
    refused = api.call("POST", f"{RUN}/stop", {"reason": "late"})
    assert refused.status_code == 409
    assert "attempt a1 has ended (completed), so that there is nothing to stop" in refused.json()["detail"]
    assert act(api) == []


def test_a_cadence_is_set_and_reset(api: Api, recording: Recording) -> None:
    control = api.call("PUT", f"{RUN}/control/cadence", {"every": {"weights": 50}}).json()
    assert control["cadence"] == [["weights", 50]]
    assert api.call("PUT", f"{RUN}/control/cadence", {"every": {"weights": 50}}).json() == control
    assert act(api) == ["done"]
    assert on_store(recording.store).cadence == (("weights", 50),)
    assert api.call("PUT", f"{RUN}/control/cadence", {"every": {}}).json()["cadence"] == []
    assert api.status("PUT", f"{RUN}/control/cadence", {"every": {"weights": 0}}) == 422


@pytest.mark.ci
def test_a_stopped_run_restarts_only_if_allowed(api: Api, recording: Recording) -> None:
    assert api.status("POST", f"{RUN}/stop", {"reason": "no progress"}) == 202
    act(api)
    assert on_store(recording.store).tombstone == "no progress"
    let = {"reason": "learning rate lowered"}
    assert api.status("POST", f"{RUN}/control/restart", let, role="recorder") == 403
    control = api.call("POST", f"{RUN}/control/restart", let).json()
    assert (control["tombstone"], control["stop"]["attempt"]) == ("", "a1")
    act(api)
    stored = on_store(recording.store)
    assert stored.tombstone == ""
    assert stored.stop is not None  # the attempt that was stopped stays stopped
    assert api.call("POST", f"{RUN}/control/restart", let).json() == control
    events = [
        event
        for event in api.call("GET", f"{RUN}/events").json()["events"]
        if event["type"] == "io.watchstep.run.restart_allowed"
    ]
    assert [event["data"]["reason"] for event in events] == ["learning rate lowered"]
    assert events[0]["data"]["was_stopped"] == "no progress"


def test_only_one_attempt_may_start(api: Api, recording: Recording) -> None:
    api.call("POST", f"{RUN}/stop", {"reason": "no progress"})
    let = {"reason": "requeue 1 of 1", "attempt": "a2"}
    assert api.status("POST", f"{RUN}/control/restart", {**let, "attempt": "../a"}) == 422
    act(api)
    control = api.call("POST", f"{RUN}/control/restart", let).json()
    assert (control["tombstone"], control["admitted"]) == ("no progress", "a2")
    assert api.call("POST", f"{RUN}/control/restart", let).json() == control
    act(api)
    assert on_store(recording.store).admits("a2")
    lines = api.call("GET", "/v1/projects/vision/audit").json()["entries"]
    (line,) = [line for line in lines if line["kind"] == "restart_allowed"]
    assert (line["attempt"], line["who"], line["data"]["admitted"]) == ("a1", "operator", "a2")


def test_the_etag_is_the_version_of_the_document(api: Api, recording: Recording) -> None:
    answer = api.call("GET", f"{RUN}/control", role="viewer")
    assert (answer.headers["etag"], answer.json()["version"]) == ('"0"', 0)
    api.call("POST", f"{RUN}/control/snapshots", {"step": 3})
    assert api.call("GET", f"{RUN}/control").headers["etag"] == '"1"'
    assert api.status("GET", f"{RUN}x/control") == 404


def test_the_store_has_the_newest_document_independent_of_the_order_of_writes(
    api: Api, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.call("PUT", f"{RUN}/control/cadence", {"every": {"weights": 2}})
    [older] = due_actions(api.driven.service)
    put = ConfinedFolder.put

    def overtaken(store: ConfinedFolder, key: str, data: bytes) -> None:
        # While the older document is on its way, a newer one is written and arrives.
        monkeypatch.setattr(ConfinedFolder, "put", put)
        api.call("PUT", f"{RUN}/control/cadence", {"every": {"weights": 3}})
        for action in due_actions(api.driven.service):
            dispatch(api.driven.service, action)
        assert on_store(recording.store).version == 2
        put(store, key, data)

    monkeypatch.setattr(ConfinedFolder, "put", overtaken)
    done = dispatch(api.driven.service, older)
    assert done is not None
    assert done.detail == "version 2 is on the store"
    assert on_store(recording.store).cadence == (("weights", 3),)


def test_a_failed_write_to_the_store_is_repeated(
    api: Api, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: ConfinedFolder, key: str, data: bytes) -> None:
        raise NotFoundError(f"{key}: no such bucket", "make it")

    with monkeypatch.context() as patched:
        patched.setattr(ConfinedFolder, "put", refuse)
        api.call("PUT", f"{RUN}/control/cadence", {"every": {"weights": 2}})
        assert act(api) == ["error"]
    with api.driven.service.database.read() as session:
        assert session.query(RunRow).one().control["cadence"] == [["weights", 2]]
    [mirrored] = api.driven.actions(1)
    assert api.driven.finish(mirrored.id).state == "done"
    assert on_store(recording.store).cadence == (("weights", 2),)


def test_a_repeated_request_has_one_effect(api: Api, recording: Recording) -> None:
    headers = {
        "authorization": f"Bearer {api.token('operator')}",
        "idempotency-key": "twice-by-a-proxy",
    }
    first, second = (api.call("POST", f"{RUN}/control/snapshots", {}, headers=headers) for _ in range(2))
    assert first.json()["id"] == second.json()["id"]
    assert second.headers["idempotency-replayed"] == "true"
    assert len(api.call("GET", f"{RUN}/control").json()["snapshots"]) == 1


def test_an_operator_stores_a_document_that_launches_receive(api: Api) -> None:
    assert api.call("GET", CAPTURE, role="viewer").json() == NONE
    stored = api.call("PUT", CAPTURE, DOCUMENT)
    assert stored.status_code == 200
    answer = stored.json()
    assert answer["document"] == DOCUMENT
    assert answer["changed_by"].startswith("operator, token ")
    assert answer["changed_ns"] > 0
    assert api.call("GET", CAPTURE, role="viewer").json() == answer
    for role in ("recorder", "operator"):
        registered = api.call("POST", f"{PROJECT}/runs", {"run": f"by-{role}"}, role=role)
        assert registered.json()["capture"] == DOCUMENT
    other = api.call("POST", "/v1/projects/other/runs", {"run": "r"})
    assert other.json()["capture"] is None
    assert api.call("DELETE", CAPTURE).json() == NONE
    assert api.call("POST", f"{PROJECT}/runs", {"run": "later"}).json()["capture"] is None
    assert api.call("DELETE", CAPTURE).json() == NONE


@pytest.mark.parametrize("role", ["viewer", "recorder"])
def test_only_operators_write_it(api: Api, role: Any) -> None:
    assert api.status("PUT", CAPTURE, DOCUMENT, role=role) == 403
    assert api.status("DELETE", CAPTURE, role=role) == 403
    assert api.call("GET", CAPTURE).json() == NONE


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"colections": {}}, "capture document: colections: unknown key"),
        ({"collections": {"a": {"include": "("}}}, "collections.a.include"),
        ({"collections": {"a": {"include": "(" * 4000}}}, "collections.a.include"),
        ({"overhead_budget": 5}, "overhead_budget: 5 is not"),
        (
            {"collections": {f"c{n}": {"include": "x" * 90} for n in range(200)}},
            "more than the limit of 16384",
        ),
    ],
)
def test_an_invalid_document_is_refused(api: Api, body: Any, message: str) -> None:
    refused = api.call("PUT", CAPTURE, body)
    assert refused.status_code == 422
    assert message in refused.text
    assert api.call("GET", CAPTURE).json() == NONE


@pytest.mark.parametrize("body", [[], "text", 7, None])
def test_a_document_is_a_mapping(api: Api, body: Any) -> None:
    assert api.status("PUT", CAPTURE, body) == 422


def test_concurrent_changes_are_not_overwritten(api: Api) -> None:
    api.call("PUT", CAPTURE, DOCUMENT)
    etag = api.call("GET", CAPTURE).headers["etag"]
    api.call("PUT", CAPTURE, {"gate": False})
    for method in ("PUT", "DELETE"):
        assert api.status(method, CAPTURE, {}, headers={"if-match": etag}) == 412
    assert api.call("GET", CAPTURE).json()["document"] == {"gate": False}


def test_an_unknown_project_is_created_and_an_invalid_name_is_refused(api: Api) -> None:
    assert api.status("PUT", "/v1/projects/new/capture", DOCUMENT) == 200
    assert api.status("GET", "/v1/projects/new", role="viewer") == 200
    assert api.status("PUT", "/v1/projects/..x%20y/capture", DOCUMENT) in {404, 422}


def test_an_archived_project_keeps_its_document(api: Api) -> None:
    api.call("PUT", CAPTURE, DOCUMENT)
    api.call("PATCH", PROJECT, {"archived": True}, role="admin")
    assert api.status("PUT", CAPTURE, {}) == 409
    assert api.call("GET", CAPTURE).json()["document"] == DOCUMENT


@pytest.mark.parametrize(
    "document",
    [
        {"\ud800": 1},
        {"collections": {"e": {"include": "\ud800", "tensors": {"every": 1}}}},
        {"collections": {"e": {"modules": ["\udfff"], "tensors": {"every": 1}}}},
    ],
)
def test_an_unpaired_surrogate_is_refused(api: Api, document: dict[str, Any]) -> None:
    refused = api.call("PUT", CAPTURE, document)
    assert (refused.status_code, "unpaired surrogate" in refused.json()["detail"]) == (422, True)
    assert api.call("GET", CAPTURE).json() == NONE
    emoji = {"collections": {"e": {"modules": ["\U0001f600"], "tensors": {"every": 1}}}}
    assert api.call("PUT", CAPTURE, emoji).json()["document"] == emoji


def end(api: Api) -> None:
    with api.driven.service.database.write() as session:
        run = session.query(RunRow).one()
        run.state, run.ended_ns = "completed", 1


@pytest.mark.ci
def test_only_an_admin_sets_the_policy(api: Api, recording: Recording) -> None:
    nothing = {"compact_after_s": None, "originals_s": None, "keep_tensors_s": None, "keep_runs_s": None}
    assert api.call("GET", f"{PROJECT}/retention", role="viewer").json() == nothing
    month = {"keep_runs_s": 30 * 86400}
    assert api.status("PUT", f"{PROJECT}/retention", month) == 403
    for body in (month, {"keep_runs_s": 5}):
        answer = api.call("PUT", f"{PROJECT}/retention", body, role="admin")
        assert answer.json() == {**nothing, **body}
    assert api.call("GET", f"{PROJECT}/retention").json()["keep_runs_s"] == 5
    assert api.status("PUT", f"{PROJECT}/retention", {"keep_runs_s": -1}, role="admin") == 422
    assert api.status("GET", "/v1/projects/other/retention") == 404


@pytest.mark.ci
def test_a_run_that_has_ended_is_deleted(api: Api, recording: Recording) -> None:
    assert api.status("DELETE", RUN, role="admin") == 409
    end(api)
    assert api.status("DELETE", RUN) == 403
    assert api.call("DELETE", RUN, role="admin").json()["deleting"]
    assert api.status("PUT", f"{RUN}/hold", {"reason": "too late"}) == 409
    assert upkeep(api.driven.service) == 1
    assert not list(recording.store.entries())
    assert api.status("GET", RUN) == 404


def test_a_run_on_hold_is_not_deleted(api: Api, recording: Recording) -> None:
    end(api)
    hold = api.call("PUT", f"{RUN}/hold", {"reason": "for the paper"}).json()
    assert (hold["on_hold"], hold["hold_reason"]) == (True, "for the paper")
    assert api.status("DELETE", RUN, role="admin") == 409
    assert api.call("GET", f"{RUN}/retention", role="viewer").json() == hold
    api.call("DELETE", f"{RUN}/hold")
    assert api.status("DELETE", RUN, role="admin") == 202
