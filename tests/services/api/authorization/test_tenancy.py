"""What a token can and cannot change: stores, projects, backends, jobs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from tests.laws import examples
from tests.services.api.conftest import Api
from tests.services.driving import Driven
from tests.services.jobs import recorded_process
from tests.services.recording import Recording, nan_from
from watchstep.errors import StoreError
from watchstep.store.store import Store
from watchstep_launch.backend import JobHandle
from watchstep_services.core.egress import AddressRefusedError
from watchstep_services.core.store_location import StorePlace, StoreRegistration
from watchstep_services.db.models import RunRow
from watchstep_services.dispatch.dispatch import dispatch
from watchstep_services.runs import attempts
from watchstep_services.scheduler.sweep import sweep
from watchstep_services.stores.opening import open_place


@pytest.fixture
def shared(api: Api, tmp_path: Path) -> Api:
    """A service whose admins make the projects: two tenants, each in a folder of its own."""
    for name in ("a", "b"):
        (tmp_path / "tenants" / name).mkdir(parents=True)
    shared_api = api.with_settings(local_stores=tmp_path / "tenants", new_projects="by_admins")
    for name in ("a", "b"):
        store = {"name": f"store-{name}", "url": str(tmp_path / "tenants" / name)}
        assert shared_api.status("POST", "/v1/stores", store, role="admin") == 201
        project = {"name": name, "store": f"store-{name}"}
        assert shared_api.status("POST", "/v1/projects", project, role="admin") == 201
    return shared_api


@pytest.fixture
def process() -> Iterator[JobHandle]:
    with recorded_process() as job:
        yield job


def job_body(process: JobHandle, **changes: Any) -> dict[str, Any]:
    identity = {**process.identity, **changes}
    return {"backend": "local", "id": str(identity["pid"]), "identity": identity}


def bind(api: Api, project: str, process: JobHandle, attempt: str = "a1", **changes: Any) -> Any:
    body = {"run": "r", "attempt": attempt, "job": job_body(process, **changes)}
    return api.call("POST", f"/v1/projects/{project}/runs", body, project=project)


def begun(api: Api, run: str) -> int:
    """A run whose attempt the service knows; its id."""
    with api.driven.service.database.write() as session:
        run_id: int = session.execute(select(RunRow.id).filter_by(run=run)).scalar_one()
        attempts.ensure(session, run_id, "a1")
    return run_id


def test_stores_are_registered_checked_changed_and_deleted(shared: Api, tmp_path: Path) -> None:
    listed = shared.call("GET", "/v1/stores", role="admin").json()["stores"]
    assert [store["name"] for store in listed] == ["store-a", "store-b"]
    tried = shared.call("POST", "/v1/stores/store-a/check", role="admin").json()
    assert (tried["ok"], [step["name"] for step in tried["steps"]]) == (
        True, ["list", "write", "read", "create_once", "delete"],
    )  # fmt: skip
    assert not any(path.is_file() for path in (tmp_path / "tenants" / "a").rglob("*"))
    missing = {"name": "c", "url": str(tmp_path / "tenants" / "c")}
    refused = shared.call("POST", "/v1/stores", missing, role="admin")
    assert (refused.status_code, "does not exist" in refused.json()["detail"]) == (422, True)
    assert shared.status("POST", "/v1/stores", {**missing, "check": False}, role="admin") == 201
    taken = shared.call("POST", "/v1/stores", {**missing, "check": False}, role="admin")
    assert taken.status_code == 409
    (tmp_path / "tenants" / "d").mkdir()
    changed = shared.call(
        "PUT", "/v1/stores/c", {"url": str(tmp_path / "tenants" / "d")}, role="admin"
    ).json()
    assert (changed["version"], Path(changed["url"]).name) == (2, "d")
    assert shared.status("DELETE", "/v1/stores/c", role="admin") == 204
    assert shared.status("DELETE", "/v1/stores/c", role="admin") == 404
    assert shared.status("DELETE", "/v1/stores/store-a", role="admin") == 409


@pytest.mark.parametrize(
    "url",
    [
        "", "/etc", "relative", "file:///etc", "file://host/x", "../x", "{below}/../../x", "{below}/%2e%2e/x", "ftp://x/y",
        "s3://", "s3://b/../c", "s3://b/%2e%2e/c", "s3://b/a//c", "s3://b/*", "s3://b/${{aws:username}}", "s3://b?x=1",
        "s3://key:secret@b/c", "s3://b/a#b", "http://169.254.169.254/", "s3://b\\c",
    ],
)  # fmt: skip
def test_an_invalid_location_is_not_registered(shared: Api, tmp_path: Path, url: str) -> None:
    body = {"name": "x", "url": url.format(below=tmp_path / "tenants"), "check": False}
    assert shared.status("POST", "/v1/stores", body, role="admin") == 422


@pytest.mark.parametrize(
    "more",
    [
        {"role_arn": "arn:aws:iam::123:role/x"}, {"role_arn": "arn:aws:iam::123456789012:user/x"}, {"external_id": "abc"},
        {"endpoint": "http://169.254.169.254/latest?x"}, {"endpoint": "file:///etc"}, {"region": "a b"},
    ],
)  # fmt: skip
def test_roles_and_endpoints_are_validated(shared: Api, more: dict[str, str]) -> None:
    body = {"name": "x", "url": "s3://bucket/runs", "check": False, **more}
    assert shared.status("POST", "/v1/stores", body, role="admin") == 422


def test_a_link_in_a_registered_store_is_not_followed(shared: Api, tmp_path: Path) -> None:
    (tmp_path / "tenants" / "out").symlink_to(tmp_path)
    body = {"name": "x", "url": str(tmp_path / "tenants" / "out"), "check": False}
    assert shared.status("POST", "/v1/stores", body, role="admin") == 422


NEVER = [
    "http://169.254.169.254", "http://169.254.1.1:9000/", "http://[fe80::1]:9000", "http://[::ffff:169.254.169.254]",
    "http://[64:ff9b::a9fe:a9fe]", "http://2852039166", "http://0xa9fea9fe", "http://0251.0376.0251.0376", "http://169.254.43518",
    "http://[fd00:ec2::254]", "http://100.100.100.200", "http://metadata.test", "http://0.0.0.0:9000",
]  # fmt: skip


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that resolves one name to a cloud's credentials endpoint."""
    real = socket.getaddrinfo

    def resolve(host: str, port: int, **more: Any) -> Any:
        return real("169.254.169.254" if host == "metadata.test" else host, port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("endpoint", NEVER)
def test_an_endpoint_that_is_link_local_is_never_used(shared: Api, endpoint: str) -> None:
    body = {"name": "x", "url": "s3://bucket/runs", "check": False}
    refused = shared.call("POST", "/v1/stores", {**body, "endpoint": endpoint}, role="admin")
    assert refused.status_code == 422
    good = {**body, "endpoint": "http://10.1.2.3:9000"}  # private, and an administrator's word
    assert shared.status("POST", "/v1/stores", good, role="admin") == 201
    refused = shared.call("PUT", "/v1/stores/x", {**body, "endpoint": endpoint}, role="admin")
    assert refused.status_code == 422
    assert shared.call("GET", "/v1/stores/x", role="admin").json()["endpoint"] == "http://10.1.2.3:9000"
    ray = {"name": "ray", "kind": "ray", "settings": {"address": endpoint}}
    assert shared.status("POST", "/v1/backends", ray, role="admin") == 422
    # One that was registered when its name led elsewhere, as when it is opened later.
    with pytest.raises(AddressRefusedError):
        open_place(StorePlace(0, 0, StoreRegistration("s3://bucket/runs", endpoint=endpoint), "", "a"))


def test_an_endpoint_that_has_no_address_is_checked_when_it_is_opened(shared: Api) -> None:
    body = {
        "name": "x", "url": "s3://bucket/runs", "check": False, "endpoint": "http://later.invalid:9000",
    }  # fmt: skip
    assert shared.status("POST", "/v1/stores", body, role="admin") == 201
    with pytest.raises(StoreError, match=r"later\.invalid.* cannot be resolved"):
        open_place(
            StorePlace(0, 0, StoreRegistration("s3://bucket/runs", endpoint=str(body["endpoint"])), "", "a")
        )


@pytest.mark.parametrize("role", ["viewer", "recorder", "operator"])
def test_only_admins_change_stores_and_backends(shared: Api, role: Any) -> None:
    for path in ("/v1/stores", "/v1/stores/store-a", "/v1/backends"):
        assert shared.status("GET", path, role=role) == 403
    assert shared.status("POST", "/v1/projects", {"name": "x", "store": "store-a"}, role=role) == 403


def test_an_admin_of_one_project_cannot_access_stores(shared: Api) -> None:
    own: dict[str, Any] = {"role": "admin", "project": "a"}
    assert shared.status("GET", "/v1/stores", **own) == 403
    assert shared.status("POST", "/v1/projects", {"name": "x", "store": "store-b"}, **own) == 403
    changes: tuple[dict[str, Any], ...] = (
        {"store": "store-b"}, {"prefix": "x"}, {"backends": []}, {"archived": True},
    )  # fmt: skip
    for change in changes:
        assert shared.status("PATCH", "/v1/projects/a", change, **own) == 403
    patched = shared.call("PATCH", "/v1/projects/a", {"description": "ours"}, **own)
    assert (patched.status_code, patched.json()["description"]) == (200, "ours")
    assert shared.status("PATCH", "/v1/projects/b", {"description": "ours"}, **own) == 403
    seen = shared.call("GET", "/v1/projects", **own).json()["projects"]
    assert [project["name"] for project in seen] == ["a"]
    assert shared.status("GET", "/v1/projects/b", **own) == 403


@pytest.mark.ci
def test_projects_have_separate_locations(shared: Api, tmp_path: Path) -> None:
    wide = {"name": "wide", "url": str(tmp_path / "tenants"), "check": False}
    assert shared.status("POST", "/v1/stores", wide, role="admin") == 201
    within = shared.call(
        "POST", "/v1/projects", {"name": "x", "store": "store-a", "prefix": "a"}, role="admin"
    )
    assert (within.status_code, "project 'a'" in within.json()["detail"]) == (409, True)
    around = shared.call("PATCH", "/v1/projects/b", {"store": "wide", "prefix": "a/a"}, role="admin")
    assert around.status_code == 409
    assert shared.call("GET", "/v1/projects/b", role="admin").json()["store"] == "store-b"
    for number, prefix in enumerate(("../x", "a/../b", "/", "a//b", "%2e%2e", "file://x")):
        body = {"name": f"y{number}", "store": "store-a", "prefix": prefix}
        assert shared.status("POST", "/v1/projects", body, role="admin") == (201 if prefix == "/" else 422)


def test_only_admins_create_projects_if_configured(shared: Api) -> None:
    refused = shared.call("POST", "/v1/projects/new/runs", {"run": "r"})
    assert refused.status_code == 404
    assert shared.status("POST", "/v1/projects/a/runs", {"run": "r"}, role="recorder") == 200


def test_an_archived_project_accepts_no_runs_and_is_readable(shared: Api) -> None:
    shared.call("POST", "/v1/projects/a/runs", {"run": "r"})
    assert shared.call("PATCH", "/v1/projects/a", {"archived": True}, role="admin").json()["archived_ns"]
    assert shared.status("POST", "/v1/projects/a/runs", {"run": "s"}) == 409
    assert shared.status("GET", "/v1/projects/a/runs/r") == 200
    shared.call("PATCH", "/v1/projects/a", {"archived": False}, role="admin")
    assert shared.status("POST", "/v1/projects/a/runs", {"run": "s"}) == 200


def test_an_archived_project_accepts_no_announcements(shared: Api) -> None:
    path, messages = (
        "/v1/projects/a/runs/r/announcements",
        {"attempt": "a1", "segments": [{"node": "n", "writer": "w0", "seq": 0, "first": 0, "last": 3}]},
    )
    shared.call("POST", "/v1/projects/a/runs", {"run": "r"})
    begun(shared, "r")
    shared.call("PATCH", "/v1/projects/a", {"archived": True}, role="admin")
    refused = shared.call("POST", path, messages, role="recorder", project="a")
    assert (refused.status_code, refused.json()["detail"]) == (409, "project 'a': archived")
    assert "admin" in refused.json()["hint"]
    assert shared.driven.segments(1) == {}
    assert shared.status("POST", path.replace("/r/", "/unknown/"), messages, role="recorder") == 404
    assert shared.status("POST", "/v1/projects/a/runs/r/stop", {"attempt": "a1"}) == 202
    shared.call("PATCH", "/v1/projects/a", {"archived": False}, role="admin")
    assert shared.status("POST", path, messages, role="recorder", project="a") == 200
    assert shared.driven.segments(1) == {("w0", 0): "announced"}


def test_a_job_is_bound_on_a_registered_backend_only(shared: Api, process: JobHandle) -> None:
    refused = bind(shared, "a", process)
    assert (refused.status_code, "not registered for project 'a'" in refused.json()["detail"]) == (422, True)
    assert shared.status("POST", "/v1/backends", {"name": "local", "kind": "local"}, role="admin") == 201
    assert bind(shared, "a", process).status_code == 422
    shared.call("PATCH", "/v1/projects/a", {"backends": ["local"]}, role="admin")
    assert bind(shared, "a", process).json()["job"]["backend"] == "local"
    assert bind(shared, "b", process).status_code == 422
    assert shared.status("DELETE", "/v1/backends/local", role="admin") == 409
    for wrong in ({"name": "x", "kind": "command"}, {"name": "X", "kind": "local"}, {"name": "x", "kind": "local", "settings": {"a": 1}}):  # fmt: skip
        assert shared.status("POST", "/v1/backends", wrong, role="admin") == 422


@pytest.mark.ci
@pytest.mark.parametrize("changes", [{}, {"host": "elsewhere"}])
def test_a_job_of_one_project_is_never_anothers(
    shared: Api, process: JobHandle, changes: dict[str, str]
) -> None:
    shared.call("POST", "/v1/backends", {"name": "local", "kind": "local"}, role="admin")
    shared.call("POST", "/v1/backends", {"name": "box", "kind": "local"}, role="admin")
    for project in ("a", "b"):
        shared.call("PATCH", f"/v1/projects/{project}", {"backends": ["box", "local"]}, role="admin")
    assert bind(shared, "a", process).status_code == 200
    assert bind(shared, "a", process, attempt="a2").status_code == 200  # a restart under the same launcher
    taken = bind(shared, "b", process, **changes)
    assert (taken.status_code, "in another project" in taken.json()["detail"]) == (409, True)
    renamed = {"run": "r", "attempt": "a1", "job": {**job_body(process, **changes), "backend": "box"}}
    assert shared.status("POST", "/v1/projects/b/runs", renamed, project="b") == 409
    other_id = {"run": "r", "attempt": "a1", "job": {**job_body(process, **changes), "id": "1"}}
    assert shared.status("POST", "/v1/projects/b/runs", other_id, project="b") == 422


def test_a_recorder_binds_nothing(shared: Api, process: JobHandle) -> None:
    body = {"run": "r", "attempt": "a1", "job": job_body(process)}
    assert shared.status("POST", "/v1/projects/a/runs", body, role="recorder") == 403
    shared.call("POST", "/v1/projects/a/runs", {"run": "r", "attempt": "a1"}, role="recorder")
    assert (
        shared.status("PUT", "/v1/projects/a/runs/r/job", {"job": job_body(process)}, role="recorder") == 403
    )


NASTY = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["..", ".", "../b", "%2e%2e", "..%2fb", "%2e%2e%2fb%2f", "/etc", "file:///etc", "a/../b", "a\\b", "a\0b", "\u2024\u2024", "s3://b"]),
)  # fmt: skip


