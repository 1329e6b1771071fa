"""Queries behind the pages: forms, opened runs, lanes of rules, and events of a run."""

from __future__ import annotations

import csv
import io
import json
import re
import threading
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.infra.compose import ROOT
from tests.services.recording import Recording
from watchstep.format.catalogue import catalogue_bytes
from watchstep.format.layout import RUN_DOCUMENT, SCHEMA_VERSION
from watchstep.format.tensors import TensorInfo
from watchstep.reading.budget import ReadBudget
from watchstep.reading.run import Run
from watchstep.store.store import Store
from watchstep_rules.engine.judge import RuleHealth, RuleMemory
from watchstep_services.api.queries import state
from watchstep_services.api.queries.forms import _FORMULA, encode_table
from watchstep_services.api.queries.rule_lanes import LaneRows, lanes_of
from watchstep_services.api.queries.run_events import RunEvent, mark_of, visible_steps
from watchstep_services.api.queries.state import OpenedRuns
from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.api.schemas.run_pages import RuleLane
from watchstep_services.db.models import RuleConfigRow, RunRow

CONFIG = RuleConfigRow(
    id=1, run_id=1, origin="owner", name="loss_spike", rule="loss_spike", data={"rule": "loss_spike"}
)
FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"]
TEXTS = ["model.weight", "a=1", "a\n=1", "'=1", "", None]
TABLE = pa.table({"tensor": pa.array([*FORMULAS, *TEXTS], pa.string()), "value": [-1.5] * 12})


class NotedLock:
    """A lock that notes when somebody begins to wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.awaited = threading.Event()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        if not blocking:
            return False
        self.awaited.set()
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()


@pytest.fixture
def stores(folder_store: Store) -> dict[str, Store]:
    names = ("a", "b", "c")
    for name in names:
        Recording(folder_store, name).begin().write(0, 0, 3)
    return {name: folder_store.child(f"vision/{name}") for name in names}


def test_documents_of_opened_runs_count_as_memory(
    stores: dict[str, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's document of some megabytes may take a hundred as objects."""
    opened = OpenedRuns()
    monkeypatch.setattr(state, "_MOST_BYTES", 100_000)
    for name, store in stores.items():
        content = json.loads(store.get(RUN_DOCUMENT))
        content["config"] = {"many": [[]] * (1_000 if name == "b" else 0)}
        store.put(RUN_DOCUMENT, json.dumps(content).encode())
        with opened.open(store, ReadBudget(10, 100)) as run:
            first = run
        with opened.open(store, ReadBudget(10, 100)) as again:
            assert (again is first) == (name != "b")


