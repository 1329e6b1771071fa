"""Samples of a step through the API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sdk.reading.test_samples import write
from tests.services.api.conftest import Api
from tests.services.recording import Recording, damage_from
from watchstep.format.samples.samples import MAX_IDS, SampleBatch, encode_batch, encode_object
from watchstep.reading.budget import OverBudgetError, ReadBudget
from watchstep.store.store import Store
from watchstep_services.api.routes.samples import _read

PLACE = "/v1/projects/vision/runs/run-1/samples"


@pytest.fixture
def recorded(api: Api, folder_store: Store) -> Api:
    """A run with samples of two workers and two attempts."""
    store = Recording(folder_store).begin().store
    write(
        store, "a1", 0, 10, *(SampleBatch(step, (step, "x" * 1000), "Numbers", 0, step) for step in range(5))
    )
    write(store, "a1", 1, 11, SampleBatch(3, tuple(range(200)), left_out=7))
    write(store, "a2", 0, 20, SampleBatch(4, (2**70, ("file", 3), {"file": "a", "offset": 1})))
    store.put("samples/a1/0/30-3-3.samples", b"damaged")
    api.driven.register()
    return api


def _get(api: Api, query: str) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {api.token('viewer')}"}
    answer = api.client.request("GET", f"{PLACE}?{query}", headers=headers)
    return answer.status_code, answer.json()


def test_a_step_names_its_samples(recorded: Api) -> None:
    """All workers of a step, with a bounded number of bounded ids, and how many more there are."""
    status, answer = _get(recorded, "step=3&limit=2")
    assert status == 200
    assert answer["batches"] == [
        {"worker": 0, "source": "Numbers", "epoch": 0, "number": 3, "ids": [3, "x" * 300 + "…"], "more": 0},
        {"worker": 1, "source": "", "epoch": -1, "number": -1, "ids": [0, 1], "more": 205},
    ]
    assert (answer["attempt"], answer["more_batches"]) == ("a1", 0)
    assert answer["damaged"] == ["samples/a1/0/30-3-3.samples"]
    assert len(_get(recorded, "step=3&worker=1")[1]["batches"]) == 1


def test_the_newest_attempt_is_the_default(recorded: Api) -> None:
    """A step that was made again has the samples of the newest attempt, unless another one is named."""
    newest = _get(recorded, "step=4")[1]
    assert newest["attempt"] == "a2"
    assert newest["batches"][0]["ids"] == [str(2**70), ["file", 3], {"file": "a", "offset": 1}]
    assert _get(recorded, "step=4&attempt=a1")[1]["batches"][0]["ids"][0] == 4


def test_steps_without_samples(recorded: Api) -> None:
    """A step without samples has none; a request without a step, or with another run's event, is refused."""
    assert _get(recorded, "step=99") == (
        200,
        {"attempt": "", "step": 99, "batches": [], "more_batches": 0, "damaged": []},
    )
    assert _get(recorded, "worker=0")[0] == 422
    assert _get(recorded, "event=unknown")[0] == 404


def test_many_batches_of_many_samples(recorded: Api, folder_store: Store) -> None:
    """Only the samples that are returned are decoded, and batches beyond a limit are counted."""
    payload = encode_batch(SampleBatch(7, tuple(range(5, 5 + MAX_IDS))))
    content = encode_object((number, payload) for number in range(20_000))
    folder_store.put("vision/run-1/samples/a1/0/40-7-7.samples", content)
    answer = _get(recorded, "step=7&limit=2")[1]
    assert (len(answer["batches"]), answer["more_batches"]) == (1000, 19_000)
    assert (answer["batches"][-1]["ids"], answer["batches"][-1]["more"]) == ([5, 6], MAX_IDS - 2)


def test_the_time_is_checked_after_each_batch(folder_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object with many batches does not exceed the time of a query."""
    write(folder_store, "a1", 0, 10, *(SampleBatch(3, (number,)) for number in range(100)))
    budget = ReadBudget(60, 256)
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks > 50:
            raise OverBudgetError("the query took too long", "query less")

    monkeypatch.setattr(budget, "check", check)
    with pytest.raises(OverBudgetError):
        _read(folder_store, budget, 3, (None, None), 10)


def test_an_alerts_event_names_the_samples(api: Api, folder_store: Store) -> None:
    """The event has a command that shows the samples, and its id selects the step of its evidence."""
    recording = Recording(folder_store).begin()
    write(recording.store, "a1", 0, 10, *(SampleBatch(step, (100 + step,)) for step in range(8)))
    run_id = api.driven.register()
    api.driven.announce(run_id, recording.write(0, 0, 7, damage_from(5)))
    api.driven.settle(run_id)
    fired = [event for event in api.driven.events(run_id) if event["type"] == "io.watchstep.alert.firing"]
    step = fired[0]["data"]["evidence"]["step"]
    assert fired[0]["data"]["evidence"]["samples"].endswith(f"vision/run-1/ --step {step}")
    answer = _get(api, f"event={fired[0]['id']}")[1]
    assert (answer["attempt"], answer["step"], answer["batches"][0]["ids"]) == ("a1", step, [100 + step])
