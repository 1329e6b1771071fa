from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import traced_memory
from tests.sdk.format.arrow_streams import Streams
from tests.sdk.format.blocks import Row, block_of, rows_of
from tests.sdk.reading.stored import FIRST, LOSS, SECOND, new_run, small_run, some_rows, write
from watchstep import open_run
from watchstep.errors import FormatError
from watchstep.format import segment
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.format.parquet.table import to_block, to_table
from watchstep.format.segment_checks import CONSTANT, HISTOGRAM_COLUMNS
from watchstep.format.statistics import COUNT_COLUMNS
from watchstep.format.tensors import Placement
from watchstep.reading import arrow_object, parquet_object
from watchstep.reading.arrow_object import ArrowObject, open_segment
from watchstep.reading.budget import DecodingMemory, LongTexts, OverBudgetError, ReadBudget
from watchstep.reading.columns import Selection
from watchstep.reading.compaction import compact
from watchstep.reading.parquet_object import Catalogues
from watchstep.store.store import Store

# One segment of a run: its header is read first, then only the requested columns.


KEY = SegmentKey(WriterId("a", "node", "w0"), 0, 0, 11).path
BLOCK = block_of(
    [
        Row(step, info, [step + 1.0, -3e-5 * worker, 2.0**index], worker=worker, place=Placement(worker, 2), probes={"dead": 0.5})
        for step in range(12)
        for worker in range(2)
        for index, info in enumerate((LOSS, FIRST, SECOND))
    ]
)  # fmt: skip
WHOLE = segment.encode(BLOCK)
HEADER = segment.read_header(WHOLE, "whole")


def stored(folder: Path, data: bytes = WHOLE) -> ArrowObject:
    store = new_run(folder)
    store.put(KEY, data)
    return open_segment(store, KEY, len(data), Catalogues())


class Requests:
    """The ranges that are fetched from stores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, int]] = []
        get_range, get_ranges = Store.get_range, Store.get_ranges

        def one_range(store: Store, key: str, start: int, length: int) -> bytes:
            self.ranges.append((start, length))
            return get_range(store, key, start, length)

        def many_ranges(store: Store, key: str, ranges: Any) -> Any:
            self.ranges += ranges
            return get_ranges(store, key, ranges)

        monkeypatch.setattr(Store, "get_range", one_range)
        monkeypatch.setattr(Store, "get_ranges", many_ranges)

    def taken(self) -> list[tuple[int, int]]:
        ranges, self.ranges = self.ranges, []
        return ranges


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every object is read by ranges, and none of them is joined to another."""
    for module in (arrow_object, parquet_object):
        monkeypatch.setattr(module, "MAX_WHOLE_BYTES", 1000)
    monkeypatch.setattr(arrow_object, "_HEAD_BYTES", 1000)
    monkeypatch.setattr(parquet_object, "_TAIL_BYTES", 1000)
    monkeypatch.setattr(parquet_object, "_GAP", -1)


def test_an_object_states_its_rows_steps_columns_and_sizes(tmp_path: Path) -> None:
    arrow = stored(tmp_path)
    assert (arrow.rows, arrow.first, arrow.last, arrow.size) == (len(BLOCK), 0, 11, len(WHOLE))
    assert arrow.columns == {*to_table(BLOCK).column_names}
    assert arrow.catalogue == BLOCK.catalogue
    assert arrow.decoded_bytes(["step", "mean"]) == 16 * len(BLOCK)
    bins = len(BLOCK.statistics.histogram.bins)
    assert arrow.decoded_bytes(["histogram_counts"]) == 8 * len(BLOCK) + 10 * bins
    assert arrow.memory < 20_000


def test_a_header_states_which_columns_are_constant(tmp_path: Path) -> None:
    mixed = block_of([Row(0, FIRST, [1.0], mode="eval", worker=3), Row(1, LOSS, [2.0, 0.5], worker=4)])
    arrow = stored(tmp_path, segment.encode(mixed))
    places = {"shard_index": 0, "shard_count": 1, "replica": 0, "stage": 0}
    zeros = dict.fromkeys(("nan", "pos_inf", "neg_inf", "zero", "negative"), 0)
    assert arrow.constant == places | zeros
    run = open_run(small_run(tmp_path, "alike"))
    assert all(entry.object.constant.keys() >= set(CONSTANT) for entry in run.index.objects())


