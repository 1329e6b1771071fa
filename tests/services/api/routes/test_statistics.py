"""Queries over recorded statistics: the SDK's results, with a limited number of points and limited resources."""

from __future__ import annotations

import io
import os
import queue
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import duckdb
import httpx
import numpy as np
import pyarrow as pa
import pytest

from tests.services.api.conftest import Api
from tests.services.recording import Recording, exploding_from, nan_from
from watchstep.format import segment
from watchstep.format.layout import SegmentKey
from watchstep.reading.run import open_run
from watchstep.store.store import Store
from watchstep_rules.custom.sandbox.pool import POOL
from watchstep_rules.custom.sandbox.process import Child
from watchstep_rules.custom.sql.query import QueryError, QueryLimits, errors_of_queries
from watchstep_services.api.queries import state as opened_module
from watchstep_services.api.queries.state import Slots
from watchstep_services.api.schemas.problems import RequestRefusedError

RUN = "/v1/projects/vision/runs/run-1"
RUNS = "/v1/projects/vision/runs"
TABLE = "/v1/projects/vision/rule-table"
GRADIENT = "second.weight:gradient"
STEPS = 300
ARROW = {"accept": "application/vnd.apache.arrow.stream"}


@pytest.fixture
def recorded(api: Api) -> Api:
    recording = api.driven.recording().begin()
    for seq in range(3):
        recording.write(seq, seq * 100, seq * 100 + 99, exploding_from(200))
    api.driven.register()
    return api


def get(api: Api, what: str, **parameters: Any) -> Any:
    return api.get(f"{RUN}/{what}", **parameters)


def names(api: Api) -> list[str]:
    return [entry["name"] for entry in get(api, "tensors")["tensors"]]


def test_tensors_are_listed_in_pages(recorded: Api) -> None:
    whole = names(recorded)
    assert len(whole) == 3
    page = get(recorded, "tensors", limit=2)
    rest = get(recorded, "tensors", limit=2, page_token=page["next_page_token"])
    assert [entry["name"] for entry in (*page["tensors"], *rest["tensors"])] == whole
    assert rest["next_page_token"] is None
    assert [entry["name"] for entry in get(recorded, "tensors", collection="losses")["tensors"]] == ["loss"]


def test_a_short_series_has_a_point_per_row(recorded: Api, folder_store: Store) -> None:
    tensor = next(name for name in names(recorded) if name.startswith("second"))
    (line,) = get(recorded, "series", tensor=tensor, figure="l2", points=STEPS)["lines"]
    table = open_run(f"{folder_store.location}/vision/run-1").series(tensor, "l2")
    assert line["step"] == line["last_step"] == table["step"].to_pylist()
    assert line["mean"] == line["min"] == line["max"] == table["l2"].to_pylist()
    assert set(line["count"]) == {1}


def test_a_series_is_binned_to_the_points(recorded: Api, folder_store: Store) -> None:
    for points in (1, 2, 7, 100, 299):
        binned(recorded, folder_store, points)


def binned(recorded: Api, folder_store: Store, points: int) -> None:
    tensor = next(name for name in names(recorded) if name.startswith("second"))
    (line,) = get(recorded, "series", tensor=tensor, figure="l2", points=points)["lines"]
    table = open_run(f"{folder_store.location}/vision/run-1").series(tensor, "l2")
    steps, values = table["step"].to_numpy(), table["l2"].to_numpy()
    assert len(line["step"]) <= points
    assert sum(line["count"]) == STEPS
    for first, last, mean, low, high in zip(
        *(line[n] for n in ("step", "last_step", "mean", "min", "max")), strict=True
    ):
        chosen = values[(steps >= first) & (steps <= last)]
        assert (low, high) == (chosen.min(), chosen.max())
        assert mean == pytest.approx(chosen.mean())


@pytest.mark.ci
def test_non_finite_values_are_counted_and_null(api: Api) -> None:
    api.driven.recording().begin().write(0, 0, 9, nan_from(5))
    api.driven.register()
    (line,) = get(api, "series", tensor="loss", figure="mean", points=2)["lines"]
    assert line["nonfinite"] == [0, 5]
    assert line["mean"][1] is None
    for figure in ("mean", "l2"):
        (line,) = get(api, "series", tensor="loss", figure=figure, first=4, last=6)["lines"]
        assert (line["step"], line["nonfinite"]) == ([4, 5, 6], [0, 1, 1])
        assert line["mean"] == [1.0, None, None]
    answer = sql(api, "SELECT l2, l1 FROM statistics WHERE tensor = 'loss' AND step = 5").json()
    assert answer["rows"] == [[None, None]]


