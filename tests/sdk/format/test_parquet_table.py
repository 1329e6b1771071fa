"""Segments as Parquet: what was written is read, and hostile files are refused before memory is allocated."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.sdk.format.blocks import INFOS, Row, block_of, blocks, rows_of
from tests.sdk.format.parquet_files import read_claims
from watchstep.errors import FormatError
from watchstep.format.block import Block
from watchstep.format.catalogue import catalogue_bytes, metadata
from watchstep.format.parquet.table import to_block, to_table
from watchstep.format.segment_checks import HISTOGRAM_COLUMNS, MAX_ROWS
from watchstep.format.tensors import Placement
from watchstep.reading import parquet_object
from watchstep.reading.compaction import encode_compacted
from watchstep.reading.parquet_object import Catalogues, ParquetObject, open_object
from watchstep.store.store import Store


class OneObject:
    """A store with one object."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def get_range(self, _key: str, start: int, length: int) -> bytes:
        return self._data[start : start + length]

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        return [memoryview(self.get_range(key, *place)) for place in ranges]


def opened(data: bytes) -> ParquetObject:
    return open_object(cast("Store", OneObject(data)), "run/seg", len(data), Catalogues())


def decode(data: bytes, *, histograms: bool = True) -> Block:
    parquet = opened(data)
    columns = parquet.columns if histograms else parquet.columns - HISTOGRAM_COLUMNS
    return to_block(parquet.read(columns), parquet.catalogue, "run/seg")


def encode(block: Block) -> bytes:
    table = to_table(block).replace_schema_metadata(metadata(catalogue_bytes(block.catalogue)))
    return encode_compacted(table)


BLOCK = block_of(
    [
        Row(step, info, [1.0 * step, -3e-5, float("nan")], worker=worker, place=Placement(worker, 2), probes={"dead": 0.5})
        for step in range(8)
        for info in INFOS
        for worker in (0, 1)
    ]
)  # fmt: skip
WHOLE = encode(BLOCK)
TABLE = pq.read_table(pa.BufferReader(WHOLE))
MEMORY = 64 * 1024 * 1024


@pytest.fixture
def memory() -> Iterator[pa.MemoryPool]:
    """Arrow's memory, counted from here on."""
    usual = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(counted)
    yield counted
    pa.set_memory_pool(usual)


def written(table: pa.Table, **changed: object) -> bytes:
    """A Parquet file with a segment's metadata, some of it changed."""
    sink = pa.BufferOutputStream()
    metadata = {**TABLE.schema.metadata, **{name.encode(): value for name, value in changed.items()}}
    pq.write_table(table.replace_schema_metadata(metadata), sink, compression="zstd")
    return bytes(sink.getvalue())


def with_column(name: str, values: Any, kind: Any = None) -> bytes:
    """A segment with one column replaced."""
    place = TABLE.schema.get_field_index(name)
    column = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, kind)
    return written(TABLE.set_column(place, name, column))


def refused(data: bytes) -> str:
    with pytest.raises(FormatError, match=r"segment run/seg\b.*\n  hint: ") as caught:
        decode(data)
    return caught.value.what


@pytest.mark.parametrize("name", ["step.x", "histogram_bins.list.item", "tensor.list.element"])
def test_a_column_that_is_read_along_with_one_of_a_segment_is_refused(name: str) -> None:
    assert "not one of a segment's" in refused(written(TABLE.append_column(name, TABLE.column("mean"))))


def test_histograms_with_other_names_of_elements_are_refused() -> None:
    sink = pa.BufferOutputStream()
    place = TABLE.schema.get_field_index("histogram_bins")
    bins = TABLE.column(place).cast(pa.list_(pa.field("item", pa.int16())))
    pq.write_table(TABLE.set_column(place, "histogram_bins", bins), sink, use_compliant_nested_type=False)
    assert "column histogram_bins.list.item is not one" in refused(bytes(sink.getvalue()))


@given(blocks.filter(len))
def test_what_was_encoded_is_decoded(block: Block) -> None:
    decoded = decode(encode(block))
    assert rows_of(decoded) == rows_of(block)
    assert decoded.catalogue == block.catalogue


