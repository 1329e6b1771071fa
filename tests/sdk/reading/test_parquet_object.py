"""One object of statistics: columns that its footer states are not read; the others are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.sdk.format.blocks import Row, block_of
from tests.sdk.reading.stored import FIRST, LOSS, new_run, small_run, write
from watchstep import open_run
from watchstep.format import segment
from watchstep.format.segment import CONSTANT
from watchstep.reading import parquet_object
from watchstep.reading.parquet_object import Catalogues, ParquetObject
from watchstep.store.store import Store


def test_a_footer_states_which_columns_are_constant(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of([Row(0, FIRST, [1.0], mode="eval", worker=3), Row(1, LOSS, [2.0], worker=4)])])
    (located,) = open_run(tmp_path / "default" / "r").index.objects()
    assert located.object.constant == {"shard_index": 0, "shard_count": 1, "replica": 0, "stage": 0}
    run = open_run(small_run(tmp_path, "one"))
    assert [entry.object.constant.keys() for entry in run.index.objects()] == [set(CONSTANT)] * 3


def test_segments_whose_footer_does_not_state_it_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = open_run(small_run(tmp_path, "stated")).series(FIRST.name, "max")
    monkeypatch.setattr(segment, "CONSTANT", ())
    untold = open_run(small_run(tmp_path, "untold"))
    assert [entry.object.constant for entry in untold.index.objects()] == [{}] * 3
    assert untold.series(FIRST.name, "max") == due


def test_an_object_that_became_shorter_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(small_run(tmp_path))
    monkeypatch.setattr(Store, "get_ranges", lambda *_: [memoryview(b"PAR1")])
    assert run.series(FIRST.name, "max").num_rows == 0
    assert len(run.damaged) == 3
    assert all(isinstance(entry.object, ParquetObject) for entry in run.index.objects())


def test_equal_tensors_of_different_catalogues_share_memory_and_all_have_a_bound() -> None:
    infos = tuple(replace(FIRST, name=f"layer{number}.weight") for number in range(100))
    first, second = (segment.catalogue_bytes(catalogue) for catalogue in (infos, infos[:99]))
    catalogues = Catalogues()
    assert catalogues.read(second) == infos[:99]
    assert all(a is b for a, b in zip(catalogues.read(first), catalogues.read(second), strict=False))
    small = Catalogues(3 * sum(info.memory for info in infos) // 2)
    assert small.read(first) == infos
    others = tuple(replace(info, module="other") for info in infos)
    with pytest.raises(ValueError, match="exceed the limit"):
        small.read(segment.catalogue_bytes(others))
    assert small.read(first) == infos


@pytest.mark.parametrize("keeps_parsed", [True, False])
def test_a_large_object_reads_the_same_whether_its_parsed_footer_is_retained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, keeps_parsed: bool
) -> None:
    due = open_run(small_run(tmp_path, "small")).series(FIRST.name, "max")
    monkeypatch.setattr(parquet_object, "_MAX_WHOLE_BYTES", 1000)
    monkeypatch.setattr(parquet_object, "_TAIL_BYTES", 1000)
    monkeypatch.setattr(parquet_object, "_MAX_PARSED_BYTES", 10**9 if keeps_parsed else 0)
    run = open_run(small_run(tmp_path, "large"))
    assert run.series(FIRST.name, "max") == due
    objects = [located.object for located in run.index.objects()]
    assert [isinstance(parquet, ParquetObject) and parquet.parsed is not None for parquet in objects] == [
        keeps_parsed
    ] * 3
    assert run.index.memory < 3 * 200_000


def test_an_object_that_changed_since_its_footer_was_checked_is_refused(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    write(store, [block_of([Row(0, FIRST, [1.0])])])
    run = open_run(tmp_path / "default" / "r")
    (located,) = run.index.objects()
    other = segment.encode(block_of([Row(0, FIRST, [1.0, 2.0]), Row(1, FIRST, [1.0])]))
    data = other + b""
    parquet = located.object
    assert isinstance(parquet, ParquetObject)
    store.put(parquet.key, data[:4] + bytes(max(0, parquet.size - len(data))) + data[4:])
    assert run.series(FIRST.name, "max").num_rows == 0
    assert parquet.key in run.damaged