def test_a_series_as_arrow(recorded: Api) -> None:
    answer = recorded.call("GET", f"{RUN}/series?tensor=loss&figure=mean&points=10", headers=ARROW)
    table = pa.ipc.open_stream(io.BytesIO(answer.content)).read_all()
    (line,) = get(recorded, "series", tensor="loss", figure="mean", points=10)["lines"]
    assert table["step"].to_pylist() == line["step"]
    assert table["mean"].to_pylist() == line["mean"]


def test_a_heatmap_and_a_histogram(recorded: Api, folder_store: Store) -> None:
    run = open_run(f"{folder_store.location}/vision/run-1")
    heatmap = get(recorded, "heatmap", collection="gradients", figure="abs_max", points=10)
    expected = run.heatmap("gradients", "abs_max", 10)
    assert (heatmap["tensors"], heatmap["edges"]) == (expected.tensors, expected.edges.tolist())
    assert heatmap["mean"] == expected.values.tolist()
    single_row = get(recorded, "heatmap", collection="gradients", figure="abs_max", rows=1)
    assert (len(single_row["tensors"]), single_row["left_out"]) == (1, 1)
    answer = get(recorded, "histogram", tensor=expected.tensors[0], points=3)
    histogram = run.histogram(expected.tensors[0], 3)
    assert (answer["counts"], answer["edges"]) == (histogram.counts.tolist(), histogram.edges.tolist())


def sql(api: Api, query: str, limit: int = 1000) -> httpx.Response:
    return api.call("POST", f"{RUN}/sql", {"query": query, "limit": limit}, role="viewer")


def test_sql(recorded: Api) -> None:
    response = sql(recorded, "SELECT tensor, count(*) AS n FROM statistics GROUP BY tensor ORDER BY tensor")
    assert response.status_code == 200, response.text
    answer = response.json()
    assert [column["name"] for column in answer["columns"]] == ["tensor", "n"]
    assert [row[1] for row in answer["rows"]] == [STEPS] * 3
    assert answer["more"] is False
    cut = sql(recorded, "SELECT step FROM statistics", 7).json()
    assert (len(cut["rows"]), cut["more"]) == (7, True)
    response = sql(recorded, "SELECT 1/0.0 AS a, NULL AS b, 1.5::DECIMAL(4, 2) AS c, true AS d")
    assert response.status_code == 200, response.text
    odd = response.json()
    assert odd["rows"][0][1:] == [None, 1.5, True]
    assert np.isfinite([value for value in odd["rows"][0] if isinstance(value, float)]).all()


REFUSED = [
    "SELECT * FROM read_csv('/etc/passwd')",
    "COPY statistics TO '/tmp/x'",
    "SELEC",
    "SELECT nothing FROM statistics",
    "SELECT 'a' || chr(0)",
    "",
]
"""One of each kind of refusal; what is refused is tested with rules and with the SDK's queries."""


@pytest.mark.ci
def test_disallowed_sql_is_refused(recorded: Api) -> None:
    for query in REFUSED:
        answer = sql(recorded, query)
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:watchstep:problem:invalid"), query
        assert "root:" not in answer.text


@pytest.mark.ci
def test_a_too_slow_query_is_killed(recorded: Api) -> None:
    bounded = recorded.with_settings(query_seconds=0.5)
    many = "SELECT count(*) FROM statistics a, statistics b, statistics c, statistics d WHERE a.mean + b.mean < c.mean * d.mean"
    answer = sql(bounded, many)
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:watchstep:problem:too-large"), (
        answer.text
    )
    assert sql(recorded, "SELECT count(*) FROM statistics").status_code == 200


@pytest.mark.ci
def test_a_query_with_too_much_memory_is_killed(recorded: Api) -> None:
    many = "SELECT median(a.mean + b.step) FROM statistics a, statistics b, (SELECT step FROM statistics LIMIT 5) c"
    answer = sql(recorded.with_settings(query_mb=16, query_seconds=60.0), many)
    assert answer.status_code == 413, answer.text[:300]