def test_constants_other_than_zero_and_places_are_read(tmp_path: Path) -> None:
    block = block_of([Row(step, FIRST, [1.0, float("nan")]) for step in range(3)])
    arrow = stored(tmp_path, segment.encode(block))
    assert arrow.header.constant["count"] == 2
    assert "count" not in arrow.constant
    assert arrow.read(["count", "nan"]).to_pydict() == {"count": [2] * 3, "nan": [1] * 3}


def test_segments_without_constants_are_read(tmp_path: Path) -> None:
    streams = Streams.read(WHOLE)
    for name, value in streams.facts["constant"].items():
        kind = pa.int8() if name in {"mode", "stage"} else pa.int64() if name == "count" else pa.int32()
        kind = pa.int64() if name in COUNT_COLUMNS else kind
        streams = streams.with_column(name, [value] * len(BLOCK), kind)
    arrow = stored(tmp_path, streams.encode())
    assert arrow.constant == {}
    assert rows_of(to_block(arrow.read(arrow.columns), arrow.catalogue, KEY)) == rows_of(BLOCK)


def test_columns_are_the_same_as_of_the_whole_table(tmp_path: Path) -> None:
    due, arrow = to_table(BLOCK), stored(tmp_path)
    for columns in (
        ["step"],
        ["mean", "tensor"],
        ["mode", "stage", "worker"],
        [*HISTOGRAM_COLUMNS],
        [*arrow.columns],
    ):
        table = arrow.read(columns)
        assert table.column_names == sorted(columns)
        assert table.equals(due.select(sorted(columns)))  # fmt: skip
    assert rows_of(to_block(arrow.read(arrow.columns), arrow.catalogue, KEY)) == rows_of(BLOCK)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("head", [8, 16, 1000, len(WHOLE)])
def test_a_large_object_is_read_by_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: int) -> None:
    monkeypatch.setattr(arrow_object, "_HEAD_BYTES", head)
    requests = Requests(monkeypatch)
    store = new_run(tmp_path)
    store.put(KEY, WHOLE)
    arrow = open_segment(store, KEY, len(WHOLE), Catalogues())
    assert requests.taken()[0] == (0, head)
    assert arrow.read(["mean"]).equals(to_table(BLOCK).select(["mean"]))
    assert requests.taken() == [HEADER.location("mean")]
    arrow.read(["step", "mode", "worker"])
    assert {*requests.taken()} == {HEADER.location(name) for name in ("step", "worker")}
    arrow.read(HISTOGRAM_COLUMNS)
    at = HEADER.histograms_at
    assert requests.taken() == [HEADER.location("histogram_length"), (at, len(WHOLE) - at)]
    assert rows_of(to_block(arrow.read(arrow.columns), arrow.catalogue, KEY)) == rows_of(BLOCK)


@pytest.mark.usefixtures("small_limits")
def test_columns_that_are_all_constants_need_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow = stored(tmp_path)
    requests = Requests(monkeypatch)
    assert arrow.read(["mode", "stage"]).equals(to_table(BLOCK).select(["mode", "stage"]))
    assert requests.taken() == []


@pytest.mark.usefixtures("small_limits")
def test_a_catalogue_that_is_longer_than_the_first_request_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = np.random.default_rng(0).integers(10**15, 10**16, 2000)
    infos = [replace(FIRST, name=f"layer{number}.weight") for number in names]
    block = block_of([Row(0, info, [1.0]) for info in infos])
    data = segment.encode(block)
    monkeypatch.setattr(arrow_object, "_HEAD_BYTES", 4096)
    requests = Requests(monkeypatch)
    arrow = stored(tmp_path, data)
    lengths = [length for _, length in requests.taken()]
    assert lengths[0] == 4096
    assert lengths == sorted(lengths)
    assert len(lengths) <= 5  # the lengths of two messages, and the messages
    assert lengths[-1] < len(data)
    assert arrow.catalogue == tuple(infos)
    assert arrow.read(["tensor"]).column("tensor").to_pylist() == [info.name for info in infos]
    # Neither the catalogue nor the facts are retained for each segment.
    assert arrow.header.packed_catalogue == b""
    assert (arrow.header.schema.metadata, arrow.header.batch.metadata) == ({}, {})