@given(blocks.filter(len))
def test_what_is_read_without_histograms_is_the_same_but_for_them(block: Block) -> None:
    data = encode(block)
    light, whole = decode(data, histograms=False), decode(data)
    assert len(light.statistics.histogram) == len(light) == len(whole)
    again = replace(light, statistics=replace(light.statistics, histogram=whole.statistics.histogram))
    assert rows_of(again) == rows_of(whole)


def test_tables_without_rows_are_read() -> None:
    parquet = opened(written(TABLE.slice(0, 0)))
    assert (parquet.rows, parquet.first, parquet.last, parquet.constant) == (0, 0, -1, {})
    block = decode(written(TABLE.slice(0, 0)))
    assert (len(block), block.catalogue) == (0, BLOCK.catalogue)


def test_other_programs_read_a_segment_as_a_table() -> None:
    assert TABLE.num_rows == len(BLOCK)
    assert TABLE.column("tensor").to_pylist()[:2] == ["loss", "loss"]
    assert TABLE.column("probe.dead").to_pylist()[0] == 0.5
    assert to_table(BLOCK).select(["step", "mean"]).equals(TABLE.select(["step", "mean"]))


def test_many_row_groups_and_plain_words_read_the_same() -> None:
    sink = pa.BufferOutputStream()
    words = TABLE.schema.get_field_index("tensor")
    plain = TABLE.set_column(words, "tensor", TABLE.column("tensor").cast(pa.string()))
    pq.write_table(plain, sink, row_group_size=7, use_dictionary=False, data_page_version="2.0")
    assert rows_of(decode(bytes(sink.getvalue()))) == rows_of(BLOCK)


def test_columns_of_later_versions_are_omitted() -> None:
    data = written(TABLE.append_column("later", pa.array(["x"] * len(BLOCK))))
    assert rows_of(decode(data)) == rows_of(BLOCK)


@pytest.mark.parametrize(
    ("schema", "hint"),
    [(4, "read the run with a newer"), (2, "read the run with the version that recorded it")],
)
def test_another_schema_is_refused_with_its_own_hint(schema: int, hint: str) -> None:
    with pytest.raises(FormatError, match=rf"schema {schema}, this version reads schema 3\n  hint: {hint}"):
        decode(written(TABLE, watchstep=f'{{"schema": {schema}}}'))