SPILLING = [
    "SELECT a.step, b.step, c.step, count(*) FROM statistics a, statistics b, statistics c GROUP BY ALL",
    "SELECT max(a.tensor || b.tensor) OVER (PARTITION BY a.step) FROM statistics a, statistics b, statistics c",
]


@pytest.mark.ci
@pytest.mark.parametrize("query", SPILLING)
def test_a_query_that_would_spill_takes_too_much_memory(recorded: Api, query: str) -> None:
    answer = sql(recorded.with_settings(query_mb=32, query_seconds=60.0), query)
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:watchstep:problem:too-large"), (
        answer.text
    )
    assert "took more than 32 MiB" in answer.json()["detail"]


def test_an_allocation_that_is_larger_than_any_is_too_much_memory() -> None:
    def fail() -> None:
        with errors_of_queries(QueryLimits(64, 1.0)):
            raise duckdb.InternalException("INTERNAL Error: Requested allocation size of 9 is out of range")

    with pytest.raises(QueryError, match="took more than 64 MiB") as failed:
        fail()
    assert failed.value.over == "memory"


def hostile(first: str) -> str:
    """Texts joined to longer texts, again and again: nothing that the guard, or DuckDB's limit of memory, counts."""
    query = f"SELECT {first} AS s FROM statistics"
    for _ in range(6):
        query = f"SELECT {' || '.join(['s'] * 60)} AS s FROM ({query})"
    return query


@pytest.mark.ci
@pytest.mark.parametrize("first", ["tensor", "'abcdefgh'"])
def test_a_query_with_unlimited_memory_is_killed_and_does_not_affect_the_service(
    recorded: Api, first: str
) -> None:
    assert sql(recorded, "SELECT count(*) FROM statistics").status_code == 200
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = sql(recorded, hostile(first))
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:watchstep:problem:too-large")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
    assert recorded.status("GET", "/healthz") == 200
    assert sql(recorded, "SELECT count(*) FROM statistics").json()["rows"] == [[3 * STEPS]]


