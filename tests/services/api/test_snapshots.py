"""Snapshots through the API: lists, contents, and tensors in parts."""

from __future__ import annotations

from urllib.parse import quote

import httpx
import numpy as np
import pytest

from tests.services.api.conftest import Api, Client
from tests.services.recording import Recording
from watchstep.format.layout import SnapshotKey
from watchstep.store.store import Store
from watchstep_services.api.app import create_app

PLACE = "/v1/projects/vision/runs/run-1/snapshots"
WEIGHT = np.arange(24, dtype=np.float32).reshape(4, 6)
BIAS = np.array([1.5, np.nan, -np.inf, 0.0], np.float16)


def key(step: int, worker: int = 0) -> SnapshotKey:
    return SnapshotKey("a1", worker, step, "train")


@pytest.fixture
def kept(api: Api, folder_store: Store) -> Api:
    from safetensors.numpy import save

    recording = Recording(folder_store).begin()
    for step in (5, 10, 15):
        recording.store.put(key(step).path, save({"conv/1.weight": WEIGHT + step, "bias": BIAS}))
    recording.store.put("tensors/notes.txt", b"somebody else's")
    api.driven.register()
    return api


def ask(api: Api, path: str, **headers: str) -> httpx.Response:
    sent = {"authorization": f"Bearer {api.token('viewer')}", **headers}
    return api.client.request("GET", f"{PLACE}{path}", headers=sent)


def test_snapshots_are_listed_in_pages(kept: Api) -> None:
    first = ask(kept, "?limit=2").json()
    assert [entry["step"] for entry in first["snapshots"]] == [5, 10]
    rest = ask(kept, f"?limit=2&page_token={first['next_page_token']}").json()
    assert ([entry["step"] for entry in rest["snapshots"]], rest["next_page_token"]) == ([15], None)


def test_a_snapshot_lists_its_tensors(kept: Api) -> None:
    held = ask(kept, "/a1/0/5/train").json()
    tensors = {entry["name"]: (entry["dtype"], entry["shape"], entry["bytes"]) for entry in held["tensors"]}
    assert tensors == {"conv/1.weight": ("F32", [4, 6], 96), "bias": ("F16", [4], 8)}
    assert held["bytes"] > 104


def test_a_tensor_is_read_whole_or_in_parts(kept: Api) -> None:
    place = f"/a1/0/10/train/tensor?name={quote('conv/1.weight', safe='')}"
    whole = ask(kept, place)
    assert (whole.headers["x-watchstep-dtype"], whole.headers["x-watchstep-shape"]) == ("F32", "4,6")
    assert np.array_equal(np.frombuffer(whole.content, "<f4").reshape(4, 6), WEIGHT + 10)
    piece = ask(kept, place, range="bytes=8-15")
    assert (piece.status_code, piece.headers["content-range"]) == (206, "bytes 8-15/96")
    assert piece.content == whole.content[8:16]
    assert ask(kept, place, range="bytes=-4").content == whole.content[-4:]
    assert ask(kept, place, range="bytes=90-").content == whole.content[90:]
    for odd in ("bytes=96-", "bytes=5-4", "bytes=-", "lines=1-2", "bytes=0-1,4-5", "bytes=-0"):
        assert ask(kept, place, range=odd).status_code == 416, odd


def test_a_summary_has_its_figures(kept: Api) -> None:
    told = ask(kept, "/a1/0/5/train/summary?name=bias").json()
    assert told["first"] == [1.5, None, None, 0.0]
    figures = told["figures"]
    assert (figures["count"], figures["nan"], figures["neg_inf"], figures["zero"]) == (4, 1, 1, 1)
    assert (figures["min"], figures["max"], figures["mean"]) == (0.0, 1.5, 0.75)


def test_a_too_large_response_is_refused_with_a_hint(kept: Api, folder_store: Store) -> None:
    from safetensors.numpy import save

    driven = kept.driven.with_settings(tensor_mb=1)
    small = Api(Client(create_app(driven.service)), driven)
    Recording(folder_store).store.put(key(20).path, save({"big": np.zeros(300_000, np.float64)}))
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


def test_what_is_not_there_is_told(kept: Api) -> None:
    for path, status in MISSING:
        assert ask(kept, path).status_code == status, path


DAMAGED = [b"", b"\xff" * 7, b"\xff" * 64, b"\x02" + bytes(7) + b"{}x", b"\x04" + bytes(7) + b'{"a"']


def test_a_damaged_snapshot_is_reported(kept: Api, folder_store: Store) -> None:
    for content in DAMAGED:
        Recording(folder_store).store.put(key(5).path, content)
        for path in ("", "/tensor?name=bias", "/summary?name=bias"):
            answer = ask(kept, f"/a1/0/5/train{path}")
            assert (answer.status_code, answer.json()["type"]) == (502, "urn:watchstep:problem:damaged"), path
