"""Keys of objects, and descriptions of tensors."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from watchstep.errors import BadNameError, FormatError
from watchstep.format import layout
from watchstep.format.layout import FlightKey, SegmentKey, SnapshotKey, WriterId
from watchstep.format.tensors import TensorInfo

# Keys


BAD_NAMES = (
    "", ".", "..", "../x", "a/b", "a..b", "-a", "_a", ".a", "a b", "a\n", "a" * 129, "schrittmaß", "\u0663", "a%2fb", "a\\b",
)  # fmt: skip
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True).filter(
    lambda name: ".." not in name
)
numbers = st.integers(0, 10**18 - 1)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_could_leave_its_place_is_refused_with_its_kind_and_a_mend(name: str) -> None:
    with pytest.raises(BadNameError) as caught:
        layout.check_name("run", name)
    assert caught.value.what.startswith(f"run name {name!r}")
    assert "letters, digits" in caught.value.hint


@pytest.mark.parametrize("name", ["a", "7", "run-2.1_b", "a" * 128])
def test_plain_names_are_taken_as_they_are(name: str) -> None:
    assert layout.check_name("run", name) == name


def test_keys_have_the_documented_layout() -> None:
    writer = WriterId("a1", "node0", "w0")
    assert layout.run_prefix("vision", "r1") == "vision/r1/"
    assert SegmentKey(writer, 7, 0, 99).path == "stats/a1/node0/w0/0000000007-0-99.arrow"
    assert SnapshotKey("a1", 3, 120, "train").path == "tensors/a1/3/120-train.safetensors"
    assert layout.attempt_document("a1") == "attempts/a1.json"
    assert layout.end_document("a1", 3) == "end/a1/3.json"


@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_key_is_made_of_a_bad_name(name: str) -> None:
    makers: tuple[Callable[[], str], ...] = (
        lambda: layout.run_prefix(name, "run"),
        lambda: layout.run_prefix("project", name),
        lambda: layout.attempt_document(name),
        lambda: layout.end_document(name, 0),
        lambda: WriterId(name, "node", "writer").prefix,
        lambda: WriterId("attempt", name, "writer").prefix,
        lambda: SegmentKey(WriterId("attempt", "node", name), 0, 0, 0).path,
        lambda: SnapshotKey(name, 0, 0, "train").path,
    )
    for make in makers:
        with pytest.raises(BadNameError):
            make()


@given(names, names, names, st.integers(0, 10**10 - 1), numbers, numbers)
def test_a_segment_key_reads_back(
    attempt: str, node: str, writer: str, seq: int, first: int, last: int
) -> None:
    key = SegmentKey(WriterId(attempt, node, writer), seq, min(first, last), max(first, last))
    assert SegmentKey.parse(key.path) == key


@given(names, numbers, numbers, st.sampled_from(["train", "eval", "predict", "global"]))
def test_a_snapshot_key_reads_back(attempt: str, worker: int, step: int, mode: str) -> None:
    key = SnapshotKey(attempt, worker, step, mode)
    assert SnapshotKey.parse(key.path) == key


@given(names, numbers, numbers, numbers)
def test_a_flight_key_reads_back(attempt: str, worker: int, first: int, last: int) -> None:
    key = FlightKey(attempt, worker, min(first, last), max(first, last))
    assert FlightKey.parse(key.path) == key


@pytest.mark.parametrize(
    "path",
    [
        "",
        "stats/a/n/w/0000000007-0-99.arrow/",
        "stats/a/n/w/0000000007-0-99.arrow\n",
        "stats/a/n/w/0000000007-0-99.arrow#1",
        "stats/a/n/w/0000000007-0-99.parquet",
        "stats/a/n/w/0000000007-0-99",
        "stats/a/n/0000000007-0-99.arrow",
        "stats/a/n/w/x/0000000007-0-99.arrow",
        "stats/../n/w/0000000007-0-99.arrow",
        "stats/a/n/-w/0000000007-0-99.arrow",
        "stats/a/n/w/7-0-99.arrow",
        "stats/a/n/w/0000000007-5-4.arrow",
        "stats/a/n/w/0000000007-00-99.arrow",
        "stats/a/n/w/0000000007--1-99.arrow",
        "stats/a/n/w/000000000\u0667-0-99.arrow",
        "tensors/a/3/120-train.safetensors",
    ],
)
def test_what_is_no_segment_key_is_refused(path: str) -> None:
    with pytest.raises(FormatError, match="is not a segment"):
        SegmentKey.parse(path)


@pytest.mark.parametrize(
    "path",
    [
        "tensors/../3/120-train.safetensors",
        "tensors/a/03/120-train.safetensors",
        "tensors/a/3/120-test.safetensors",
        "tensors/a/3/120-train.pt",
        "tensors/a/rank3/120-train.safetensors",
    ],
)
def test_what_is_no_snapshot_key_is_refused(path: str) -> None:
    with pytest.raises(FormatError, match="is not a snapshot"):
        SnapshotKey.parse(path)


@given(st.text(max_size=60))
def test_any_text_either_is_a_key_that_prints_back_or_is_refused(text: str) -> None:
    for kind, prefix in ((SegmentKey, "stats/"), (SnapshotKey, "tensors/"), (FlightKey, "flights/")):
        try:
            key = kind.parse(prefix + text)
        except FormatError:
            continue
        assert key.path == prefix + text


# Descriptions of tensors


words = st.text(max_size=6)
infos = st.builds(
    TensorInfo,
    name=words,
    collections=st.lists(words, max_size=3).map(tuple),
    role=words,
    module=words,
    module_type=words,
    order=st.integers(0, 2**31),
    shape=st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
    dtype=words,
    optimizer=words,
    derived=st.booleans(),
)


@given(infos)
def test_a_description_reads_back(info: TensorInfo) -> None:
    assert TensorInfo.from_data(json.loads(json.dumps(info.as_data()))) == info
    assert TensorInfo.from_data(info.as_data() | {"later": 1}) == info


def test_only_name_collections_and_role_are_needed() -> None:
    assert TensorInfo.from_data({"name": "w", "collections": ["weights"], "role": "weight"}) == TensorInfo(
        "w", ("weights",), "weight"
    )


@pytest.mark.parametrize("lie", [{"shape": [1.5]}, {"order": -1}, {"name": None}, {"derived": "no"}])
def test_lies_are_refused(lie: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError), match="tensor"):
        TensorInfo.from_data({"name": "w", "collections": [], "role": "weight"} | lie)