@given(st.integers(0, len(WHOLE) - 1))
def test_every_truncation_is_refused(length: int) -> None:
    refused(WHOLE[:length])


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bits_are_refused_or_harmless(flips: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for place, mask in flips:
        data[place] ^= mask
    check_harmless(bytes(data))


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, 6000), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bits_in_the_footer_are_refused_or_harmless(flips: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for place, mask in flips:
        data[-1 - place] ^= mask
    check_harmless(bytes(data))


@given(st.binary(max_size=200))
@example(b"")
@example(b"PAR1PAR1")
@example(b"PAR1" + bytes(4) + b"\xff\xff\xff\xff" + b"PAR1")
def test_other_bytes_are_refused(data: bytes) -> None:
    refused(data)
    refused(b"PAR1" + data + len(data).to_bytes(4, "little") + b"PAR1")


def check_harmless(data: bytes) -> None:
    """No other error for any damage; decoded figures are figures that a tensor can have."""
    try:
        block = decode(data)
    except FormatError:
        return
    assert (block.statistics.finite >= 0).all()
    assert len(rows_of(block)) <= MAX_ROWS


@pytest.mark.parametrize(
    "name", ["step", "worker", "replica", "shard_count", "shard_index", "count", "nan", "zero"]
)
def test_a_number_that_cannot_be_is_refused(name: str) -> None:
    kind = TABLE.schema.field(name).type
    assert f"column {name} holds" in refused(with_column(name, [-1] * len(BLOCK), kind))


@pytest.mark.parametrize(
    ("name", "value"),
    [("worker", 2**28), ("shard_index", 2), ("count", 2**62), ("negative", 4), ("pos_inf", 3)],
)
def test_a_number_beyond_its_bound_is_refused(name: str, value: int) -> None:
    kind = TABLE.schema.field(name).type
    assert "holds a number that cannot be" in refused(with_column(name, [value] * len(BLOCK), kind))


@pytest.mark.parametrize("name", TABLE.column_names)
def test_a_column_that_is_missing_of_another_type_or_null_is_refused(name: str) -> None:
    if not name.startswith("probe."):
        refused(written(TABLE.drop_columns([name])))
    refused(with_column(name, [{"a": 1}] * len(BLOCK)))
    if not pa.types.is_floating(TABLE.schema.field(name).type) and not name.startswith("histogram"):
        refused(with_column(name, [None] * len(BLOCK), TABLE.schema.field(name).type))


@pytest.mark.parametrize("name", ["mode", "tensor", "stage"])
def test_an_unknown_word_is_refused(name: str) -> None:
    assert "'nobody'" in refused(with_column(name, ["nobody"] * len(BLOCK)))


@pytest.mark.parametrize(
    ("bins", "counts", "reason"),
    [
        ([0, 0], [1, 1], "ascending"),
        ([2, 1], [1, 1], "ascending"),
        ([2048], [1], "histogram_bins"),
        ([-2149], [1], "histogram_bins"),
        ([0], [0], "histogram_counts"),
        ([0], [-1], "histogram_counts"),
        ([0, 1], [1], "do not match"),
        ([None], [1], "is not a complete segment"),
    ],
)
def test_a_histogram_that_cannot_be_is_refused(bins: list[int], counts: list[int], reason: str) -> None:
    rows = [[0, 1]] * (len(BLOCK) - 1)
    place = TABLE.schema.get_field_index("histogram_bins")
    table = TABLE.set_column(place, "histogram_bins", pa.array([*rows, bins], pa.list_(pa.int16())))
    ones = [[1, 1]] * (len(BLOCK) - 1)
    other = pa.array([*ones, counts], pa.list_(pa.int64()))
    assert reason in refused(written(table.set_column(place + 1, "histogram_counts", other)))


@pytest.mark.parametrize(
    "metadata",
    [
        {"watchstep": "{}"},
        {"watchstep": "no json"},
        {"watchstep": '{"schema": "x"}'},
        {"watchstep": '{"schema": Infinity}'},
        {"watchstep": "[" * 100_000},
        {"watchstep.tensors": "not base64"},
        {"watchstep.tensors": base64.b64encode(b"not zlib")},
        {"watchstep.tensors": base64.b64encode(zlib.compress(b"[]")[:-1])},
    ],
)
def test_metadata_that_cannot_be_read_is_refused(metadata: dict[str, Any]) -> None:
    refused(written(TABLE, **metadata))


def catalogue(entries: object) -> bytes:
    return written(
        TABLE, **{"watchstep.tensors": base64.b64encode(zlib.compress(json.dumps(entries).encode()))}
    )


def test_a_catalogue_with_lies_is_refused() -> None:
    good = [info.as_data() for info in INFOS]
    assert rows_of(decode(catalogue(good))) == rows_of(BLOCK)
    lies: list[Callable[[dict[str, Any]], Any]] = [
        lambda entry: entry | {"name": 3},
        lambda entry: entry | {"collections": 3},
        lambda entry: entry | {"collections": [3]},
        lambda entry: entry | {"role": None},
        lambda entry: entry | {"order": -1},
        lambda entry: entry | {"order": 1.5},
        lambda entry: entry | {"shape": [-1]},
        lambda entry: entry | {"shape": [2**63]},
        lambda entry: entry | {"shape": [True]},
        lambda entry: entry | {"derived": 1},
        lambda entry: {"name": entry["name"]},
        lambda entry: [entry],
        lambda entry: None,
    ]
    for lie in lies:
        refused(catalogue([lie(good[0]), *good[1:]]))
    refused(catalogue([*good, good[0]]))
    refused(catalogue(3))


def test_a_catalogue_that_holds_other_data_than_tensors_is_refused() -> None:
    good = [info.as_data() for info in INFOS]
    assert "data other than tensors" in refused(catalogue([{**good[0], "later": [[]] * 1000}, *good[1:]]))
    assert "data other than tensors" in refused(catalogue([{**good[0], "later": [0] * 10_000}, *good[1:]]))
    assert rows_of(decode(catalogue([{**good[0], "later": [[0]]}, *good[1:]]))) == rows_of(BLOCK)


def test_a_footer_with_very_much_metadata_or_very_many_columns_is_refused() -> None:
    pairs = {f"k{number}": "" for number in range(100)}
    assert "entries of metadata" in refused(written(TABLE, **pairs))
    assert "its metadata take" in refused(
        written(TABLE, watchstep=json.dumps({"schema": 1, "x": "y" * 9000}))
    )
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, TABLE.schema) as writer:
        for _ in range(2048 // len(TABLE.schema.names) + 1):
            writer.write_table(TABLE)
    assert "columns in its row groups" in refused(bytes(sink.getvalue()))


def test_an_unpacked_catalogue_over_the_limit_is_refused() -> None:
    bomb = base64.b64encode(zlib.compress(b"[" + b" " * (64 * 1024 * 1024) + b"]", 9))
    assert "too large" in refused(written(TABLE, **{"watchstep.tensors": bomb}))


def test_an_object_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_object, "MAX_BYTES", len(WHOLE) - 1)
    assert f"has {len(WHOLE)} bytes instead of 12 to {len(WHOLE) - 1}" in refused(WHOLE)


