"""Operation traces through the API: lists, operations, alerts, neighbours, stacks and sources."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import traced_memory
from tests.sdk.trace.debugger_v2.dumps import dump
from tests.services.api.conftest import Api
from tests.services.recording import Recording
from watchstep.errors import FormatError
from watchstep.format.layout import TraceKey
from watchstep.reading.budget import DecodingMemory, OverBudgetError, ReadBudget
from watchstep.store.store import Store
from watchstep.trace import (
    CallSite,
    Operation,
    TensorHealth,
    Trace,
    TracedTensor,
    TraceMode,
    alerts_of,
    diagnose,
    read_debugger_v2,
)
from watchstep.trace.indexed_trace import MAX_TEXTS, index_trace, memory_to_index
from watchstep.trace.trace_file import encode_trace
from watchstep_services.api.queries import traces
from watchstep_services.api.queries.state import Queries
from watchstep_services.api.queries.traces import OpenedTraces
from watchstep_services.retention import delete_objects

PLACE = "/v1/projects/vision/runs/run-1/traces"
KEY = TraceKey("a1", 0, 5, 6)
SOURCE = "import torch\n\ny = x.log()\n"


def tensor(number: int, bad: bool | None = False, **more: Any) -> TracedTensor:
    return TracedTensor(number, (2, 3), "float32", nonfinite=bad, **more)


def operation(index: int, name: str, inputs: list[int], outputs: list[int], **more: Any) -> Operation:
    return Operation(
        index,
        more.pop("step", 5),
        name,
        "forward",
        "block.0",
        tuple(map(tensor, inputs)),
        tuple(tensor(each, bad=name == "log") for each in outputs),
        stack=0,
        **more,
    )


def small() -> Trace:
    """x → log → (mul, add) → sum, and another step with the same ids."""
    log = operation(1, "log", [1], [2])
    health = TensorHealth(6, nan=1, negative_infinite=2, minimum=-3.0, maximum=1.0, first_bad=(0, 1))
    log = Operation(
        **{
            **{name: getattr(log, name) for name in log.__slots__},
            "outputs": (tensor(2, bad=True, health=health, values=np.ones((2, 3), np.float32)),),
        }
    )
    operations = [
        operation(0, "relu", [0], [1]),
        log,
        operation(2, "mul", [2], [3]),
        operation(3, "add", [2, 3], [4]),
        operation(7, "sum", [4], [5]),
        operation(8, "relu", [0], [1], step=6),
        operation(9, "exp", [1], [2], step=6),
    ]
    stack = (CallSite("/a/net.py", 3, "forward"), CallSite("/lib/torch.py", 9, "call", is_library=True))
    return Trace(operations, (stack,), {"/a/net.py": SOURCE}, TraceMode.STATISTICS, notes=("a\x1b[31m",))


@pytest.fixture
def traced(api: Api) -> Api:
    recording = api.driven.recording().begin()
    recording.store.put(KEY.path, encode_trace(small()))
    recording.store.put(TraceKey("a1", 1, 5, 5).path, encode_trace(small()))
    recording.store.put("traces/notes.txt", b"somebody else's")
    api.driven.register()
    return api


def ask(api: Api, path: str) -> httpx.Response:
    return api.call("GET", f"{PLACE}{path}", role="viewer")


def fetched(api: Api, path: str) -> Any:
    response = ask(api, f"/a1/0/5/6{path}")
    assert response.status_code == 200, response.text
    assert response.headers["cache-control"] == "private, max-age=3600, immutable"
    return response.json()


def test_traces_are_listed_in_pages(traced: Api) -> None:
    first = ask(traced, "?limit=1").json()
    assert [(entry["worker"], entry["first"], entry["last"]) for entry in first["traces"]] == [(0, 5, 6)]
    rest = ask(traced, f"?limit=1&page_token={first['next_page_token']}").json()
    assert ([entry["worker"] for entry in rest["traces"]], rest["next_page_token"]) == ([1], None)


def test_a_trace_is_described(traced: Api) -> None:
    found = fetched(traced, "")
    assert Store.open(found["location"]).size(KEY.path) == found["bytes"]
    assert (found["mode"], found["operations"], found["alerts"]) == ("statistics", 7, 1)
    assert (found["steps"], found["files"]) == ([5, 6], ["/a/net.py"])


def test_operations_are_listed_in_pages(traced: Api) -> None:
    first = fetched(traced, "/operations?limit=3")
    assert [each["index"] for each in first["operations"]] == [0, 1, 2]
    rest = fetched(traced, f"/operations?limit=10&page_token={first['next_page_token']}")
    assert [each["index"] for each in rest["operations"]] == [3, 7, 8, 9]
    assert rest["next_page_token"] is None
    part = fetched(traced, "/operations?begin=2&end=8")["operations"]
    assert [each["name"] for each in part] == ["mul", "add", "sum"]
    assert [each["index"] for each in fetched(traced, "/operations?step=6")["operations"]] == [8, 9]
    assert part[0] == {
        "index": 2,
        "step": 5,
        "name": "mul",
        "node": "",
        "phase": "forward",
        "module": "block.0",
        "bad": False,
        "shapes": [[2, 3]],
    }


def test_alerts(traced: Api) -> None:
    (alert,) = fetched(traced, "/alerts")["alerts"]
    assert alert["operation"]["name"] == "log"
    assert [alert[name] for name in ("elements", "nan", "pos_inf", "neg_inf")] == [6, 1, 0, 2]


def test_an_operation_has_its_tensors_and_its_stack(traced: Api) -> None:
    found = fetched(traced, "/operations/1")
    (output,) = found["outputs"]
    assert (output["health"]["nan"], output["health"]["first_bad"]) == (1, [0, 1])
    assert output["health"]["figures"] == [-3.0, 1.0, None, None, None]
    assert [(frame["file"], frame["line"], frame["text"]) for frame in found["stack"]] == [
        ("/a/net.py", 3, "y = x.log()"),
        ("/lib/torch.py", 9, ""),
    ]
    assert ask(traced, "/a1/0/5/6/operations/4").status_code == 404


def test_neighbours(traced: Api) -> None:
    near = fetched(traced, "/operations/1/graph")
    assert [each["name"] for each in near["operations"]] == ["relu", "log", "mul", "add"]
    edges = [(edge["source"], edge["target"], edge["tensor"]) for edge in near["edges"]]
    assert edges == [(0, 1, 1), (1, 2, 2), (1, 3, 2), (2, 3, 3)]
    far = fetched(traced, "/operations/1/graph?depth=2")
    assert [each["index"] for each in far["operations"]] == [0, 1, 2, 3, 7]
    assert not far["truncated"]
    other = fetched(traced, "/operations/9/graph?depth=2")
    assert [each["index"] for each in other["operations"]] == [8, 9]
    assert ask(traced, "/a1/0/5/6/operations/1/graph?depth=3").status_code == 422


def test_a_timeline_has_all_operations(traced: Api) -> None:
    found = fetched(traced, "/timeline")
    assert found["index"] == [0, 1, 2, 3, 7, 8, 9]
    assert found["step"] == [5, 5, 5, 5, 5, 6, 6]
    names = [found["names"][number] for number in found["name"]]
    assert names == ["relu", "log", "mul", "add", "sum", "relu", "exp"]
    assert (found["bad"], found["modules"], found["phases"]) == ([1], ["block.0"], ["forward"])
    assert set(found["module"]) == set(found["phase"]) == {0}


@pytest.mark.ci
def test_a_timeline_has_a_limited_number_of_texts(traced: Api) -> None:
    count = MAX_TEXTS + 2
    operations = [operation(n, f"{n:04d}{'x' * 600}", [], []) for n in range(count)]
    recording = traced.driven.recording()
    recording.store.put(
        TraceKey("a1", 2, 5, 5).path, encode_trace(Trace([*operations, operation(count, "", [], [])]))
    )
    found = ask(traced, "/a1/2/5/5/timeline").json()
    assert found["name"] == [*range(MAX_TEXTS), -1, -1, -1]
    assert {len(name) for name in found["names"]} == {500}


def test_the_first_bad_operation(traced: Api) -> None:
    """It is the one that `diagnose` finds, whose values reached the last result."""
    bad = [
        operation(0, "relu", [0], [1]),
        operation(1, "log", [1], [2]),
        operation(2, "log", [2], [3]),
        operation(3, "log", [0], [4], step=6),
    ]
    trace = Trace(
        bad, ((CallSite("/lib/torch.py", 9, "call", is_library=True), CallSite("/a/net.py", 3, "forward")),)
    )
    traced.driven.recording().store.put(
        TraceKey("a1", 2, 5, 6).path, encode_trace(replace(trace, sources={"/a/net.py": SOURCE}))
    )
    found = ask(traced, "/a1/2/5/6/diagnosis").json()
    expected = diagnose(trace).first
    assert expected is not None
    assert found["first"]["operation"]["index"] == expected.operation.index == 1
    assert [each["id"] for each in found["first"]["inputs"]] == [1]
    assert found["first"] | {"operation": {}, "tensor": {}, "inputs": []} == {
        "cause": "operation",
        "operation": {},
        "tensor": {},
        "inputs": [],
        "reaches": expected.reaches,
        "error": "",
        "line": {
            "file": "/a/net.py",
            "line": 3,
            "function": "forward",
            "library": False,
            "text": "y = x.log()",
        },
    }
    assert (found["others"], found["contained"]) == ([], [])


def test_values_that_reached_nothing(traced: Api) -> None:
    """The last result of step 5 is finite, so nothing was damaged."""
    found = fetched(traced, "/diagnosis")
    assert (found["first"], found["others"]) == (None, [])
    assert [each["index"] for each in found["contained"]] == [1]


def test_the_step_of_an_exception(traced: Api) -> None:
    failed = operation(1, "mm", [1], [], error="RuntimeError: shapes")
    trace = Trace([operation(0, "relu", [0], [1]), failed], raised=(5, 10**30))
    traced.driven.recording().store.put(TraceKey("a1", 2, 5, 6).path, encode_trace(trace))
    first = ask(traced, "/a1/2/5/6/diagnosis").json()["first"]
    assert (first["cause"], first["operation"]["index"], first["error"]) == (
        "error",
        1,
        "RuntimeError: shapes",
    )
    assert (first["line"], first["tensor"]) == (None, None)


def test_a_diagnosis_takes_limited_time(traced: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(traced, "/timeline")  # the trace is in the cache
    monkeypatch.setattr(Queries, "budget", lambda _: ReadBudget(0, 10))
    assert ask(traced, "/a1/0/5/6/diagnosis").status_code == 413


def test_the_memory_of_a_step_is_bounded(folder_store: Store) -> None:
    path = TraceKey("a1", 0, 0, 0).path
    folder_store.put(path, encode_trace(Trace([operation(n, "x", [1, 2, 3], [n]) for n in range(2000)])))
    trace = OpenedTraces().open(folder_store, path, ReadBudget(60, 10))
    with traced_memory() as memory:
        content = trace.step_trace(5, lambda: None)
    assert len(content.operations) == 2000
    assert memory.size < trace.memory_of_step(5)


def test_a_large_neighbourhood_is_cut(traced: Api) -> None:
    operations = [operation(0, "x", [], [1]), *(operation(n, "y", [1], [n + 1]) for n in range(1, 500))]
    recording = traced.driven.recording()
    recording.store.put(TraceKey("a1", 2, 5, 5).path, encode_trace(Trace(operations)))
    found = ask(traced, "/a1/2/5/5/operations/0/graph").json()
    assert (len(found["operations"]), found["truncated"]) == (200, True)


@pytest.mark.ci
def test_neighbours_of_a_tensor_that_one_operation_reads_often(folder_store: Store) -> None:
    """Each tensor of an operation is followed once, and the time is checked meanwhile."""
    count = 20_000
    wide = operation(0, "first", [1] * 2000, [])
    rest = [operation(n, "y", [1], [2] if n == count else []) for n in range(1, count + 1)]
    last = operation(count + 1, "z", [2, 2], [1])
    path = TraceKey("a1", 0, 0, 0).path
    folder_store.put(path, encode_trace(Trace([wide, *rest, last])))
    trace = OpenedTraces().open(folder_store, path, ReadBudget(60, 10))
    assert trace.neighbours(0, 2) == ([0], [], False)
    assert trace.neighbours(count + 1, 1) == ([count, count + 1], [(count, count + 1, 2)], False)
    with pytest.raises(OverBudgetError):
        trace.neighbours(0, 1, ReadBudget(0, 10).check)


def test_a_neighbourhood_takes_limited_time(traced: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(traced, "/operations/1/graph")["edges"]  # the trace is in the cache
    monkeypatch.setattr(Queries, "budget", lambda _: ReadBudget(0, 10))
    assert ask(traced, "/a1/0/5/6/operations/1").status_code == 200
    assert ask(traced, "/a1/0/5/6/operations/1/graph").status_code == 413


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 4), max_size=4), st.lists(st.integers(1, 4), max_size=3)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 11),
)
def test_edges_lead_from_the_last_writer_to_its_readers(
    operations: list[tuple[list[int], list[int]]], boundary: int
) -> None:
    """Every edge is from the last writer of a tensor in the step; the steps of a trace have ids of their own."""
    made = [
        operation(n, "x", inputs, outputs, step=int(n >= boundary))
        for n, (inputs, outputs) in enumerate(operations)
    ]
    expected: set[tuple[int, int, int]] = set()
    writer: dict[tuple[int, int], int] = {}
    for n, each in enumerate(made):
        expected |= {
            (writer[each.step, tensor.id], n, tensor.id)
            for tensor in each.inputs
            if (each.step, tensor.id) in writer
        }
        writer |= {(each.step, tensor.id): n for tensor in each.outputs}
    content = zipfile.ZipFile(io.BytesIO(encode_trace(Trace(made))))
    trace = index_trace("t", content.read("trace.json"), content.read("operations.jsonl"), lambda: None)
    for n in range(len(made)):
        edges = {edge for edge in trace.neighbours(n, 1)[1] if n in edge[:2]}
        assert edges == {edge for edge in expected if n in edge[:2]}


@pytest.mark.ci
@pytest.mark.parametrize("tensors", [0, 5000])
def test_the_memory_of_an_index_is_reserved(tensors: int) -> None:
    """The bound covers lines of many small tensors, and many small lines."""
    inputs = b",".join([b"[1]"] * tensors)
    line = b'{"index":%d,"step":0,"inputs":[%b],"outputs":[]}\n'
    lines = b"".join(line % (number, inputs) for number in range(60 if tensors else 60_000))
    with traced_memory() as memory:
        index_trace("t", HEAD, lines, lambda: None)
    assert len(lines) + memory.peak < memory_to_index(lines, lambda: None) + 2**20


@pytest.mark.parametrize("key", ["losses", "notes", "raised", "stacks"])
def test_a_text_in_the_place_of_a_list_is_refused(key: str) -> None:
    """Each of its characters would be an object."""
    head = json.dumps({**json.loads(HEAD), key: "99"}).encode()
    with pytest.raises(FormatError, match=key):
        index_trace("t", head, LINE, lambda: None)


def test_a_text_in_the_place_of_tensors_is_refused() -> None:
    line = json.dumps({**json.loads(LINE), "inputs": "1" * 12}).encode() + b"\n"
    with pytest.raises(FormatError, match="inputs"):
        index_trace("t", HEAD, line, lambda: None)


def test_names_of_files_that_cannot_be_encoded(traced: Api) -> None:
    head = HEAD.replace(b'"sources": {}', b'"sources": {"a\\ud800": "text"}')
    content = archive(trace_json=head, operations_jsonl=LINE)
    traced.driven.recording().store.put(TraceKey("a1", 4, 0, 0).path, content)
    assert ask(traced, "/a1/4/0/0").json()["files"] == ["a?"]


def test_an_encrypted_trace_is_refused(traced: Api) -> None:
    content = bytearray(archive(trace_json=HEAD, operations_jsonl=LINE))
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        place = content.find(signature)
        while place >= 0:
            content[place + offset] |= 1
            place = content.find(signature, place + 1)
    traced.driven.recording().store.put(TraceKey("a1", 4, 0, 0).path, bytes(content))
    assert ask(traced, "/a1/4/0/0").status_code == 502


def test_only_files_of_the_trace_are_read(traced: Api) -> None:
    assert fetched(traced, "/source?file=/a/net.py") == {
        "file": "/a/net.py",
        "text": SOURCE,
        "truncated": False,
    }
    for file in ("/etc/passwd", "../net.py", "/lib/torch.py"):
        assert ask(traced, f"/a1/0/5/6/source?file={quote(file)}").status_code == 404


@pytest.mark.ci
def test_a_dump_of_tensorflow(traced: Api) -> None:
    trace = read_debugger_v2(dump("graph-full_health"))
    traced.driven.recording().store.put(TraceKey("a1", 3, 0, 0).path, encode_trace(trace))
    place = "/a1/3/0/0"
    alerts = ask(traced, f"{place}/alerts?limit=1000").json()["alerts"]
    assert [each["operation"]["index"] for each in alerts] == [each.operation for each in alerts_of(trace)]
    log = next(each["operation"] for each in alerts if each["operation"]["name"] == "Log")
    graph = ask(traced, f"{place}/operations/{log['index']}/graph").json()
    assert {each["name"] for each in graph["operations"]} == {"Softmax", "Log", "Mul"}
    assert ask(traced, f"{place}/operations?step=-1&limit=2").json()["operations"][0]["phase"] == "eager"


def test_a_trace_that_does_not_exist(traced: Api) -> None:
    for path in ("/a1/0/5/7", "/a2/0/5/6", "/a1/9/5/6/operations"):
        assert ask(traced, path).status_code == 404
    assert ask(traced, "/..a/0/5/6").status_code == 422


def archive(**members: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name.replace("_", "."), data)
    return content.getvalue()


HEAD = json.dumps(
    {
        "version": 2,
        "mode": "statistics",
        "program": "",
        "left_out": 0,
        "losses": [],
        "notes": [],
        "raised": [],
        "stacks": [[["a", "b", "c", "d"]]],
        "sources": {},
    }
).encode()
LINE = b'{"index": 0, "step": 0, "name": "a", "phase": "forward", "inputs": [], "outputs": [], "stack": 0}\n'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 100,
        archive(trace_json=HEAD),
        archive(trace_json=b"{", operations_jsonl=LINE),
        archive(trace_json=b"[" * 100_000, operations_jsonl=LINE),
        archive(trace_json=HEAD.replace(b'"version": 2', b'"version": 99'), operations_jsonl=LINE),
        archive(trace_json=HEAD, operations_jsonl=LINE[:-1]),
        archive(trace_json=HEAD, operations_jsonl=LINE + LINE),
        archive(trace_json=HEAD, operations_jsonl=b"[]\n"),
        archive(trace_json=HEAD, operations_jsonl=LINE.replace(b'"step": 0', b'"step": 1e99')),
        archive(trace_json=HEAD, operations_jsonl=b"a" * (2**20 + 1) + b"\n"),
        archive(trace_json=HEAD, operations_jsonl=LINE)[:-22]
        + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 9, 9, 2**31, 0, 0),
        archive(trace_json=HEAD, operations_jsonl=b"\n" * (128 * 2**20 + 1)),
    ],
    ids=map(str, range(13)),
)
def test_hostile_traces_are_refused(content: bytes, traced: Api) -> None:
    traced.driven.recording().store.put(TraceKey("a1", 4, 0, 0).path, content)
    response = ask(traced, "/a1/4/0/0/operations")
    assert response.status_code == 502, response.text


def test_a_damaged_stack_is_refused(traced: Api) -> None:
    content = archive(trace_json=HEAD, operations_jsonl=LINE)
    traced.driven.recording().store.put(TraceKey("a1", 4, 0, 0).path, content)
    assert ask(traced, "/a1/4/0/0/operations").status_code == 200
    assert ask(traced, "/a1/4/0/0/operations/0").status_code == 502


@pytest.mark.ci
def test_traces_that_take_more_memory_than_their_text_are_refused(traced: Api) -> None:
    """Each is some kilobytes on the store, and takes gigabytes once it is parsed."""
    store = traced.driven.recording().store
    lists = b"[" + b"[]," * 5_000_000 + b"[]]"
    hostile = {
        "head": archive(trace_json=HEAD.replace(b"{", b'{"x": ' + lists + b",", 1), operations_jsonl=LINE),
        "operations": archive(trace_json=HEAD, operations_jsonl=b"[" * 90_000_000),
    }
    for number, (member, content) in enumerate(hostile.items(), 5):
        key = TraceKey("a1", number, 0, 0)
        store.put(key.path, content)
        refused = ask(traced, f"/a1/{number}/0/0")
        assert refused.status_code == 413, member
        assert "384 MiB are allowed" in refused.json()["detail"], member
        assert key.path in refused.json()["detail"], member


def test_traces_are_opened_one_at_a_time_within_the_memory_for_decoding(
    traced: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one has read stays reserved while it reserves more, so that two would wait for each other."""
    memory = DecodingMemory(20 * 2**20)
    monkeypatch.setattr(traces, "PROCESS", memory)
    store = traced.driven.recording().store
    opened = OpenedTraces(max_bytes=1)
    paths = [KEY.path, TraceKey("a1", 1, 5, 5).path]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda path: opened.open(store, path, ReadBudget(60, 1)), paths * 8))
    assert {len(trace) for trace in found} == {7}
    with memory.reserve(20 * 2**20, None, "another one"), pytest.raises(OverBudgetError):
        OpenedTraces().open(store, paths[0], ReadBudget(0.01, 1))


def test_the_cache_is_bounded(folder_store: Store) -> None:
    keys = [TraceKey("a1", worker, 0, 0).path for worker in range(3)]
    for key in keys:
        folder_store.put(key, encode_trace(small()))
    opened = OpenedTraces(max_bytes=1)
    first = opened.open(folder_store, keys[0], ReadBudget(10, 10))
    assert opened.open(folder_store, keys[0], ReadBudget(10, 10)) is first
    opened.open(folder_store, keys[1], ReadBudget(10, 10))
    assert opened.open(folder_store, keys[0], ReadBudget(10, 10)) is not first
    with pytest.raises(OverBudgetError):
        opened.open(folder_store, keys[2], ReadBudget(0, 10))
    folder_store.put(keys[2], b"")
    with pytest.raises(FormatError):
        opened.open(folder_store, keys[2], ReadBudget(10, 10))


def test_traces_are_deleted_with_their_run(folder_store: Store) -> None:
    store = Recording(folder_store).begin().store
    store.put(KEY.path, encode_trace(small()))
    delete_objects(store)
    assert list(store.entries()) == []