@pytest.mark.usefixtures("small_limits")
def test_a_header_that_claims_more_than_the_object_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_object, "_HEAD_BYTES", 64)
    requests = Requests(monkeypatch)
    for length in (len(WHOLE), 64 * 1024 * 1024):
        lie = WHOLE[:4] + (length // 8 * 8).to_bytes(4, "little") + WHOLE[8:]
        with pytest.raises(FormatError, match=r"is cut short: \d+ bytes are required"):
            stored(tmp_path, lie)
        assert sum(length for _, length in requests.taken()) <= len(WHOLE)


@pytest.mark.parametrize("size", [0, -1, 2**40])
def test_an_object_of_an_impossible_size_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(FormatError, match=f"segment {KEY} has {size} bytes instead of 1 to"):
        open_segment(new_run(tmp_path), KEY, size, Catalogues())


@pytest.mark.parametrize("limits", [True, False])
def test_an_object_that_is_shorter_than_listed_is_refused(
    tmp_path: Path, request: pytest.FixtureRequest, limits: bool
) -> None:
    if limits:
        request.getfixturevalue("small_limits")
    for data in (WHOLE[:100], WHOLE[:2000], WHOLE[:-1]):
        with pytest.raises(FormatError, match=r"is cut short|bytes instead of"):
            stored(tmp_path, data)
        store = Store.open(tmp_path).child("default/r")
        with pytest.raises(FormatError, match=f"segment {KEY} is shorter than listed|not a complete segment"):
            open_segment(store, KEY, len(WHOLE), Catalogues()).read(HISTOGRAM_COLUMNS)


def test_an_object_that_became_shorter_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(small_run(tmp_path))
    monkeypatch.setattr(Store, "get_ranges", lambda *_: [memoryview(b"\xff\xff\xff\xff")])
    assert run.series(FIRST.name, "max").num_rows == 0
    assert len(run.damaged) == 3
    assert run.index.objects() == []


@pytest.mark.parametrize("limits", [True, False])
def test_an_object_that_changed_since_its_header_was_read_is_refused(
    tmp_path: Path, request: pytest.FixtureRequest, limits: bool
) -> None:
    if limits:
        request.getfixturevalue("small_limits")
    arrow = stored(tmp_path)
    others = [segment.encode(block_of(some_rows(range(12), 3))), WHOLE[8:] + WHOLE[:8], bytes(len(WHOLE))]
    for other in others:
        arrow.store.put(KEY, other[: len(WHOLE)].ljust(len(WHOLE), b"\0"))
        with pytest.raises(FormatError, match=KEY):
            arrow.read(["max", "step"])


def test_an_object_that_changed_is_omitted_from_a_run(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of([Row(0, FIRST, [1.0])])])
    run = open_run(tmp_path / "default" / "r")
    (located,) = run.index.objects()
    arrow = located.object
    assert isinstance(arrow, ArrowObject)
    store.put(arrow.key, bytes(arrow.size))
    assert run.series(FIRST.name, "max").num_rows == 0
    assert arrow.key in run.damaged


def test_steps_other_than_the_stated_ones_and_unknown_tensors_are_refused(tmp_path: Path) -> None:
    streams = Streams.read(WHOLE)
    for lie in (streams.with_facts(last=5), streams.with_facts(first=3)):
        with pytest.raises(FormatError, match="holds steps 0 to 11"):
            stored(tmp_path, lie.encode()).read(["step"])
    for first, last in ((-1, 11), (5, 4), (10**30, 10**30 - 1)):
        with pytest.raises(FormatError, match=f"claims steps {first} to {last}"):
            stored(tmp_path, streams.with_facts(first=first, last=last).encode())
    for name, kind in (("tensor", pa.int32()), ("mode", pa.int8()), ("stage", pa.int8())):
        lie = streams.with_column(name, [100] * len(BLOCK), kind)
        with pytest.raises(FormatError, match=f"column {name} has the index of an unknown word"):
            stored(tmp_path, lie.encode()).read([name])


def test_a_segment_with_other_steps_than_its_name_hides_no_other(tmp_path: Path) -> None:
    url = small_run(tmp_path)
    store = Store.open(url)
    (first, *_) = sorted(entry.key for entry in store.entries("stats/"))
    far = Streams.read(store.get(first)).with_facts(first=10**30, last=10**30).encode()
    store.put(first, far)
    run = open_run(url)
    assert run.steps() == list(range(4, 12))
    assert [*run.damaged] == [first]


def test_damaged_columns_and_histograms_are_refused_only_where_they_are_read(tmp_path: Path) -> None:
    place = HEADER.location("mean")
    assert place is not None
    for at, columns in ((sum(place) - 1, ["mean"]), (len(WHOLE) - 20, [*HISTOGRAM_COLUMNS])):
        data = bytearray(WHOLE)
        data[at] ^= 255
        arrow = stored(tmp_path, bytes(data))
        assert arrow.read(["max", "step"]).num_rows == len(BLOCK)
        with pytest.raises(FormatError, match=KEY):
            arrow.read(columns)