@settings(max_examples=examples(60))
@given(run=NASTY, attempt=NASTY, node=NASTY, writer=NASTY)
def test_names_in_requests_cannot_leave_the_store(
    shared: Api, tmp_path: Path, run: str, attempt: str, node: str, writer: str
) -> None:
    before = {path for path in tmp_path.rglob("*") if "sqlite" not in path.name}
    token = shared.__dict__.setdefault("_token", shared.token("recorder", "a"))
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    segment = {"node": node, "writer": writer, "seq": 0, "first": 0, "last": 0}
    body = {"attempt": attempt, "segments": [segment]}
    from json import dumps
    from urllib.parse import quote

    for place, sent in (
        ("/v1/projects/a/runs", {"run": run, "attempt": attempt}),
        (f"/v1/projects/a/runs/{quote(run, safe='')}/announcements", body),
        (f"/v1/projects/a/runs/{quote(run, safe='')}/attempts/{quote(attempt, safe='')}/credentials", {}),
    ):
        answer = shared.client.request("POST", place, content=dumps(sent), headers=headers)
        assert answer.status_code in {200, 401, 403, 404, 405, 409, 422, 429}, answer.text
    assert {path for path in tmp_path.rglob("*") if "sqlite" not in path.name} == before


def test_links_in_a_store_show_nothing_of_another_project(shared: Api, tmp_path: Path) -> None:
    """A tenant that may write to its folder cannot lead the service into another's."""
    theirs = Recording(Store.open(tmp_path / "tenants" / "b"), project="b").begin()
    theirs.write(0, 0, 7, nan_from(5))
    mine = tmp_path / "tenants" / "a" / "a"
    mine.mkdir()
    (mine / "run-1").symlink_to(tmp_path / "tenants" / "b" / "b" / "run-1")
    own = Recording(Store.open(tmp_path / "tenants" / "a"), project="a", run="run-2").begin()
    own.write(0, 0, 3)
    (mine / "run-2" / "stats" / "a1").rename(mine / "kept")
    (mine / "run-2" / "stats" / "a1").symlink_to(tmp_path / "tenants" / "b" / "b" / "run-1" / "stats" / "a1")
    (mine / "run-2" / "control.json").symlink_to(tmp_path / "tenants" / "b" / "b" / "run-1" / "run.json")
    before = (tmp_path / "tenants" / "b" / "b" / "run-1" / "run.json").read_bytes()
    for _ in range(2):
        for run_id in sweep(shared.driven.service).runs:
            shared.driven.settle(run_id)
    runs = shared.call("GET", "/v1/projects/a/runs", project="a").json()["runs"]
    assert {run["run"]: (run["last_step"], run["alerts"]["firing"]) for run in runs} == {"run-2": (-1, 0)}
    run_id = begun(shared, "run-2")
    stopped = shared.call("POST", "/v1/projects/a/runs/run-2/stop", {"attempt": "a1"}, project="a")
    assert stopped.status_code == 202
    (action,) = shared.driven.actions(run_id)
    assert dispatch(shared.driven.service, action.id)
    assert b"stop" in (mine / "run-2" / "control.json").read_bytes()
    assert not (mine / "run-2" / "control.json").is_symlink()
    assert (tmp_path / "tenants" / "b" / "b" / "run-1" / "run.json").read_bytes() == before


