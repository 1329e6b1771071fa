from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.errors import FormatError
from watchstep.format.capture_needs import MAX_NEEDS, CaptureNeed
from watchstep.format.control import MAX_SNAPSHOTS, ControlDocument, SnapshotRequest, StopRequest
from watchstep.format.tensors import MODES

whole = st.integers(0, 2**63 - 1)
needs = st.builds(
    CaptureNeed,
    st.text(max_size=8),
    st.lists(st.text(max_size=8), max_size=3).map(tuple),
    st.lists(st.text(max_size=8), max_size=3).map(tuple),
    st.integers(0, 2**31 - 1),
    st.lists(st.sampled_from(MODES), max_size=4).map(tuple),
)
stops = st.builds(StopRequest, st.text(max_size=8), whole, st.text(max_size=8), st.text(max_size=8))
documents = st.builds(
    ControlDocument,
    whole,
    st.none() | stops,
    st.lists(st.builds(SnapshotRequest, st.text(max_size=8), whole, st.text(max_size=8)), max_size=3).map(
        tuple
    ),
    st.lists(st.tuples(st.text(max_size=8), st.integers(1, 10**6)), max_size=3).map(tuple),
    st.text(max_size=8),
    st.text(max_size=8),
    st.lists(needs, max_size=3).map(tuple),
)


@given(documents)
def test_a_document_reads_back(document: ControlDocument) -> None:
    assert ControlDocument.decode(document.encode()) == document
    assert ControlDocument.from_data(document.as_data()) == document


def test_a_stop_is_the_next_version_and_bars_new_attempts() -> None:
    stop = StopRequest("a1", 120, "NaN in conv1", "event-1")
    document = ControlDocument(version=4).with_stop(stop)
    assert document == ControlDocument(version=5, stop=stop, tombstone="NaN in conv1")


def test_a_snapshot_is_requested_once_and_of_its_attempt() -> None:
    document = ControlDocument(version=4)
    for number in range(MAX_SNAPSHOTS + 2):
        document = document.with_snapshot(SnapshotRequest(f"s{number}", number, "a1" if number % 2 else "a2"))
    assert document.with_snapshot(document.snapshots[-1]) is document
    assert (document.version, len(document.snapshots)) == (4 + MAX_SNAPSHOTS + 2, MAX_SNAPSHOTS)
    document = document.with_snapshot(SnapshotRequest("all", 9))
    assert {request.id for request in document.requests_of("a1")} == {
        "all",
        *(f"s{number}" for number in range(3, MAX_SNAPSHOTS + 2, 2)),
    }


def test_only_the_newest_snapshot_requests_are_read() -> None:
    requests = tuple(SnapshotRequest(f"s{number}", number) for number in range(9000))
    document = ControlDocument.decode(ControlDocument(1, snapshots=requests).encode())
    assert document.snapshots == requests[-MAX_SNAPSHOTS:]


def test_what_changes_nothing_is_no_new_version() -> None:
    stop = StopRequest("a1", 120, "NaN in conv1", "event-1")
    document = ControlDocument(version=4).with_stop(stop).with_cadence({"weights": 5, "biases": 7})
    assert document.cadence == (("biases", 7), ("weights", 5))
    assert document.with_cadence({"biases": 7, "weights": 5}) is document
    again = document.without_tombstone()
    assert (again.version, again.tombstone, again.stop) == (7, "", stop)
    assert again.without_tombstone() is again