def test_descriptions_of_tensors_of_opened_runs_count_as_memory(
    stores: dict[str, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest of some hundred kilobytes may name a hundred megabytes of tensors."""
    opened = OpenedRuns()
    monkeypatch.setattr(state, "_MOST_BYTES", 10_000_000)
    infos = tuple(TensorInfo(f"{number}.{'a' * 3000}", ("weights",), "weight") for number in range(4000))
    attempt = {
        "attempt": "b",
        "started_ns": 0,
        "catalogue": catalogue_bytes(infos).decode(),
        "segments": [],
        "recent": None,
    }
    manifest = {
        "schema": SCHEMA_VERSION,
        "generation": 1,
        "created_ns": 1,
        "sources": [],
        "attempts": [attempt],
    }
    stores["b"].put("compacted/0000000001/manifest.json", json.dumps(manifest).encode())
    for name, store in stores.items():
        with opened.open(store, ReadBudget(10, 100)) as run:
            first = run
        with opened.open(store, ReadBudget(10, 100)) as again:
            assert (again is first) == (name != "b")


@pytest.mark.parametrize("busy", ["a", "b", "c"])
def test_a_query_that_waits_for_one_run_leaves_the_others_to_other_queries(
    stores: dict[str, Store], busy: str
) -> None:
    opened, lock = OpenedRuns(), NotedLock()
    opened._entry(stores[busy].location).lock = lock  # type: ignore[assignment]
    compared: list[list[str]] = []

    def compare() -> None:
        with opened.open_several(stores, ReadBudget(60, 100)) as runs:
            assert all(isinstance(run, Run) for run in runs.values())
            compared.append(list(runs))

    with opened.open(stores[busy], ReadBudget(60, 100)):
        thread = threading.Thread(target=compare)
        thread.start()
        assert lock.awaited.wait(60)
        for name in {*stores} - {busy}:
            with opened.open(stores[name], ReadBudget(5, 100)) as run:
                assert run.document.run == name
        assert not compared
    thread.join(60)
    assert compared == [["a", "b", "c"]]


def test_a_query_without_time_gets_none_of_its_runs(stores: dict[str, Store]) -> None:
    opened = OpenedRuns()
    with (
        opened.open(stores["b"], ReadBudget(60, 100)),
        pytest.raises(RequestRefusedError, match="another query of one of these runs"),
        opened.open_several(stores, ReadBudget(0, 100)),
    ):
        pass
    with opened.open_several(stores, ReadBudget(60, 100)) as runs:
        assert list(runs) == ["a", "b", "c"]


def event(number: int, kind: str, step: int, attempt: str = "a1", **data: Any) -> RunEvent:
    named = {"attempt": attempt, "step": step, "name": "loss_spike", **data}
    return RunEvent(number, str(number), kind, number, named)


def lane(*events: RunEvent, first_steps: dict[str, int] | None = None) -> RuleLane:
    starts = first_steps or {"a1": 0}
    memory = RuleMemory(health=RuleHealth.OK, evaluated_rows=1)
    rows = LaneRows([CONFIG], {(1, attempt): memory for attempt in starts}, {})
    run = RunRow(id=1, attempt=list(starts)[-1], health={})
    (found,) = lanes_of(run, rows, events, visible_steps(starts))
    return found


def states(found: RuleLane) -> list[tuple[str, int, int | None]]:
    return [(part.state, part.first, part.last) for part in found.intervals]


def test_an_error_covers_the_states_meanwhile() -> None:
    found = lane(
        event(1, "alert.firing", 10),
        event(2, "rule.error", 20, problem="division by zero"),
        event(3, "alert.resolved", 25),
        event(4, "rule.ok", 30),
    )
    assert states(found) == [("ok", 0, 9), ("firing", 10, 19), ("error", 20, 29), ("resolved", 30, None)]
    assert found.intervals[2].message == "division by zero"


def test_a_revision_moves_the_beginning() -> None:
    found = lane(
        event(1, "alert.firing", 40, since_step=38),
        event(2, "alert.revised", 30, since_step=27),
        event(3, "alert.resolved", 60),
    )
    assert states(found) == [("ok", 0, 26), ("pending", 27, 29), ("firing", 30, 59), ("resolved", 60, None)]


def test_a_rule_without_data_and_a_removed_rule() -> None:
    assert states(lane(event(1, "rule.no_data", 1000))) == [("no_data", 0, None)]
    run = RunRow(id=1, attempt="a1", health={})
    (former,) = lanes_of(
        run,
        LaneRows([], {}, {}),
        [event(1, "alert.firing", 5, severity="critical")],
        visible_steps({"a1": 0}),
    )
    assert (former.name, former.origin, former.severity) == ("loss_spike", "", "critical")
    assert states(former) == [("firing", 5, None)]


KINDS = ("alert.firing", "alert.revised", "alert.resolved", "rule.error", "rule.ok", "rule.no_data")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.integers(0, 50),
            st.integers(0, 50),
            st.sampled_from(("a1", "a2", "a3")),
        ),
        max_size=12,
    ),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
)
def test_intervals_are_in_order_do_not_overlap_and_stay_within_the_shown_steps(
    changes: list[tuple[str, int, int, str]], starts: list[int]
) -> None:
    events = [
        event(number, kind, step, attempt, since_step=min(since, step))
        for number, (kind, step, since, attempt) in enumerate(changes)
    ]
    first_steps = {f"a{number + 1}": first for number, first in enumerate(starts)}
    visible = visible_steps(first_steps)
    found = lane(*events, first_steps=first_steps)
    before = -1
    for part in found.intervals:
        assert part.first > before
        assert visible[part.attempt].contains(part.first)
        before = 10**9 if part.last is None else part.last
        assert part.last is None or (part.last >= part.first and visible[part.attempt].contains(part.last))
    assert found.intervals[0].first == min(steps.first for steps in visible.values())


def marked(data: dict[str, Any]) -> tuple[str, list[str], str]:
    mark = mark_of(RunEvent(1, "e", "alert.firing", 0, data), {}, "a1")
    return mark.tensor, mark.causes, mark.inhibited_by


def test_the_origin_comes_before_other_causes() -> None:
    finding = {
        "tensor": "fc.bias:gradient",
        "origin": "relu:output",
        "upstream": ["model:input", "relu:output"],
    }
    assert marked({"finding": finding, "inhibited_by": "nan_or_inf"}) == (
        "fc.bias:gradient",
        ["relu:output", "model:input"],
        "nan_or_inf",
    )


def test_a_tensor_is_not_its_own_cause() -> None:
    finding = {"tensor": "relu:output", "origin": "relu:output", "upstream": []}
    assert marked({"finding": finding}) == ("relu:output", [], "")


@pytest.mark.parametrize("finding", [None, [], "x", {"tensor": 3, "origin": None, "upstream": [1, {}, ""]}])
def test_findings_of_other_shapes_have_no_tensors(finding: Any) -> None:
    assert marked({"finding": finding}) == ("", [], "")


def test_long_names_and_many_causes_are_limited() -> None:
    tensor, causes, _ = marked({"finding": {"tensor": "t" * 9000, "upstream": [f"{n}" for n in range(99)]}})
    assert (len(tensor), len(causes)) == (4096, 8)


def test_texts_in_csv_are_no_formulas() -> None:
    rows = list(csv.DictReader(io.StringIO(encode_table(TABLE, "csv", "t").content.decode(), newline="")))
    shown = [f"'{text}" for text in FORMULAS] + [text or "" for text in TEXTS]
    assert [row["tensor"] for row in rows] == shown
    assert {row["value"] for row in rows} == {"-1.5"}


def test_texts_in_parquet_are_unchanged() -> None:
    assert pq.read_table(pa.BufferReader(encode_table(TABLE, "parquet", "t").content)) == TABLE


def test_the_page_has_the_same_formulas() -> None:
    source = (ROOT / "web" / "src" / "components" / "download.ts").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"/\^(\[.*?\])/\.test\(value\)", source)
    assert pattern == _FORMULA.removeprefix(r"\A(").removesuffix(")")