def test_a_document_belongs_to_its_folder_not_to_the_project_that_it_names(
    shared: Api, tmp_path: Path
) -> None:
    root = Store.open(tmp_path / "tenants" / "a")
    document = b'{"project": "b", "run": "../../b/secret", "created_ns": 1, "rules": [{"rule": "non_finite_values", "actions": ["stop"]}]}'
    root.put("a/mine/run.json", document)
    sweep(shared.driven.service)
    run = shared.call("GET", "/v1/projects/a/runs/mine", project="a").json()
    assert [rule["granted_stop"] for rule in run["rules"] if rule["origin"] == "recorder"] in ([], [False])
    assert shared.call("GET", "/v1/projects/b/runs", project="b").json()["runs"] == []


@pytest.mark.parametrize(
    "params", [{"file": "/etc/passwd", "class": "X"}, {"file": "../b/rule.py", "class": "X"}]
)
def test_a_rule_of_a_request_reads_no_file(shared: Api, params: dict[str, str]) -> None:
    shared.call("POST", "/v1/projects/a/runs", {"run": "r"})
    rules = [{"rule": "python", "params": params}]
    for body, path in (
        ({"run": "r", "rules": rules}, "runs"),
        ({"runs": ["r"], "rules": rules}, "backtests"),
    ):
        refused = shared.call("POST", f"/v1/projects/a/{path}", body, project="a")
        assert (refused.status_code, "root:" in refused.text) == (422, False)