def test_what_is_omitted_asks_nothing() -> None:
    assert ControlDocument.decode(b'{"version": 3}') == ControlDocument(version=3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"{",
        b"[]",
        b"3",
        b"[" * 50_000,
        b"{}",
        *(
            json.dumps({"version": 1, **lie}).encode()
            for lie in (
                {"version": -1},
                {"version": 1.5},
                {"version": float("inf")},
                {"version": True},
                {"version": "1"},
                {"version": 2**63},
                {"stop": "now"},
                {"stop": {"attempt": "a"}},
                {"stop": {"attempt": "a", "step": -1, "reason": ""}},
                {"snapshots": [{"id": "x"}]},
                {"snapshots": 3},
                {"cadence": [["weights"]]},
                {"cadence": [["weights", 0]]},
                {"needs": "all"},
                {"needs": {"rule": "a"}},
                {"needs": [3]},
                {"needs": [{"rule": 3}]},
                {"needs": [{"rule": ["a"]}]},
                {"needs": [{"rule": "a" * 1001}]},
                {"needs": [{"rule": "a", "collections": [3]}]},
                {"needs": [{"rule": "a", "collections": ["a"] * 101}]},
                {"needs": [{"rule": "a", "probes": ["p" * 1001]}]},
                {"needs": [{"rule": "a", "every": -1}]},
                {"needs": [{"rule": "a", "every": 2**31}]},
                {"needs": [{"rule": "a", "every": True}]},
                {"needs": [{"rule": "a", "every": "5"}]},
                {"needs": [{"rule": "a", "every": 1.0}]},
                {"needs": [{"rule": "a", "modes": ["test"]}]},
                {"needs": [{"rule": "a", "modes": [["train"]]}]},
            )
        ),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"control document: .*\n  hint: let the service rewrite it"):
        ControlDocument.decode(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*vars(ControlDocument()), *CaptureNeed.__dataclass_fields__]), inner
        )
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(list(vars(ControlDocument()))), json_values))
def test_any_json_is_read_or_refused(data: dict[str, Any]) -> None:
    try:
        document = ControlDocument.decode(json.dumps(data).encode())
    except FormatError:
        return
    assert ControlDocument.decode(document.encode()) == document


def test_needs_that_change_nothing_are_no_new_version() -> None:
    need = CaptureNeed("a", ("weights",), (), 10, ("train",))
    document = ControlDocument(version=4).with_needs([need])
    assert (document.version, document.needs) == (5, (need,))
    assert document.with_needs((need,)) is document
    again = ControlDocument.decode(document.encode())
    assert again.with_needs([need]) is again
    assert document.with_needs([]) == ControlDocument(version=6)
    assert document.with_stop(StopRequest("a1", 3, "NaN")).needs == (need,)


def test_the_first_needs_count_if_there_are_too_many() -> None:
    many = [CaptureNeed(f"r{number}", ("weights",), (), 10) for number in range(MAX_NEEDS + 5)]
    document = ControlDocument().with_needs(many)
    assert document.needs == tuple(many[:MAX_NEEDS])
    assert document.with_needs(many) is document
    data = {"version": 1, "needs": [asdict(need) for need in many]}
    assert ControlDocument.from_data(data).needs == document.needs


def test_a_tombstone_lets_one_attempt_pass_until_it_is_stopped_itself() -> None:
    stopped = ControlDocument().with_stop(StopRequest("a1", 3, "NaN"))
    assert ControlDocument().admits("a2")
    assert not stopped.admits("a2")
    admitting = stopped.with_admitted("a2")
    assert (admitting.version, admitting.with_admitted("a2")) == (stopped.version + 1, admitting)
    passing = [name for name in ("a1", "a1-r1", "a2", "a2-r1", "a22", "a3") if admitting.admits(name)]
    assert passing == ["a2", "a2-r1"]
    assert ControlDocument.decode(admitting.encode()) == admitting
    assert not admitting.with_stop(StopRequest("a2", 9, "NaN again")).admits("a2")
    assert admitting.without_tombstone() == ControlDocument(admitting.version + 1, stop=stopped.stop)


def test_a_document_of_before_there_were_agreements_is_agreed_on() -> None:
    data = {"version": 1, "stop": {"attempt": "a1", "step": 3, "reason": "NaN"}}
    document = ControlDocument.from_data(data)
    assert document.stop == StopRequest("a1", 3, "NaN")
    assert document.stop.agreed
