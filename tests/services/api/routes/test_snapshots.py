"""Snapshots and samples of a run."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from tests.sdk.format.test_snapshot import MemoryStore
from tests.sdk.reading.saved import save as save_tensors
from tests.sdk.reading.test_samples import write
from tests.services.api.conftest import Api
from tests.services.recording import damage_from
from watchstep.errors import FormatError, NotFoundError
from watchstep.format.layout import SnapshotKey
from watchstep.format.samples.samples import MAX_IDS, SampleBatch, encode_batch, encode_object
from watchstep.format.snapshot import MISSING_NAMES, Snapshot, TensorPart
from watchstep.reading.budget import DecodingMemory, OverBudgetError, ReadBudget
from watchstep.store.store import Store
from watchstep_services.api.queries import snapshot_headers
from watchstep_services.api.queries.snapshot_headers import read_snapshot
from watchstep_services.api.routes import snapshots
from watchstep_services.api.routes.samples import _read

PLACE = "/v1/projects/vision/runs/run-1/snapshots"
WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6)
BIAS = np.array([1.5, np.nan, -np.inf, 0.0], np.float16)
SAMPLES = "/v1/projects/vision/runs/run-1/samples"


def key(step: int, worker: int = 0) -> SnapshotKey:
    return SnapshotKey("a1", worker, step, "train")


@pytest.fixture
def recorded(api: Api) -> Api:
    recording = api.driven.recording().begin()
    for step in (5, 10, 15):
        recording.store.put(key(step).path, save({"conv/1.weight": WEIGHT + step, "bias": BIAS}))
    recording.store.put("tensors/notes.txt", b"somebody else's")
    api.driven.register()
    return api


def ask(api: Api, path: str, **headers: str) -> httpx.Response:
    return api.call("GET", f"{PLACE}{path}", role="viewer", headers=headers)


def test_snapshots_are_listed_in_pages(recorded: Api) -> None:
    first = ask(recorded, "?limit=2").json()
    assert [entry["step"] for entry in first["snapshots"]] == [5, 10]
    rest = ask(recorded, f"?limit=2&page_token={first['next_page_token']}").json()
    assert ([entry["step"] for entry in rest["snapshots"]], rest["next_page_token"]) == ([15], None)


def test_a_snapshot_lists_its_tensors(recorded: Api) -> None:
    snapshot = ask(recorded, "/a1/0/5/train").json()
    tensors = {
        entry["name"]: (entry["dtype"], entry["shape"], entry["bytes"]) for entry in snapshot["tensors"]
    }
    assert tensors == {"conv/1.weight": ("F32", [4, 6], 96), "bias": ("F16", [4], 8)}
    assert snapshot["bytes"] > 104


def test_a_page_of_snapshots_builds_no_other_entries(recorded: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    entry = snapshots._entry

    def counted(key: SnapshotKey, size: int) -> snapshots.SnapshotEntry:
        built.append(key.step)
        return entry(key, size)

    monkeypatch.setattr(snapshots, "_entry", counted)
    token = ask(recorded, "?limit=1").json()["next_page_token"]
    assert built == [5]
    assert [row["step"] for row in ask(recorded, f"?limit=1&page_token={token}").json()["snapshots"]] == [10]
    assert built == [5, 10]


def test_the_tensors_of_a_snapshot_are_listed_in_pages(recorded: Api) -> None:
    tensors = {f"t{n:03}": np.full(n % 3, n, np.float32) for n in range(205)}
    recorded.driven.recording().store.put(key(20).path, save(tensors))
    first = ask(recorded, "/a1/0/20/train")
    assert (len(first.json()["tensors"]), "page_token" in first.headers["link"]) == (100, True)
    names, token = [], ""
    for size in (90, 90, 25):
        page = ask(recorded, f"/a1/0/20/train?limit=90{token}").json()
        assert (len(page["tensors"]), page["step"], page["missing"]) == (size, 20, 0)
        names += [tensor["name"] for tensor in page["tensors"]]
        token = f"&page_token={page['next_page_token']}"
    assert page["next_page_token"] is None
    assert sorted(names) == sorted(tensors)
    assert ask(recorded, "/a1/0/20/train?limit=1001").status_code == 422
    other = ask(recorded, "?limit=1").json()["next_page_token"]
    for invalid in (other, "WzIwNV0", "Wy0xXQ", "WyJhIl0", "WzAsMF0"):  # [205], [-1], ["a"], [0,0]
        assert ask(recorded, f"/a1/0/20/train?page_token={invalid}").status_code == 422, invalid


def test_a_snapshot_has_the_metadata_of_its_writer_only(recorded: Api) -> None:
    described = {
        "watchstep.missing": "1",
        MISSING_NAMES: '["lost"]',
        "watchstep.tensors": "{}",
        "watchstep.parts": "{}",
    }
    metadata = {"reason": "gate", "large": "x" * 10_000, **described}
    recorded.driven.recording().store.put(key(20).path, save({"w": WEIGHT}, metadata))
    snapshot = ask(recorded, "/a1/0/20/train").json()
    assert (snapshot["metadata"], snapshot["missing"]) == ({"reason": "gate"}, 1)
    many = {f"k{n}": "v" for n in range(1000)}
    recorded.driven.recording().store.put(key(25).path, save({"w": WEIGHT}, many))
    assert len(ask(recorded, "/a1/0/25/train").json()["metadata"]) == 64


def test_headers_are_parsed_within_the_memory_for_decoding(
    recorded: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = recorded.with_settings(query_seconds=1)
    memory = DecodingMemory(2**20)
    monkeypatch.setattr(snapshot_headers, "PROCESS", memory)
    paths = ("", "/tensor?name=bias", "/summary?name=bias")
    with memory.reserve(2**20, None, "another one"):
        for path in paths:
            refused = ask(hasty, f"/a1/0/5/train{path}")
            assert (refused.status_code, "memory for reading" in refused.json()["detail"]) == (413, True), (
                path
            )
    for path in paths:
        assert ask(hasty, f"/a1/0/5/train{path}").status_code == 200, path
    monkeypatch.setattr(snapshot_headers, "PROCESS", DecodingMemory(1000))
    for path in paths:
        refused = ask(hasty, f"/a1/0/5/train{path}")
        assert (refused.status_code, "may take" in refused.json()["detail"]) == (413, True), path


def test_an_error_does_not_keep_a_header_in_memory() -> None:
    def missing(snapshot: Snapshot, _size: int) -> None:
        snapshot.read("nothing")

    content = save({f"t{n}": BIAS for n in range(2000)})
    for data, kind in ((content, NotFoundError), (content + b"x", FormatError)):
        with pytest.raises(kind) as caught:
            read_snapshot(MemoryStore(data), "snap", ReadBudget(10, 10), missing)
        assert (caught.value.__context__, caught.value.__cause__) == (None, None)
        assert "missing" not in [entry.name for entry in caught.traceback]


def test_a_long_header_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(save({f"tensor/{n}": BIAS for n in range(2000)}))
    budget = ReadBudget(10, 10)
    length = 8 + int.from_bytes(store.data[:8], "little")
    assert read_snapshot(store, "snap", budget, lambda snapshot, size: (len(snapshot.tensors), size)) == (
        2000,
        len(store.data),
    )
    assert store.requests == [("size", 0), ("range", 64 * 1024), ("range", length - 64 * 1024)]


def test_tensors_of_a_collection_are_listed_and_read(recorded: Api) -> None:
    store = recorded.driven.recording().store
    part = TensorPart((32, 6), (8, 0), is_shard=False)
    save_tensors(store, SnapshotKey("a1", 0, 5, "train", "inputs"), {"bias": WEIGHT}, parts={"bias": part})
    save_tensors(store, SnapshotKey("a1", 0, 5, "eval", "inputs"), {"bias": WEIGHT + 1})
    listed = ask(recorded, "?collection=inputs").json()["snapshots"]
    assert [(entry["step"], entry["mode"], entry["collection"]) for entry in listed] == [
        (5, "eval", "inputs"),
        (5, "train", "inputs"),
    ]
    assert [entry["step"] for entry in ask(recorded, "?collection=").json()["snapshots"]] == [5, 10, 15]
    first = ask(recorded, "?limit=2").json()
    rest = ask(recorded, f"?limit=3&page_token={first['next_page_token']}").json()
    names = [
        (entry["step"], entry["mode"], entry["collection"])
        for entry in first["snapshots"] + rest["snapshots"]
    ]
    assert names == [
        (5, "eval", "inputs"),
        (5, "train", ""),
        (5, "train", "inputs"),
        (10, "train", ""),
        (15, "train", ""),
    ]
    (tensor,) = ask(recorded, "/a1/0/5/train?collection=inputs").json()["tensors"]
    assert tensor["part"] == {"shape": [32, 6], "start": [8, 0], "shard": False}
    assert ask(recorded, "/a1/0/5/train").json()["tensors"][0]["part"] is None
    place = "/a1/0/5/train/tensor?name=bias&collection=inputs"
    whole = ask(recorded, place)
    assert np.array_equal(np.frombuffer(whole.content, "<f4").reshape(4, 6), WEIGHT)
    assert ask(recorded, place, range="bytes=8-15").content == whole.content[8:16]
    assert whole.headers["etag"] != ask(recorded, "/a1/0/5/train/tensor?name=bias").headers["etag"]
    summary = ask(recorded, "/a1/0/5/train/summary?name=bias&collection=inputs").json()
    assert (summary["figures"]["count"], summary["part"]["start"]) == (24, [8, 0])
    for path, status in (
        ("/a1/0/5/train?collection=outputs", 404),
        ("/a1/0/5/train?collection=..", 422),
        (f"/a1/0/5/train?collection={'x' * 200}", 422),
        ("/a1/0/5/train/tensor?name=bias&collection=a%2Fb", 422),
    ):
        assert ask(recorded, path).status_code == status, path


def test_a_tensor_is_read_whole_or_in_parts(recorded: Api) -> None:
    place = f"/a1/0/10/train/tensor?name={quote('conv/1.weight', safe='')}"
    whole = ask(recorded, place)
    assert (whole.headers["x-watchstep-dtype"], whole.headers["x-watchstep-shape"]) == ("F32", "4,6")
    assert np.array_equal(np.frombuffer(whole.content, "<f4").reshape(4, 6), WEIGHT + 10)
    piece = ask(recorded, place, range="bytes=8-15")
    assert (piece.status_code, piece.headers["content-range"]) == (206, "bytes 8-15/96")
    assert piece.content == whole.content[8:16]
    assert ask(recorded, place, range="bytes=-4").content == whole.content[-4:]
    assert ask(recorded, place, range="bytes=90-").content == whole.content[90:]
    for odd in ("bytes=96-", "bytes=5-4", "bytes=-", "lines=1-2", "bytes=0-1,4-5", "bytes=-0"):
        assert ask(recorded, place, range=odd).status_code == 416, odd


def test_a_summary_has_its_figures(recorded: Api) -> None:
    summary = ask(recorded, "/a1/0/5/train/summary?name=bias").json()
    assert summary["first"] == [1.5, None, None, 0.0]
    figures = summary["figures"]
    assert (figures["count"], figures["nan"], figures["neg_inf"], figures["zero"]) == (4, 1, 1, 1)
    assert (figures["min"], figures["max"], figures["mean"]) == (0.0, 1.5, 0.75)


def test_a_too_large_response_is_refused_with_a_hint(recorded: Api) -> None:
    small = recorded.with_settings(tensor_mb=1)
    recorded.driven.recording().store.put(key(20).path, save({"big": np.zeros(300_000, np.float64)}))
    refused = ask(small, "/a1/0/20/train/tensor?name=big")
    assert (refused.status_code, "Range" in refused.json()["hint"]) == (413, True)
    assert ask(small, "/a1/0/20/train/summary?name=big").status_code == 413
    piece = ask(small, "/a1/0/20/train/tensor?name=big", range="bytes=1000000-1000999")
    assert piece.content == bytes(1000)


MISSING = [
    ("/a1/0/6/train", 404),
    ("/a1/1/5/train", 404),
    ("/a1/0/5/other", 422),
    ("/a1/-1/5/train", 422),
    ("/..%2fx/0/5/train", 404),
    ("/a..1/0/5/train", 422),
    ("/a1/0/5/train/tensor?name=nothing", 404),
    ("/a1/0/5/train/tensor", 422),
    ("/a1/0/5/train/summary?name=nothing", 404),
]


def test_what_is_not_there_is_reported(recorded: Api) -> None:
    for path, status in MISSING:
        assert ask(recorded, path).status_code == status, path


DAMAGED = [b"", b"\xff" * 7, b"\xff" * 64, b"\x02" + bytes(7) + b"{}x", b"\x04" + bytes(7) + b'{"a"']


def test_a_damaged_snapshot_is_reported(recorded: Api) -> None:
    for content in DAMAGED:
        recorded.driven.recording().store.put(key(5).path, content)
        for path in ("", "/tensor?name=bias", "/summary?name=bias"):
            answer = ask(recorded, f"/a1/0/5/train{path}")
            assert (answer.status_code, answer.json()["type"]) == (502, "urn:watchstep:problem:damaged"), path


@pytest.fixture
def sampled(api: Api) -> Api:
    """A run with samples of two workers and two attempts."""
    store = api.driven.recording().begin().store
    write(
        store, "a1", 0, 10, *(SampleBatch(step, (step, "x" * 1000), "Numbers", 0, step) for step in range(5))
    )
    write(store, "a1", 1, 11, SampleBatch(3, tuple(range(200)), left_out=7))
    write(store, "a2", 0, 20, SampleBatch(4, (2**70, ("file", 3), {"file": "a", "offset": 1})))
    store.put("samples/a1/0/30-3-3.samples", b"damaged")
    api.driven.register()
    return api


def _get(api: Api, query: str) -> tuple[int, Any]:
    answer = api.call("GET", f"{SAMPLES}?{query}", role="viewer")
    return answer.status_code, answer.json()


def test_a_step_names_its_samples(sampled: Api) -> None:
    """All workers of a step, with a bounded number of bounded ids, and how many more there are."""
    status, answer = _get(sampled, "step=3&limit=2")
    assert status == 200
    assert answer["batches"] == [
        {"worker": 0, "source": "Numbers", "epoch": 0, "number": 3, "ids": [3, "x" * 300 + "…"], "more": 0},
        {"worker": 1, "source": "", "epoch": -1, "number": -1, "ids": [0, 1], "more": 205},
    ]
    assert (answer["attempt"], answer["more_batches"]) == ("a1", 0)
    assert answer["damaged"] == ["samples/a1/0/30-3-3.samples"]
    assert len(_get(sampled, "step=3&worker=1")[1]["batches"]) == 1


def test_the_newest_attempt_is_the_default(sampled: Api) -> None:
    """A step that was made again has the samples of the newest attempt, unless another one is named."""
    newest = _get(sampled, "step=4")[1]
    assert newest["attempt"] == "a2"
    assert newest["batches"][0]["ids"] == [str(2**70), ["file", 3], {"file": "a", "offset": 1}]
    assert _get(sampled, "step=4&attempt=a1")[1]["batches"][0]["ids"][0] == 4


def test_steps_without_samples(sampled: Api) -> None:
    """A step without samples has none; a request without a step, or with another run's event, is refused."""
    assert _get(sampled, "step=99") == (
        200,
        {"attempt": "", "step": 99, "batches": [], "more_batches": 0, "damaged": []},
    )
    assert _get(sampled, "worker=0")[0] == 422
    assert _get(sampled, "event=unknown")[0] == 404


