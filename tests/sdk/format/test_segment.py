"""Segments: what is encoded is decoded, other readers and writers of Arrow IPC agree, and hostile objects are refused."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.processes import traced_memory
from tests.sdk.format.arrow_streams import Streams, checksum, with_checksum
from tests.sdk.format.blocks import BLOCK, INFOS, blocks, rows_of
from watchstep.errors import ConfigError, FormatError
from watchstep.format import ipc, segment
from watchstep.format.block import STAGES, Block, concatenate, together, view
from watchstep.format.catalogue import catalogue_bytes
from watchstep.format.parquet.table import to_table
from watchstep.format.segment_checks import MAX_ROWS, whole
from watchstep.format.statistics import COUNT_COLUMNS, Histograms
from watchstep.format.tensors import MODES

ROWS = len(BLOCK)
MORE = {b"watchstep.blocks": b'{"token": [1, 2]}'}
WHOLE = segment.encode(BLOCK, more=MORE)
STREAMS = Streams.read(WHOLE)
HEADER = segment.read_header(WHOLE, "whole")
MEMORY = 16 * 1024 * 1024


def refused(data: bytes) -> str:
    with pytest.raises(FormatError, match=r"segment run/seg\b.*\n  hint: ") as caught:
        segment.decode(data, "run/seg")
    return caught.value.what


def test_short_memory_is_not_reported_as_damage() -> None:
    for error in (MemoryError(), pa.ArrowMemoryError("malloc of size 64 failed")):
        with pytest.raises(MemoryError), whole("run/seg"):
            raise error


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


def test_damage_in_histograms_is_refused_only_where_they_are_read() -> None:
    data = bytearray(WHOLE)
    data[VALUES[-1]] ^= 1
    assert len(segment.decode(bytes(data), "s", histograms=False)) == ROWS
    assert "LZ4" in refused(bytes(data))


@pytest.mark.parametrize("missing", [1, 8, 100, len(WHOLE) - HEADER.histograms_at])
def test_a_truncation_is_refused_without_reading_histograms(missing: int) -> None:
    with pytest.raises(FormatError, match=rf"has {len(WHOLE) - missing} bytes instead of {len(WHOLE)}"):
        segment.decode(WHOLE[:-missing], "s", histograms=False)
    assert "instead of" in refused(WHOLE + bytes(missing))


def test_empty_blocks_and_blocks_of_an_empty_catalogue_are_segments() -> None:
    for block in (Block.empty(), BLOCK.take(np.empty(0, np.intp))):
        data = segment.encode(block)
        decoded = segment.decode(data, "s")
        assert len(decoded) == 0
        assert decoded.catalogue == block.catalogue
        header = segment.read_header(data, "s")
        assert (header.rows, header.first, header.last, header.constant) == (0, 0, -1, {})


def test_a_kept_catalogue_gives_the_same_bytes() -> None:
    assert segment.encode(BLOCK, catalogue_bytes(BLOCK.catalogue), MORE) == WHOLE


def test_histograms_of_a_slice_are_its_own() -> None:
    part = BLOCK.take(np.arange(3, 9))
    assert isinstance(part.statistics.histogram, Histograms)
    assert rows_of(segment.decode(segment.encode(part), "s")) == rows_of(BLOCK)[3:9]


def test_arrays_of_other_types_and_strides_are_encoded() -> None:
    wide = replace(
        BLOCK,
        worker=np.repeat(BLOCK.worker, 2)[::2].astype(np.int64),
        tensor=np.repeat(BLOCK.tensor, 2)[::2],
        step=BLOCK.step[::-1][::-1],
    )
    assert segment.encode(wide, more=MORE) == WHOLE


@given(st.dictionaries(st.binary(max_size=20), st.binary(max_size=300), max_size=4))
def test_further_metadata_are_returned(more: dict[bytes, bytes]) -> None:
    data = segment.encode(BLOCK, more=more)
    assert segment.metadata_of(data, "s") == more
    assert rows_of(segment.decode(data, "s")) == rows_of(BLOCK)


def test_damaged_further_metadata_are_refused() -> None:
    with pytest.raises(FormatError, match="its further metadata are damaged"):
        segment.metadata_of(WHOLE.replace(b'"token": [1, 2]', b'"token": [1, 3]'), "s")
    with pytest.raises(FormatError, match="its further metadata are damaged"):
        segment.metadata_of(WHOLE.replace(b"watchstep.blocks", b"watchstep.clocks"), "s")
    with pytest.raises(FormatError, match="segment s"):
        segment.metadata_of(WHOLE[:-2000], "s")


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


# Other readers and writers


@given(blocks)
def test_pyarrow_reads_the_same_values(block: Block) -> None:
    streams = Streams.read(segment.encode(block, more=MORE))
    assert streams.more == MORE
    table = to_table(block)
    constants = streams.facts["constant"]
    for name in table.column_names:
        if name.startswith("histogram"):
            bins = table[name].combine_chunks()
            assert streams.histograms[name].equals(bins.flatten())
            assert streams.columns["histogram_length"].to_pylist() == bins.value_lengths().to_pylist()
            continue
        values = [constants[name]] * len(block) if name in constants else streams.columns[name].to_pylist()
        words = {"tensor": [info.name for info in block.catalogue], "mode": MODES, "stage": STAGES}
        if name in words:
            values = [words[name][code] for code in values]
        due = [float("nan") if value is None else value for value in table[name].to_pylist()]
        assert np.array_equal(values, due, equal_nan=table[name].type == pa.float64())
    assert streams.columns.keys() & constants.keys() == set()


@given(blocks, st.sampled_from(["lz4", None]))
def test_what_pyarrow_writes_is_read(block: Block, compression: str | None) -> None:
    streams = Streams.read(segment.encode(block, more=MORE))
    data = streams.encode(compression=compression)
    assert rows_of(segment.decode(data, "s")) == rows_of(block)
    assert segment.metadata_of(data, "s") == MORE


def test_columns_of_numbers_of_later_versions_are_omitted() -> None:
    data = STREAMS.with_column("later", [7] * ROWS, pa.int16()).encode()
    assert rows_of(segment.decode(data, "s")) == rows_of(BLOCK)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (pa.array(["x"] * ROWS), "not of a type of segments"),
        (pa.array(["x"] * ROWS).dictionary_encode(), "not of plain numbers"),
        (pa.array([[1.0]] * ROWS), "not of plain numbers"),
        (pa.array([{"a": 1}] * ROWS), "not of plain numbers"),
        (pa.array([True] * ROWS), "not of a type of segments"),
        (pa.array([1] * ROWS, pa.uint64()), "not of a type of segments"),
        (pa.array([1] * ROWS, pa.timestamp("ns")), "not of a type of segments"),
        (pa.array([1.0] * ROWS, pa.float32()), "not of a type of segments"),
        (pa.array([None, *[1.0] * (ROWS - 1)], pa.float64()), "has nulls"),
        (pa.nulls(ROWS), "not of a type of segments"),
    ],
)
def test_columns_of_other_forms_are_refused(values: pa.Array, reason: str) -> None:
    assert reason in refused(STREAMS.with_column("probe.dead", values).encode())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compression": "zstd"}, "another compression than LZ4"),
        ({"metadata_version": pa.ipc.MetadataVersion.V4}, "another version of Arrow's format"),
        ({"use_legacy_format": True}, "no message of an Arrow stream"),
    ],
)
def test_streams_of_other_forms_are_refused(options: dict[str, Any], reason: str) -> None:
    assert reason in refused(STREAMS.encode(**options))


def test_a_file_of_parquet_or_arrow_is_refused() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("a", pa.int64())])):
        pass
    assert "no message of an Arrow stream" in refused(bytes(sink.getvalue()))
    assert "no message of an Arrow stream" in refused(b"PAR1" + bytes(100) + b"PAR1")


def same_or_refused(data: bytes) -> bool:
    """Whether damaged bytes are refused; otherwise not a figure may have changed."""
    try:
        block = segment.decode(data, "s")
    except FormatError:
        return True
    assert rows_of(block) == rows_of(BLOCK)
    assert block.catalogue == BLOCK.catalogue
    return False


@pytest.mark.ci
@settings(max_examples=examples(400))
@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_changes_no_figure(place: int, bit: int) -> None:
    data = bytearray(WHOLE)
    data[place] ^= 1 << bit
    same_or_refused(bytes(data))
    with suppress(FormatError):
        assert segment.metadata_of(bytes(data), "s") == MORE


@pytest.mark.ci
@settings(max_examples=examples(400))
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_are_refused_or_change_no_figure(flips: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for place, mask in flips:
        data[place] ^= mask
    same_or_refused(bytes(data))


def values_places() -> list[int]:
    """The places of all bytes of columns."""
    start, end = ipc.message_end(WHOLE, HEADER.histograms_at)
    columns = ipc.read_schema(WHOLE[start:end]).columns
    bins = ipc.read_batch(WHOLE, *ipc.message_end(WHOLE, end), columns)
    return [
        place
        for batch in (HEADER.batch, bins)
        for start, length in batch.parts
        for place in range(batch.body + start, batch.body + start + length)
    ]


VALUES = values_places()


@pytest.mark.ci
@settings(max_examples=examples(400))
@given(st.lists(st.tuples(st.sampled_from(VALUES), st.integers(1, 255)), min_size=1, max_size=4, unique_by=lambda flip: flip[0]))  # fmt: skip
def test_flipped_bytes_of_values_are_refused(flips: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for place, mask in flips:
        data[place] ^= mask
    assert same_or_refused(bytes(data))


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xff\xff\xff\xff")
@example(b"\xff\xff\xff\xff\x00\x00\x00\x00")
def test_other_bytes_are_refused(data: bytes) -> None:
    refused(data)
    refused(b"\xff\xff\xff\xff\x20\x00\x00\x00" + data)


@pytest.mark.parametrize("name", ["dead", "deed", "dead2"])
def test_a_damaged_name_of_a_probe_is_refused(name: str) -> None:
    streams = STREAMS.without("probe.dead").with_column(f"probe.{name}", [0.5] * ROWS)
    data = streams.encode(stated={"columns": checksum(*(column.encode() for column in STREAMS.columns))})
    if name == "dead":
        assert rows_of(segment.decode(data, "s")) == rows_of(BLOCK)
    else:
        assert "names of its columns are damaged" in refused(data)


# Figures that cannot be


def constant(name: str, value: object) -> bytes:
    """The segment with a constant instead of a column."""
    streams = STREAMS.without(name)
    return streams.with_facts(constant={**streams.facts["constant"], name: value}).encode()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("worker", -1),
        ("worker", 2**31),
        ("count", 2**63),
        ("mode", len(MODES)),
        ("stage", len(STAGES)),
        ("stage", -1),
    ],
)
def test_a_constant_that_cannot_be_is_refused(name: str, value: int) -> None:
    assert f"column {name} has the impossible value {value}" in refused(constant(name, value))


@pytest.mark.parametrize("value", [None, [], {}, "x", float("nan"), float("inf"), "9" * 5000])
def test_a_constant_that_is_no_number_is_refused(value: object) -> None:
    assert "is not a complete segment" in refused(constant("nan", value))


@pytest.mark.parametrize("name", ["step", "tensor", "time_ns", "min", "histogram_length", "probe.dead"])
def test_columns_that_are_never_constant_are_refused_as_constants(name: str) -> None:
    data = constant(name, 1)
    if name == "probe.dead":
        assert "dead" not in segment.decode(data, "s").probes
    else:
        assert f"column {name} is missing" in refused(data)


def test_a_column_and_a_constant_of_one_name_are_refused() -> None:
    facts = {"constant": {**STREAMS.facts["constant"], "count": 3}}
    assert "stated twice" in refused(STREAMS.with_column("count", [3] * ROWS).with_facts(**facts).encode())
    names = [*STREAMS.columns, "step"]
    batch = pa.RecordBatch.from_arrays([*STREAMS.columns.values(), STREAMS.columns["step"]], names=names)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema.with_metadata(STREAMS.metadata)) as stream:
        stream.write_batch(batch)
    assert "two columns have the same name" in refused(bytes(sink.getvalue()))


@pytest.mark.parametrize("name", [*STREAMS.columns, *STREAMS.facts["constant"]])
def test_a_column_that_is_missing_or_of_another_type_is_refused(name: str) -> None:
    if not name.startswith("probe."):
        assert f"column {name} is missing" in refused(STREAMS.without(name).encode())
    other = pa.int16() if name in COUNT_COLUMNS or name.startswith("probe.") else pa.int64()
    if name in {"step", "time_ns"}:
        other = pa.float64()
    assert f"column {name} is of type" in refused(STREAMS.with_column(name, [0] * ROWS, other).encode())


@pytest.mark.parametrize(("name", "words"), [("mode", 4), ("stage", 2), ("tensor", len(INFOS))])
def test_an_unknown_word_is_refused(name: str, words: int) -> None:
    kind = pa.int32() if name == "tensor" else pa.int8()
    for code in (-1, words, 127):
        data = STREAMS.with_column(name, [0] * (ROWS - 1) + [code], kind).encode()
        assert f"column {name} has the index of an unknown word" in refused(data)


def test_steps_outside_of_the_stated_ones_are_refused() -> None:
    assert "holds steps 0 to 7, not only 1 to 7" in refused(STREAMS.with_facts(first=1).encode())
    assert "holds steps 0 to 7, not only 0 to 6" in refused(STREAMS.with_facts(last=6).encode())


@pytest.mark.parametrize(
    ("bins", "counts", "reason"),
    [
        ([0, 0], [1, 1], "ascending"),
        ([2, 1], [1, 1], "ascending"),
        ([2048], [1], "histogram_bins"),
        ([-2149], [1], "histogram_bins"),
        ([0], [0], "histogram_counts"),
        ([0], [-1], "histogram_counts"),
    ],
)
def test_a_histogram_that_cannot_be_is_refused(bins: list[int], counts: list[int], reason: str) -> None:
    lengths = [0] * (ROWS - 1) + [len(bins)]
    assert reason in refused(STREAMS.with_histograms(bins, counts, lengths).encode())


@pytest.mark.parametrize(
    "lengths",
    [[0] * (ROWS - 1) + [1], [0] * (ROWS - 2) + [-1, 3], [2] * ROWS, [2**30] * ROWS, [0] * ROWS],
)
def test_lengths_of_histograms_that_do_not_match_are_refused(lengths: list[int]) -> None:
    data = STREAMS.with_histograms([0, 1], [1, 1], lengths).encode()
    assert "its histograms do not match its rows" in refused(data)


def test_histograms_with_other_columns_or_of_another_number_are_refused() -> None:
    columns = dict(reversed(STREAMS.histograms.items()))
    assert "its histograms have other columns" in refused(replace(STREAMS, histograms=columns).encode())
    values = STREAMS.facts["histogram_values"]
    for claimed in (0, values - 1, values + 1):
        data = STREAMS.with_facts(histogram_values=claimed).encode()
        assert "its histograms do not match" in refused(data)


# Facts, metadata and catalogues


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"00000000{}",
        b"no hexad{}",
        with_checksum(b"{"),
        with_checksum(b"[]"),
        with_checksum(b"{}"),
        with_checksum(b'{"constant": 3}'),
        with_checksum(b'{"constant": {}}'),
        with_checksum(b"[" * 10_000),
        with_checksum(b'{"x": "' + b"y" * 16_400 + b'"}'),
        with_checksum(b"\xff"),
    ],
)
def test_facts_that_cannot_be_read_are_refused(packed: bytes) -> None:
    assert "is not a complete segment" in refused(STREAMS.encode(packed_facts=packed or b" "))


@pytest.mark.parametrize("name", ["first", "last", "histogram_values", "histogram_bytes", "columns", "more"])
@pytest.mark.parametrize("value", [None, "x", [], float("inf"), float("nan")])
def test_facts_of_another_type_are_refused(name: str, value: object) -> None:
    assert "is not a complete segment" in refused(STREAMS.encode(stated={name: value}))


@pytest.mark.parametrize("claimed", [-1, 2**63, 10**30])
def test_impossible_numbers_of_bins_are_refused(claimed: int) -> None:
    assert f"{claimed} bins, over the limits" in refused(
        STREAMS.with_facts(histogram_values=claimed).encode()
    )


def test_metadata_that_is_missing_or_of_very_many_entries_is_refused() -> None:
    for key in STREAMS.metadata:
        rest = {name: value for name, value in STREAMS.metadata.items() if name != key}
        refused(replace(STREAMS, metadata=rest).encode())
    pairs = {f"k{number}": "" for number in range(100)}
    assert "has 102 entries" in refused(STREAMS.with_metadata(**pairs).encode())
    long = json.dumps({"schema": 3, "x": "y" * 9000})
    assert "its metadata take" in refused(STREAMS.with_metadata(watchstep=long).encode())


def test_very_many_columns_are_refused() -> None:
    columns = {f"later{number}": pa.array([0] * ROWS, pa.int8()) for number in range(300)}
    assert "256 are read" in refused(replace(STREAMS, columns={**STREAMS.columns, **columns}).encode())


def bomb(rows: int, probes: int = 0, bins: int = 0) -> bytes:
    """A small segment of many rows, all alike."""
    first = BLOCK.take(np.zeros(1, np.intp))
    block = first.take(np.zeros(rows, np.intp))
    offsets = np.minimum(np.arange(rows + 1), 0)
    offsets[-1] = bins
    histogram = Histograms(offsets, np.zeros(bins, np.int16), np.ones(bins, np.int64))
    block = replace(block, statistics=replace(block.statistics, histogram=histogram))
    return segment.encode(replace(block, probes={f"p{index}": np.zeros(rows) for index in range(probes)}))


@pytest.mark.parametrize(
    ("rows", "probes", "bins"), [(MAX_ROWS + 1, 0, 0), (400_000, 64, 0), (1, 0, 33_000_000)]
)
def test_a_small_object_that_decodes_to_very_much_is_refused_before_memory_is_taken(
    rows: int, probes: int, bins: int
) -> None:
    data = bomb(rows, probes, bins)
    assert len(data) < 2_000_000
    with traced_memory(MEMORY):
        assert "over the limits" in refused(data)


@pytest.mark.parametrize("rows", [MAX_ROWS, MAX_ROWS + 1, 2**31, 2**40, 2**63 - 1, 2**63])
def test_a_claim_of_more_rows_than_are_there_is_refused_before_memory_is_taken(rows: int) -> None:
    # 89 is not a multiple of eight, as offsets are, and no column is as short.
    data = segment.encode(BLOCK.take(np.arange(89)))
    assert data.count((89).to_bytes(8, "little")) == len(STREAMS.columns) + 1
    with traced_memory(MEMORY):
        refused(data.replace((89).to_bytes(8, "little"), rows.to_bytes(8, "little")))


@pytest.mark.parametrize(
    ("name", "value"),
    [("worker", 2**28), ("shard_index", 2), ("count", 2**62), ("negative", 4), ("pos_inf", 3)],
)
def test_a_constant_beyond_its_bound_is_refused(name: str, value: int) -> None:
    assert "holds a number that cannot be" in refused(constant(name, value))


def test_further_metadata_of_an_object_over_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "MAX_BYTES", len(WHOLE) - 1)
    with pytest.raises(FormatError, match="over the limit"):
        segment.metadata_of(WHOLE, "s")