def test_a_run_reads_the_same_by_ranges_and_after_its_compaction(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = small_run(tmp_path, workers=2)
    run = open_run(url)
    due = run.series(FIRST.name, "max"), rows_of(run.rows("a"))
    request.getfixturevalue("small_limits")
    again = open_run(url)
    assert (again.series(FIRST.name, "max"), rows_of(again.rows("a"))) == due
    compact(url, delete_after=0)
    assert (open_run(url).series(FIRST.name, "max"), rows_of(open_run(url).rows("a"))) == due


@pytest.mark.usefixtures("small_limits")
def test_reading_one_column_of_many_rows_takes_memory_for_it_only(tmp_path: Path) -> None:
    block = BLOCK.take(np.zeros(200_000, np.intp))
    arrow = stored(tmp_path, segment.encode(block))
    arrow.read(["max"])
    with traced_memory() as memory:
        arrow.read(["max"])
    assert memory.peak < 3 * 8 * len(block) + 2 * arrow.size


# Memory


WAIT_SECONDS = 60.0
_EVERYTHING = Selection(())


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12))
def test_no_more_than_the_limit_is_decoded_at_once(sizes: list[int]) -> None:
    memory, lock = DecodingMemory(100), threading.Lock()
    taken, most = 0, 0

    def decode(size: int) -> None:
        nonlocal taken, most
        with memory.reserve(size, None, "object"):
            with lock:
                taken += size
                most = max(most, taken)
            with lock:
                taken -= size

    threads = [threading.Thread(target=decode, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert most <= 100


def test_a_reader_waits_for_memory_as_long_as_its_time_lasts() -> None:
    memory = DecodingMemory(100)
    with memory.reserve(60, None, "a"):
        with (
            pytest.raises(OverBudgetError, match="use all the memory"),
            memory.reserve(60, ReadBudget(0.01, 1), "b"),
        ):
            raise AssertionError
        with memory.reserve(40, ReadBudget(0.01, 1), "b"):
            pass


def test_what_exceeds_the_limit_by_itself_is_refused_at_once() -> None:
    memory = DecodingMemory(100 * 2**20)
    with (
        memory.reserve(60, None, "a"),
        pytest.raises(
            OverBudgetError,
            match="large one: reading it may take 101 MiB of memory, and 100 MiB are allowed",
        ),
        memory.reserve(101 * 2**20, ReadBudget(60, 1), "large one"),
    ):
        raise AssertionError


def test_what_is_released_can_be_taken_again_until_something_did_not_fit() -> None:
    """Rows were left out for what did not fit: an answer without them would be wrong."""
    budget = ReadBudget(60, 1)
    for _ in range(3):
        assert budget.take(900_000)
        budget.check()
        budget.release(900_000)
    assert budget.take(900_000)
    assert not budget.take(900_000)
    budget.release(1_800_000)
    assert not budget.take(1)
    with pytest.raises(OverBudgetError, match="more than 1 MiB"):
        budget.check()


def test_histograms_are_summed_in_the_memory_of_a_single_object(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of(some_rows(range(first, first + 40))) for first in range(0, 1200, 40)])
    run = open_run(tmp_path / "default" / "r")
    whole = run.histogram(FIRST.name, 7)
    run.index.budget = ReadBudget(60, 0.25)  # all the rows take some four times as much
    assert (run.histogram(FIRST.name, 7).counts == whole.counts).all()
    with pytest.raises(OverBudgetError, match=r"more than 0\.25 MiB"):
        run.index.blocks(None, _EVERYTHING)


def test_a_question_that_is_too_large_is_refused(tmp_path: Path) -> None:
    run = open_run(small_run(tmp_path))
    run.index.budget = ReadBudget(60, 0.001)
    with pytest.raises(OverBudgetError, match=r"more than 0\.001 MiB"):
        run.histogram(FIRST.name, 7)


def test_long_texts_are_parsed_one_at_a_time_and_with_pauses() -> None:
    """Python parses a text in one go, during which no other thread runs."""
    texts = LongTexts()
    with texts.turn(2**20, ReadBudget(10, 1)):
        with pytest.raises(OverBudgetError, match="long documents"), texts.turn(2**20, ReadBudget(0, 1)):
            pass
        with texts.turn(2**20 - 1, ReadBudget(0, 1)), texts.turn(2**30, None):
            pass  # short ones, and those of programs that read by themselves, do not wait
        time.sleep(0.05)
    with pytest.raises(OverBudgetError, match="took more than 0 s"), texts.turn(2**20, ReadBudget(0, 1)):
        pass
    with texts.turn(2**20, ReadBudget(10, 1)):
        pass