def test_many_batches_of_many_samples(sampled: Api, folder_store: Store) -> None:
    """Only the samples that are returned are decoded, and batches beyond a limit are counted."""
    payload = encode_batch(SampleBatch(7, tuple(range(5, 5 + MAX_IDS))))
    content = encode_object((number, payload) for number in range(20_000))
    folder_store.put("vision/run-1/samples/a1/0/40-7-7.samples", content)
    answer = _get(sampled, "step=7&limit=2")[1]
    assert (len(answer["batches"]), answer["more_batches"]) == (1000, 19_000)
    assert (answer["batches"][-1]["ids"], answer["batches"][-1]["more"]) == ([5, 6], MAX_IDS - 2)


def test_long_ids_end_an_answer(sampled: Api, folder_store: Store) -> None:
    """A thousand batches with a thousand ids of 300 characters would be an answer of 300 megabytes."""
    payload = encode_batch(SampleBatch(7, tuple(f"{number:0300}" for number in range(1000))))
    content = encode_object((number, payload) for number in range(40))
    folder_store.put("vision/run-1/samples/a1/0/40-7-7.samples", content)
    answer = _get(sampled, "step=7&limit=1000")[1]
    assert (len(answer["batches"]), answer["more_batches"]) == (27, 13)


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


def test_an_alerts_event_names_the_samples(api: Api) -> None:
    """The event has a command that shows the samples, and its id selects the step of its evidence."""
    recording = api.driven.recording().begin()
    write(recording.store, "a1", 0, 10, *(SampleBatch(step, (100 + step,)) for step in range(8)))
    run_id = api.driven.register()
    api.driven.judge(run_id, recording.write(0, 0, 7, damage_from(5)))
    fired = api.driven.events(run_id, "alert.firing")
    step = fired[0]["data"]["evidence"]["step"]
    assert fired[0]["data"]["evidence"]["samples"].endswith(f"vision/run-1/ --step {step}")
    answer = _get(api, f"event={fired[0]['id']}")[1]
    assert (answer["attempt"], answer["step"], answer["batches"][0]["ids"]) == ("a1", step, [100 + step])