def refused_within(memory: pa.MemoryPool, data: bytes) -> str:
    """Refused, with less than `MEMORY` taken from then on."""
    counted = pa.proxy_memory_pool(memory)
    pa.set_memory_pool(counted)
    reason = refused(data)
    assert counted.max_memory() < MEMORY
    return reason


def test_a_file_of_very_many_rows_is_refused_before_memory_is_taken(memory: pa.MemoryPool) -> None:
    repeated = TABLE.take([0] * 1000)
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, repeated.schema, compression="zstd") as writer:
        for _ in range(MAX_ROWS // 1000 + 1):
            writer.write_table(repeated, row_group_size=1000)
    refused_within(memory, bytes(sink.getvalue()))


def test_lists_that_unpack_to_very_much_are_refused_before_memory_is_taken(memory: pa.MemoryPool) -> None:
    values = pa.array(np.zeros(40_000_000, np.int16))
    offsets = pa.array([*([0] * len(BLOCK)), len(values)], pa.int32())
    data = with_column("histogram_bins", pa.ListArray.from_arrays(offsets, values))
    assert len(data) < 100_000
    assert "histogram_bins claims 40000" in refused_within(memory, data)


def test_rows_over_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_object, "MAX_ROWS", len(BLOCK) - 1)
    assert f"claims {len(BLOCK)} rows" in refused(WHOLE)


def test_very_many_probes_are_refused() -> None:
    block = replace(BLOCK, probes={f"p{index}": np.zeros(len(BLOCK)) for index in range(65)})
    assert "65 probes" in refused(encode(block))


@pytest.mark.parametrize(
    ("name", "fits"),
    [("n" * 4096, True), ("n" * 4097, False), ("é" * 2048, True), ("é" * 2049, False), ("😀" * 1025, False)],
)
def test_a_name_has_4096_bytes_at_most(name: str, *, fits: bool) -> None:
    block = replace(BLOCK, catalogue=(replace(BLOCK.catalogue[0], name=name), *BLOCK.catalogue[1:]))
    data = encode(block)
    if fits:
        assert decode(data).catalogue == block.catalogue
    else:
        assert "4096" in refused(data)


@pytest.mark.parametrize("word", ["role", "module", "module_type", "dtype", "optimizer", "collections"])
def test_other_words_of_a_tensor_have_4096_bytes_at_most(word: str) -> None:
    good = [info.as_data() for info in INFOS]
    long = "n" * 4097
    lie = {**good[0], word: [long] if word == "collections" else long}
    assert "a word of 4097 characters" in refused(catalogue([lie, *good[1:]]))


def test_the_pages_of_the_largest_segment_are_read() -> None:
    rows = np.arange(MAX_ROWS)
    block = BLOCK.take(np.zeros(len(rows), np.int64))
    block = replace(block, step=rows, time_ns=7919 * rows)
    assert read_claims(encode(block)).rows == MAX_ROWS
