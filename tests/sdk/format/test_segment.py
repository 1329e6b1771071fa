from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.sdk.format.blocks import INFOS, Row, block_of, blocks, rows_of
from watchstep.errors import ConfigError, FormatError
from watchstep.format import segment
from watchstep.format.block import Block, concatenate, together, view
from watchstep.format.parquet_claims import read_claims
from watchstep.format.statistics import Histograms
from watchstep.format.tensors import Placement

BLOCK = block_of(
    [
        Row(step, info, [1.0 * step, -3e-5, float("nan")], worker=worker, place=Placement(worker, 2), probes={"dead": 0.5})
        for step in range(8)
        for info in INFOS
        for worker in (0, 1)
    ]
)  # fmt: skip
WHOLE = segment.encode(BLOCK)
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
        segment.decode(data, "run/seg")
    return caught.value.what


def test_short_memory_is_not_reported_as_damage() -> None:
    with pytest.raises(MemoryError), segment.whole("run/seg"):
        raise pa.ArrowMemoryError("malloc of size 64 failed")


@pytest.mark.parametrize("name", ["step.x", "histogram_bins.list.item", "tensor.list.element"])
def test_a_column_that_is_read_along_with_one_of_a_segment_is_refused(name: str) -> None:
    assert "not one of a segment's" in refused(written(TABLE.append_column(name, TABLE.column("mean"))))


def test_histograms_with_other_names_of_elements_are_refused() -> None:
    sink = pa.BufferOutputStream()
    place = TABLE.schema.get_field_index("histogram_bins")
    bins = TABLE.column(place).cast(pa.list_(pa.field("item", pa.int16())))
    pq.write_table(TABLE.set_column(place, "histogram_bins", bins), sink, use_compliant_nested_type=False)
    assert "column histogram_bins.list.item is not one" in refused(bytes(sink.getvalue()))


@given(blocks)
def test_what_was_encoded_is_decoded(block: Block) -> None:
    decoded = segment.decode(segment.encode(block), "s")
    assert rows_of(decoded) == rows_of(block)
    assert decoded.catalogue == block.catalogue


@given(blocks)
def test_what_is_read_without_histograms_is_the_same_but_for_them(block: Block) -> None:
    data = segment.encode(block)
    light, whole = segment.decode(data, "s", histograms=False), segment.decode(data, "s")
    assert len(light.statistics.histogram) == len(light) == len(whole)
    again = replace(light, statistics=replace(light.statistics, histogram=whole.statistics.histogram))
    assert rows_of(again) == rows_of(whole)


def test_access_to_histograms_that_were_not_read_states_what_to_do() -> None:
    light = segment.decode(WHOLE, "s", histograms=False)
    rows = np.arange(len(light))
    for block in (
        light,
        light.take(rows[:1]),
        concatenate([light, BLOCK]),
        view(light, rows),
        together(BLOCK, light),
    ):
        assert len(block.statistics.histogram) == len(block)
        with pytest.raises(ConfigError, match=r"histogram\.bins: .* not read\n  hint: .*histograms=True"):
            _ = block.statistics.histogram.bins
    assert len(concatenate([light.take(rows[:0]), BLOCK]).statistics.histogram.bins)
    with pytest.raises(ValueError, match="a segment requires histograms"):
        segment.encode(light)


def test_empty_blocks_and_blocks_of_an_empty_catalogue_are_segments() -> None:
    for block in (Block.empty(), BLOCK.take(np.empty(0, np.intp))):
        decoded = segment.decode(segment.encode(block), "s")
        assert len(decoded) == 0
        assert decoded.catalogue == block.catalogue


def test_a_kept_catalogue_gives_the_same_bytes() -> None:
    assert segment.encode(BLOCK, segment.catalogue_bytes(BLOCK.catalogue)) == WHOLE


def test_other_programs_read_a_segment_as_a_table() -> None:
    assert TABLE.num_rows == len(BLOCK)
    assert TABLE.column("tensor").to_pylist()[:2] == ["loss", "loss"]
    assert TABLE.column("probe.dead").to_pylist()[0] == 0.5
    assert segment.to_table(BLOCK).select(["step", "mean"]).equals(TABLE.select(["step", "mean"]))


def test_many_row_groups_and_plain_words_read_the_same() -> None:
    sink = pa.BufferOutputStream()
    words = TABLE.schema.get_field_index("tensor")
    plain = TABLE.set_column(words, "tensor", TABLE.column("tensor").cast(pa.string()))
    pq.write_table(plain, sink, row_group_size=7, use_dictionary=False, data_page_version="2.0")
    assert rows_of(segment.decode(bytes(sink.getvalue()), "s")) == rows_of(BLOCK)


