"""One compacted object of statistics: columns that its footer states are not read; the others are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sdk.format.blocks import Row, block_of
from tests.sdk.reading.stored import FIRST, LOSS, new_run, small_run, some_rows
from watchstep import open_run
from watchstep.errors import FormatError
from watchstep.format.block import Block
from watchstep.format.catalogue import catalogue_bytes, metadata
from watchstep.format.parquet.table import to_table
from watchstep.format.segment_checks import CONSTANT
from watchstep.reading import parquet_object
from watchstep.reading.compaction import compact, encode_compacted
from watchstep.reading.parquet_object import Catalogues, ParquetObject, open_object
from watchstep.store.store import Store

KEY = "compacted/0000000001/a/000000.parquet"
ROWS = block_of(some_rows(range(12), workers=2))


def table_of(block: Block) -> pa.Table:
    return to_table(block).replace_schema_metadata(metadata(catalogue_bytes(block.catalogue)))


def stored(folder: Path, data: bytes) -> ParquetObject:
    store = new_run(folder)
    store.put(KEY, data)
    return open_object(store, KEY, len(data), Catalogues())


def with_statistics(table: pa.Table) -> bytes:
    """The table as a Parquet file whose footer states the limits of all columns."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


def test_a_footer_states_which_columns_are_constant(tmp_path: Path) -> None:
    mixed = block_of([Row(0, FIRST, [1.0], mode="eval", worker=3), Row(1, LOSS, [2.0], worker=4)])
    parquet = stored(tmp_path, with_statistics(table_of(mixed)))
    assert parquet.constant == {"shard_index": 0, "shard_count": 1, "replica": 0, "stage": 0}
    alike = block_of(some_rows(range(3)))
    assert stored(tmp_path, with_statistics(table_of(alike))).constant.keys() == set(CONSTANT)
    assert stored(tmp_path, encode_compacted(table_of(alike))).constant == {}


def test_an_object_states_its_rows_steps_and_sizes(tmp_path: Path) -> None:
    parquet = stored(tmp_path, encode_compacted(table_of(ROWS)))
    assert (parquet.rows, parquet.first, parquet.last) == (len(ROWS), 0, 11)
    assert parquet.catalogue == ROWS.catalogue
    assert parquet.decoded_bytes(["step", "mean"]) == 16 * len(ROWS)
    assert parquet.decoded_bytes(["histogram_bins"]) == 8 * len(ROWS.statistics.histogram.bins)


def test_a_file_whose_footer_does_not_state_its_steps_is_refused(tmp_path: Path) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table_of(ROWS), sink, write_statistics=False)
    with pytest.raises(FormatError, match="does not state its steps"):
        stored(tmp_path, bytes(sink.getvalue()))


def test_an_object_that_became_shorter_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = small_run(tmp_path)
    compact(url, delete_after=0)
    run = open_run(url)
    monkeypatch.setattr(Store, "get_ranges", lambda *_: [memoryview(b"PAR1")])
    assert run.series(FIRST.name, "max").num_rows == 0
    assert run.damaged


def test_an_object_that_is_shorter_than_listed_is_refused(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    data = encode_compacted(table_of(ROWS))
    store.put(KEY, data)
    with pytest.raises(FormatError, match=f"segment {KEY} is shorter than listed"):
        open_object(store, KEY, len(data) + 1, Catalogues())


def test_equal_tensors_of_different_catalogues_share_memory_and_all_have_a_bound() -> None:
    infos = tuple(replace(FIRST, name=f"layer{number}.weight") for number in range(100))
    first, second = (catalogue_bytes(catalogue) for catalogue in (infos, infos[:99]))
    catalogues = Catalogues()
    assert catalogues.read(second) == infos[:99]
    assert all(a is b for a, b in zip(catalogues.read(first), catalogues.read(second), strict=False))
    small = Catalogues(3 * sum(info.memory for info in infos) // 2)
    assert small.read(first) == infos
    others = tuple(replace(info, module="other") for info in infos)
    with pytest.raises(ValueError, match="exceed the limit"):
        small.read(catalogue_bytes(others))
    assert small.read(first) == infos


@pytest.mark.parametrize("keeps_parsed", [True, False])
def test_a_large_object_reads_the_same_whether_its_parsed_footer_is_retained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keeps_parsed: bool
) -> None:
    data = encode_compacted(table_of(ROWS))
    small = stored(tmp_path, data)
    due = small.read(small.columns)
    monkeypatch.setattr(parquet_object, "MAX_WHOLE_BYTES", 1000)
    monkeypatch.setattr(parquet_object, "_TAIL_BYTES", 1000)
    monkeypatch.setattr(parquet_object, "_GAP", 0)
    monkeypatch.setattr(parquet_object, "_MAX_PARSED_BYTES", 10**9 if keeps_parsed else 0)
    large = stored(tmp_path, data)
    assert (large.parsed is not None) == keeps_parsed
    assert large.read(large.columns).equals(due)
    assert large.read(["mean"]).column("mean").equals(due.column("mean"))
    assert large.memory < 200_000


def test_a_large_object_that_changed_since_its_footer_was_checked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_object, "MAX_WHOLE_BYTES", 1000)
    monkeypatch.setattr(parquet_object, "_TAIL_BYTES", 1000)
    monkeypatch.setattr(parquet_object, "_MAX_PARSED_BYTES", 0)
    data = encode_compacted(table_of(ROWS))
    parquet = stored(tmp_path, data)
    for other in (
        encode_compacted(table_of(ROWS.take(range(3, len(ROWS))))),  # type: ignore[arg-type]
        data[:4] + bytes(len(data) - 8) + data[-4:],
    ):
        parquet.store.put(KEY, other[: len(data)].ljust(len(data), b"\0"))
        with pytest.raises(FormatError, match=KEY):
            parquet.read(["max"])