def stopped_children(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[int]:
    """From now on, processes that are sent a query stop at once; their ids."""
    real, stopped = Child.send, queue.SimpleQueue[int]()

    def send(self: Child, request: dict[str, Any], *others: Any) -> None:
        if request.get("ask") == "select":
            os.kill(self.pid, signal.SIGSTOP)
            stopped.put(self.pid)
        real(self, request, *others)

    monkeypatch.setattr(Child, "send", send)
    return stopped


@pytest.mark.ci
def test_the_service_responds_during_a_query(recorded: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api = recorded.with_settings(query_seconds=60.0)
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        stopped = stopped_children(patch)
        first = [threads.submit(sql, api, "SELECT count(*) FROM statistics") for _ in range(2)]
        waiting = [stopped.get(timeout=60) for _ in first]
        try:
            third = sql(api, "SELECT 1")
            assert (third.status_code, third.headers["retry-after"]) == (429, "1"), third.text
            assert "SQL queries of project vision" in third.json()["detail"]
            for place in ("/healthz", "/readyz", RUN, f"{RUN}/series?tensor=loss&figure=mean"):
                assert api.status("GET", place) == 200, place
        finally:
            for child in waiting:
                os.kill(child, signal.SIGCONT)
        assert [found.result(60).json()["rows"] for found in first] == [[[3 * STEPS]]] * 2
    assert sql(api, "SELECT 1").status_code == 200


@pytest.mark.ci
def test_a_query_that_ignores_interrupts_is_killed_with_its_process(
    recorded: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watchstep_rules.custom.sql.process._GRACE_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        stopped_children(patch)
        answer = sql(recorded.with_settings(query_seconds=0.5), "SELECT 1")
    assert (answer.status_code, answer.json()["type"]) == (413, "urn:watchstep:problem:too-large")
    assert "was ended" in answer.json()["detail"]
    assert sql(recorded, "SELECT 1 AS one").json()["rows"] == [[1]]


@pytest.mark.ci
def test_a_query_gets_503_if_no_process_can_be_started(
    recorded: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    POOL.close()
    monkeypatch.setattr("watchstep_rules.custom.sandbox.process._popen", refused)
    answer = sql(recorded, "SELECT 1")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


UNWRITABLE = [
    "SELECT '290309-12-22 (BC)'::DATE AS day",
    "SELECT '5881580-07-10'::DATE AS day",
    "SELECT TIMESTAMP '294247-01-10 04:00:54' AS day",
    "SELECT max(DATE '5881580-07-10') AS day FROM statistics",
]


@pytest.mark.ci
def test_a_value_without_a_json_form_is_reported_with_its_column(recorded: Api) -> None:
    for query in UNWRITABLE:
        answer = sql(recorded, query)
        assert answer.status_code == 422, (query, answer.text)
        assert "column 'day' of type" in answer.json()["detail"]
        arrow = recorded.call("POST", f"{RUN}/sql", {"query": query}, headers=ARROW)
        assert arrow.status_code == 200, arrow.text
        assert pa.ipc.open_stream(io.BytesIO(arrow.content)).read_all().num_rows == 1
    odd = sql(recorded, "SELECT DATE '2026-01-31' AS a, TIMESTAMP '2026-01-31 12:00:00' AS b")
    assert odd.json()["rows"] == [["2026-01-31", "2026-01-31 12:00:00"]]
    zoned = sql(
        recorded,
        "SELECT TIMESTAMPTZ '2026-01-31 12:00:00+02' AS a, CAST('[2026-01-31 12:00:00+02]' AS TIMESTAMPTZ[]) AS b",
    )
    at = "2026-01-31 10:00:00+00:00"
    assert zoned.json()["rows"] == [[at, [at]]]


@pytest.mark.ci
def test_a_too_large_response_is_refused_before_it_is_read(recorded: Api) -> None:
    wide = f"SELECT {','.join(['1'] * 4900)} FROM statistics, (SELECT 1 FROM statistics LIMIT 12)"
    joined = " || ".join(["s"] * 60)
    long = f"SELECT {joined} AS s FROM (SELECT {joined} AS s FROM (SELECT tensor AS s FROM statistics))"
    for query in (wide, long):
        answer = sql(recorded, query, 10_000)
        assert (answer.status_code, answer.json()["type"]) == (413, "urn:watchstep:problem:too-large")


def test_a_series_over_its_budget_is_refused(recorded: Api) -> None:
    bounded = recorded.with_settings(query_mb=16)
    bounded = bounded.with_settings(query_seconds=1e-9)
    answer = bounded.call("GET", f"{RUN}/series?tensor=loss&figure=mean")
    assert answer.status_code in {413, 429}


def test_concurrent_queries_of_a_project_are_limited(recorded: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api = recorded.with_settings(project_queries=1)
    entered, go = threading.Event(), threading.Event()
    real: Callable[..., Any] = opened_module.OpenedRuns._entry

    def slow(self: Any, location: str) -> Any:
        entered.set()
        assert go.wait(60)
        return real(self, location)

    monkeypatch.setattr(opened_module.OpenedRuns, "_entry", slow)
    place = f"{RUN}/series?tensor=loss&figure=mean"
    first: list[int] = []
    thread = threading.Thread(target=lambda: first.append(api.status("GET", place)))
    thread.start()
    assert entered.wait(60)
    second = api.call("GET", place)
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    # These read the rule states of a run, of up to 32 MB for each attempt.
    for query in (RUN, f"{RUN}/rules", f"{RUN}/overview", f"{RUN}/alerts/{'0' * 32}/page", TABLE):
        assert api.status("GET", query) == 429, query
    assert api.status("GET", RUNS) == 200  # what is no query is answered meanwhile
    go.set()
    thread.join(60)
    assert first == [200]
    for query in (place, RUN, f"{RUN}/rules", f"{RUN}/overview", TABLE):
        assert api.status("GET", query) == 200


def test_queries_of_all_projects_leave_threads_for_other_requests() -> None:
    slots = Slots(per_project=4, total=8)
    with ExitStack() as stack:
        for project in ("a", "a", "a", "a", "b", "b", "b", "b"):
            stack.enter_context(slots.acquire(project))
        with pytest.raises(RequestRefusedError, match="of all projects"), slots.acquire("c"):
            pass
    with slots.acquire("c"):
        pass


@pytest.mark.ci
def test_new_data_is_visible(recorded: Api) -> None:
    assert get(recorded, "series", tensor="loss", figure="mean")["lines"][0]["last_step"][-1] == STEPS - 1
    recorded.driven.recording().write(3, STEPS, STEPS + 9)
    assert get(recorded, "series", tensor="loss", figure="mean")["lines"][0]["last_step"][-1] == STEPS + 9


MISSING = [
    ("series?tensor=nothing&figure=l2", 404),
    ("series?tensor=loss&figure=nothing", 422),
    ("series?tensor=loss&figure=l2&mode=other", 422),
    ("series?tensor=loss&figure=l2&points=0", 422),
    ("heatmap?figure=l2", 422),
    ("heatmap?figure=l2&collection=nothing", 422),
    ("heatmap?figure=l2&tensor=nothing", 404),
    ("histogram?tensor=loss&worker=7", 404),
    ("tensors?page_token=WzFd", 422),
]


def test_what_is_not_there_is_reported(recorded: Api) -> None:
    for place, status in MISSING:
        answer = recorded.call("GET", f"{RUN}/{place}")
        assert answer.status_code == status, (place, answer.text)


def test_a_run_without_data_is_not_found(api: Api) -> None:
    api.driven.register()
    assert api.status("GET", f"{RUN}/series?tensor=loss&figure=mean") == 404
    assert api.call("GET", f"{RUN}/snapshots").json() == {"next_page_token": None, "snapshots": []}


@pytest.mark.ci
def test_a_damaged_segment_is_skipped_and_a_damaged_document_is_reported(
    recorded: Api, folder_store: Store
) -> None:
    (key,) = [
        entry.key for entry in folder_store.entries("vision/run-1/stats/") if "/0000000001-" in entry.key
    ]
    folder_store.put(key, b"PAR1 nonsense PAR1")
    (line,) = get(recorded, "series", tensor="loss", figure="mean")["lines"]
    assert len(line["step"]) == 200
    folder_store.put("vision/run-1/run.json", b"{")
    fresh = recorded.with_settings()
    assert fresh.status("GET", f"{RUN}/series?tensor=loss&figure=mean") == 502


def damaged_counts(recording: Recording, seq: int) -> SegmentKey:
    """A segment whose bytes are whole, with a number of elements that cannot be."""
    key = recording.write(seq, seq * 100, seq * 100 + 99)
    block = segment.decode(recording.store.get(key.path), key.path)
    broken = replace(block, statistics=replace(block.statistics, zero=block.statistics.zero - 1))
    recording.store.put(key.path, segment.encode(broken))
    return key


def misnamed(recording: Recording, seq: int) -> SegmentKey:
    """A segment whose steps differ from those in its name."""
    key = recording.key(seq, seq * 100, seq * 100 + 99)
    recording.store.put(key.path, recording.encoded(0, 99))
    return key


@pytest.mark.parametrize("damage", [damaged_counts, misnamed])
def test_segments_that_the_evaluator_rejects_are_in_no_response(
    api: Api, damage: Callable[[Recording, int], SegmentKey]
) -> None:
    recording = api.driven.recording().begin()
    good, bad = recording.write(0, 0, 99), damage(recording, 1)
    run_id = api.driven.register()
    shown = "SELECT max(step), sum(zero) >= 0 FROM statistics"
    assert sql(api, shown).json()["rows"] == [
        [99, True]
    ]  # found by the reader itself, of the columns that it reads
    api.driven.judge(run_id, good, bad)
    assert api.driven.segments(run_id)["w0", 1] == "corrupt"
    # Columns that are not read are not checked: these rows are omitted because the evaluator has rejected them.
    fresh = api.with_settings()
    assert sql(fresh, "SELECT max(step) FROM statistics").json()["rows"] == [[99]]
    (line,) = get(fresh, "series", tensor="loss", figure="mean", points=1)["lines"]
    assert line["last_step"] == [99]


def test_tensors_that_deviate_at_an_onset_are_evidence(recorded: Api) -> None:
    found = get(recorded, "deviations", attempt="a1", step=200)
    (deviation,) = found["deviations"]
    assert (deviation["tensor"], deviation["step"], deviation["value"], found["superseded"]) == (
        GRADIENT,
        200,
        1e6,
        False,
    )
    assert deviation["low"] < 3.0 < deviation["high"] < deviation["value"]
    assert deviation["spreads"] > 100
    assert get(recorded, "deviations", attempt="a1", step=150)["deviations"] == []


def test_steps_that_a_later_attempt_repeated_are_no_evidence(recorded: Api) -> None:
    again = recorded.driven.recording(attempt="a2")
    again.write(0, 150, 250, taken_ns=10**12)
    found = get(recorded, "deviations", attempt="a1", step=200)
    assert (found["deviations"], found["superseded"]) == ([], True)