def test_columns_of_later_versions_are_omitted() -> None:
    data = written(TABLE.append_column("later", pa.array(["x"] * len(BLOCK))))
    assert rows_of(segment.decode(data, "s")) == rows_of(BLOCK)


@pytest.mark.parametrize(("schema", "hint"), [(3, "read the run with a newer"), (1, "rewrite the run with")])
def test_another_schema_is_refused_with_its_own_hint(schema: int, hint: str) -> None:
    with pytest.raises(FormatError, match=rf"schema {schema}, this version reads schema 2\n  hint: {hint}"):
        segment.decode(written(TABLE, watchstep=f'{{"schema": {schema}}}'), "s")


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
        block = segment.decode(data, "s")
    except FormatError:
        return
    assert (block.statistics.finite >= 0).all()
    assert len(rows_of(block)) <= segment.MAX_ROWS


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
    assert rows_of(segment.decode(catalogue(good), "s")) == rows_of(BLOCK)
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
    assert rows_of(segment.decode(catalogue([{**good[0], "later": [[0]]}, *good[1:]]), "s")) == rows_of(BLOCK)


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
    monkeypatch.setattr(segment, "MAX_BYTES", len(WHOLE) - 1)
    assert f"over the limit of {len(WHOLE) - 1}" in refused(WHOLE)


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
        for _ in range(segment.MAX_ROWS // 1000 + 1):
            writer.write_table(repeated, row_group_size=1000)
    refused_within(memory, bytes(sink.getvalue()))


def test_lists_that_unpack_to_very_much_are_refused_before_memory_is_taken(memory: pa.MemoryPool) -> None:
    values = pa.array(np.zeros(40_000_000, np.int16))
    offsets = pa.array([*([0] * len(BLOCK)), len(values)], pa.int32())
    data = with_column("histogram_bins", pa.ListArray.from_arrays(offsets, values))
    assert len(data) < 100_000
    assert "histogram_bins claims 40000" in refused_within(memory, data)


def test_rows_over_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "MAX_ROWS", len(BLOCK) - 1)
    assert f"claims {len(BLOCK)} rows" in refused(WHOLE)


def test_very_many_probes_are_refused() -> None:
    block = replace(BLOCK, probes={f"p{index}": np.zeros(len(BLOCK)) for index in range(65)})
    assert "65 probes" in refused(segment.encode(block))


def test_histograms_of_a_slice_are_its_own() -> None:
    part = BLOCK.take(np.arange(3, 9))
    assert isinstance(part.statistics.histogram, Histograms)
    assert rows_of(segment.decode(segment.encode(part), "s")) == rows_of(BLOCK)[3:9]


@pytest.mark.parametrize(
    ("name", "fits"),
    [("n" * 4096, True), ("n" * 4097, False), ("é" * 2048, True), ("é" * 2049, False), ("😀" * 1025, False)],
)
def test_a_name_has_4096_bytes_at_most(name: str, *, fits: bool) -> None:
    block = replace(BLOCK, catalogue=(replace(BLOCK.catalogue[0], name=name), *BLOCK.catalogue[1:]))
    data = segment.encode(block)
    if fits:
        assert segment.decode(data, "s").catalogue == block.catalogue
    else:
        assert "4096" in refused(data)


@pytest.mark.parametrize("word", ["role", "module", "module_type", "dtype", "optimizer", "collections"])
def test_other_words_of_a_tensor_have_4096_bytes_at_most(word: str) -> None:
    good = [info.as_data() for info in INFOS]
    long = "n" * 4097
    lie = {**good[0], word: [long] if word == "collections" else long}
    assert "a word of 4097 characters" in refused(catalogue([lie, *good[1:]]))


def test_long_words_are_shortened_to_different_ones_that_readers_take() -> None:
    first, second = ("é" * 5000 + end for end in "ab")
    infos = [
        replace(INFOS[0], name=name, module=name, collections=("weights", name)).bounded()
        for name in (first, second)
    ]
    assert infos[0].name != infos[1].name
    for info in infos:
        assert len(info.name.encode()) <= 4096
        assert info.name.startswith("é" * 2000)
        assert info.collections == ("weights", info.name)
        assert type(info).from_data(info.as_data()) == info
    assert INFOS[0].bounded() is INFOS[0]


def test_the_pages_of_the_largest_segment_are_read() -> None:
    rows = np.arange(segment.MAX_ROWS)
    block = BLOCK.take(np.zeros(len(rows), np.int64))
    block = replace(block, step=rows, time_ns=7919 * rows)
    assert read_claims(segment.encode(block)).rows == segment.MAX_ROWS
