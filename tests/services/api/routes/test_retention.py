from __future__ import annotations

import pytest

from tests.services.api.conftest import Api
from tests.services.recording import Recording
from watchstep.store.store import Store
from watchstep_services.db.models import RunRow
from watchstep_services.retention import upkeep

PROJECT = "/v1/projects/vision"
RUN = f"{PROJECT}/runs/run-1"


@pytest.fixture
def recording(api: Api, folder_store: Store) -> Recording:
    begun = Recording(folder_store).begin()
    run_id = api.driven.register()
    api.driven.announce(run_id, begun.write(0, 0, 9))
    api.driven.settle(run_id)
    return begun


def end(api: Api) -> None:
    with api.driven.service.database.write() as session:
        run = session.query(RunRow).one()
        run.state, run.ended_ns = "completed", 1


def test_only_an_admin_sets_the_policy(api: Api, recording: Recording) -> None:
    nothing = {"compact_after_s": None, "originals_s": None, "keep_tensors_s": None, "keep_runs_s": None}
    assert api.call("GET", f"{PROJECT}/retention", role="viewer").json() == nothing
    month = {"keep_runs_s": 30 * 86400}
    assert api.call("PUT", f"{PROJECT}/retention", month).status_code == 403
    for body in (month, {"keep_runs_s": 5}):
        answer = api.call("PUT", f"{PROJECT}/retention", body, role="admin")
        assert answer.json() == {**nothing, **body}
    assert api.call("GET", f"{PROJECT}/retention").json()["keep_runs_s"] == 5
    assert api.call("PUT", f"{PROJECT}/retention", {"keep_runs_s": -1}, role="admin").status_code == 422
    assert api.call("GET", "/v1/projects/other/retention").status_code == 404


def test_a_run_that_has_ended_is_deleted(api: Api, recording: Recording) -> None:
    assert api.call("DELETE", RUN, role="admin").status_code == 409
    end(api)
    assert api.call("DELETE", RUN).status_code == 403
    assert api.call("DELETE", RUN, role="admin").json()["deleting"]
    assert api.call("PUT", f"{RUN}/hold", {"reason": "too late"}).status_code == 409
    assert upkeep(api.driven.service) == 1
    assert not list(recording.store.entries())
    assert api.call("GET", RUN).status_code == 404


def test_a_run_on_hold_is_not_deleted(api: Api, recording: Recording) -> None:
    end(api)
    hold = api.call("PUT", f"{RUN}/hold", {"reason": "for the paper"}).json()
    assert (hold["on_hold"], hold["hold_reason"]) == (True, "for the paper")
    assert api.call("DELETE", RUN, role="admin").status_code == 409
    assert api.call("GET", f"{RUN}/retention", role="viewer").json() == hold
    api.call("DELETE", f"{RUN}/hold")
    assert api.call("DELETE", RUN, role="admin").status_code == 202