def test_a_backtest_evaluates_runs_of_its_project_only(shared: Api) -> None:
    shared.call("POST", "/v1/projects/b/runs", {"run": "secret"})
    for name in ("secret", "../b/secret", "*", "/etc", "s3://b/r"):
        refused = shared.call("POST", "/v1/projects/a/backtests", {"runs": [name]}, project="a")
        assert refused.status_code == 404, name


@pytest.mark.ci
def test_a_registration_that_changes_takes_effect_without_a_restart(shared: Api, tmp_path: Path) -> None:
    (tmp_path / "tenants" / "new").mkdir()
    Recording(Store.open(tmp_path / "tenants" / "new"), project="a", run="moved").begin().write(0, 0, 3)
    sweep(shared.driven.service)
    assert shared.call("GET", "/v1/projects/a/runs").json()["runs"] == []
    changed = shared.call(
        "PUT", "/v1/stores/store-a", {"url": str(tmp_path / "tenants" / "new")}, role="admin"
    )
    assert changed.status_code == 200
    sweep(shared.driven.service)
    assert [run["run"] for run in shared.call("GET", "/v1/projects/a/runs").json()["runs"]] == ["moved"]


def test_first_runs_create_projects_on_the_services_own_store(api: Api) -> None:
    assert api.status("POST", "/v1/projects/new/runs", {"run": "r"}, role="recorder") == 200
    project = api.call("GET", "/v1/projects/new").json()
    assert (project["store"], project["backends"]) == ("default", ["local"])
    elsewhere = replace(api.driven.service, local_jobs=False)
    other = Api.of(Driven(elsewhere))
    other.call("POST", "/v1/projects/newer/runs", {"run": "r"}, role="recorder")
    assert other.call("GET", "/v1/projects/newer").json()["backends"] == []


def test_credentials_are_of_a_role_or_refused(shared: Api) -> None:
    path = "/v1/projects/a/runs/r/attempts/a1/credentials"
    refused = shared.call("POST", path, role="recorder")
    assert (refused.status_code, "no role" in refused.json()["detail"]) == (422, True)
    assert shared.status("POST", path, role="viewer") == 403
