"""Compaction changes no result: for any run and interruption, and with concurrent compactions and readers."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.sdk.format.blocks import Row, block_of, blocks, rows_of
from tests.sdk.reading.stored import FIRST, LOSS, new_run, sharded_rows, small_run, some_rows, write
from watchstep import Run, open_run
from watchstep.errors import StoreError
from watchstep.format.block import Block
from watchstep.format.tensors import Placement
from watchstep.reading import compacted, compaction, index
from watchstep.reading.budget import OverBudgetError
from watchstep.reading.compacted import Manifest, decode, encode, manifest_key
from watchstep.reading.compaction import compact
from watchstep.store.store import Store


def with_values(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without probes that are null: a column exists where any row of the same object has the probe."""
    return [
        {name: value for name, value in row.items() if value is not None or not name.startswith("probe.")}
        for row in rows
    ]


def answers(run: Run) -> list[Any]:
    """All results of a run's statistics."""
    names = run.tensors()
    return [
        names,
        run.steps(),
        run.workers,
        run.attempts,
        run.losses().to_pylist(),
        rows_of(run.rows()),
        [rows_of(run.rows(attempt)) for attempt in run.attempts],
        [run.series(name, "std").to_pylist() for name in names],
        [with_values(run.tensor(name).statistics().to_pylist()) for name in names],
        run.at_step(["mean"]).to_pylist(),
        [
            run.histogram(name, 3, mode=None).counts.tolist()
            for name in names
            if len(run.tensor(name).steps())
        ],
    ]


def plain(entries: list[Any]) -> str:
    return repr(entries)


@pytest.mark.ci
@settings(max_examples=examples(25), deadline=None)
@given(blocks, blocks, st.booleans(), st.sampled_from([4, 100_000]))
def test_compaction_changes_no_answer(first: Block, second: Block, deletes: bool, size: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "_SEGMENT_ROWS", size)
        patch.setattr(compaction, "_MAX_ROWS", 2 * size)
        patch.setattr(compaction, "_PASS_BYTES", 900 * size)
        patch.setattr(compaction, "_RECENT_ROWS", size)
        store = new_run(Path(folder))
        write(store, [first.where(first.step < 3), first.where(first.step >= 3)], "a")
        write(store, [second], "b", "w1")
        url = Path(folder) / "default" / "r"
        due = plain(answers(open_run(url)))
        compact(url, delete_after=0 if deletes else None)
        assert list(store.entries("stats/")) == [] or not deletes
        assert plain(answers(open_run(url))) == due


def test_losses_of_one_step_with_different_places_stay_in_order(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    places = [Placement(0, 2, 1), Placement(1, 2), Placement(0, 2)]
    write(store, [block_of([Row(5, LOSS, [number], place=place) for number, place in enumerate(places)])])
    url = tmp_path / "default" / "r"
    due = open_run(url).losses()["value"].to_pylist()
    compact(url, delete_after=0)
    assert open_run(url).losses()["value"].to_pylist() == due == [2, 0, 1]


def test_a_run_is_compacted_once(tmp_path: Path) -> None:
    url = small_run(tmp_path)
    first = compact(url)
    assert (first.generation, first.written) == (1, 3)
    again = compact(url)
    assert (again.generation, again.written) == (1, 0)


def test_a_tensor_with_very_many_rows_is_compacted_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_run(tmp_path)
    rows = [Row(step, LOSS, [step + 1.0], worker=worker) for step in range(1000) for worker in range(2)]
    write(store, [block_of(rows[start : start + 500]) for start in range(0, 2000, 500)])
    url = tmp_path / "default" / "r"
    due = plain(rows_of(open_run(url).rows()))
    monkeypatch.setattr(compaction, "_PASS_BYTES", 50_000)
    monkeypatch.setattr(compaction, "_PASS_MEGABYTES", 0.25)  # the rows take 0.5 MB
    monkeypatch.setattr(compaction, "_RECENT_ROWS", 100)
    compact(url, delete_after=0)
    assert plain(rows_of(open_run(url).rows())) == due


def test_a_step_that_exceeds_the_memory_is_refused_and_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_run(tmp_path)
    rows = [Row(0, FIRST, [1.0], worker=shard, place=Placement(shard, 1000)) for shard in range(1000)]
    write(store, [block_of(rows)])
    url = tmp_path / "default" / "r"
    monkeypatch.setattr(compaction, "_PASS_MEGABYTES", 0.25)
    with pytest.raises(OverBudgetError):
        compact(url, delete_after=0)
    assert len(open_run(url).rows()) == 1000


def test_what_comes_late_is_read_and_compacted_with_the_rest(tmp_path: Path) -> None:
    url = small_run(tmp_path)
    store = Store.open(tmp_path).child("default/r")
    compact(url, delete_after=0)
    reader = open_run(url)
    write(store, [block_of(some_rows(range(12, 14)))], seq=3)
    assert reader.refresh()
    due = plain(answers(reader))
    assert reader.steps() == list(range(14))
    assert compact(url, delete_after=0).generation == 2
    assert plain(answers(open_run(url))) == due
    assert plain(answers(reader)) == due, "a reader of the generation before goes over to the new one"
    assert not reader.damaged
    assert {entry.key.split("/")[1] for entry in store.entries("compacted/")} == {"0000000002"}


def test_a_reader_of_originals_that_are_deleted_continues(tmp_path: Path) -> None:
    url = small_run(tmp_path)
    reader = open_run(url)
    due = plain(answers(reader))
    compact(url, delete_after=0)
    assert plain(answers(reader)) == due
    assert not reader.damaged
    reader = open_run(url)
    compact(url)
    assert reader.sql("SELECT count(*) AS n FROM statistics")["n"].to_pylist() == [36]


class Killed(BaseException):
    pass


def dying(patch: pytest.MonkeyPatch, after: int) -> None:
    """Counts changes of the store; the process dies before the change after ``after``."""
    left = [after]

    def guarded(whole: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **named: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return whole(*arguments, **named)

        return changed

    for name in ("put", "create", "delete"):
        patch.setattr(Store, name, guarded(getattr(Store, name)))


@pytest.mark.ci
def test_a_compaction_may_die_between_any_two_operations(tmp_path: Path) -> None:
    url = small_run(tmp_path, workers=2)
    store = Store.open(tmp_path).child("default/r")
    write(store, [block_of(sharded_rows(range(3), 2))], "b")
    due = plain(answers(open_run(url)))
    died = 0
    while True:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compaction, "_SEGMENT_ROWS", 30)
            dying(patch, died)
            try:
                compact(url, delete_after=0)
                break
            except Killed:
                died += 1
        assert plain(answers(open_run(url))) == due, f"died before operation {died}"
    assert died > 8
    assert plain(answers(open_run(url))) == due
    assert list(store.entries("stats/")) == []


def test_several_at_once(tmp_path: Path) -> None:
    url = small_run(tmp_path)
    due = plain(answers(open_run(url)))
    start = threading.Barrier(4)
    failed: list[Exception] = []

    def work() -> None:
        start.wait(30)
        try:
            compact(url, delete_after=0)
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(error, StoreError) for error in failed), failed
    assert plain(answers(open_run(url))) == due


def part_of(folder: Path) -> Path:
    (part,) = (folder / "default" / "r" / "compacted").rglob("000000.parquet")
    return part


@pytest.mark.parametrize("damage", ["gone", "cut", "other", "manifest"])
def test_a_damaged_generation_is_left_for_the_originals(tmp_path: Path, damage: str) -> None:
    url = small_run(tmp_path)
    due = plain(answers(open_run(url)))
    compact(url)
    part = part_of(tmp_path)
    manifest = part.parent.parent / "manifest.json"
    if damage == "gone":
        part.unlink()
    elif damage == "cut":
        part.write_bytes(part.read_bytes()[:-50])
    elif damage == "other":
        part.write_bytes(next((url / "stats").rglob("*.arrow")).read_bytes())
    else:
        manifest.write_text(manifest.read_text()[:-9])
    run = open_run(url)
    assert plain(answers(run)) == due
    assert not run.damaged
    compact(url)
    assert plain(answers(open_run(url))) == due


def test_without_originals_a_damaged_part_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_SEGMENT_ROWS", 12)
    url = small_run(tmp_path)
    compact(url, delete_after=0)
    part_of(tmp_path).unlink()
    run = open_run(url)
    assert run.series(FIRST.name, "max").num_rows == 0
    assert run.losses().num_rows == 12
    (name,) = run.damaged
    assert name.startswith("compacted/")


def test_without_originals_all_missing_parts_are_found_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_SEGMENT_ROWS", 12)
    monkeypatch.setattr(index, "_MOST_LOST", 2)  # the copy of the last steps is lost first
    url = small_run(tmp_path)
    compact(url, delete_after=0)
    parts = sorted((url / "compacted").rglob("*.parquet"))
    for part in parts:
        part.unlink()
    run = open_run(url)
    assert run.series(FIRST.name, "max").num_rows == 0
    assert run.damaged.keys() == {str(part.relative_to(url)) for part in parts}


def test_manifests_without_their_parts_are_followed_so_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_MOST_LOST", 3)
    url = small_run(tmp_path)
    compact(url)
    store = Store.open(tmp_path).child("default/r")
    written = decode(store.get(manifest_key(1)), "")
    (attempt,) = written.attempts
    lost = replace(
        attempt, segments=(replace(attempt.segments[0], key="compacted/0000000000/x"),), recent=None
    )
    for generation in range(2, 10):
        store.put(manifest_key(generation), encode(replace(written, generation=generation, attempts=(lost,))))
    run = open_run(url)
    with pytest.raises(StoreError, match="not found"):
        run.rows()
    assert run.index.manifest is not None
    assert run.index.manifest.generation == 6


def test_a_manifest_of_another_generation_is_ignored(tmp_path: Path) -> None:
    url = small_run(tmp_path)
    due = plain(answers(open_run(url)))
    compact(url)
    store = Store.open(tmp_path).child("default/r")
    manifest = store.get(manifest_key(1))
    store.put(manifest_key(2), manifest.replace(b"compacted/0000000001/", b"compacted/0000000000/"))
    run = open_run(url)
    assert run.index.manifest is not None
    assert run.index.manifest.generation == 1
    assert plain(answers(run)) == due


def test_a_damaged_segment_is_retained_and_the_others_are_compacted(tmp_path: Path) -> None:
    url = small_run(tmp_path)
    victim = sorted((url / "stats").rglob("*.arrow"))[1]
    data = bytearray(victim.read_bytes())
    data[30:400] = bytes(byte ^ 0xFF for byte in data[30:400])
    victim.write_bytes(data)
    compact(url, delete_after=0)
    assert open_run(url).steps() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert victim.exists()


def test_originals_stay_until_the_grace_time_is_over(tmp_path: Path) -> None:
    url = small_run(tmp_path)
    assert compact(url).deleted == 0
    assert compact(url, delete_after=3600).deleted == 0
    assert compact(url, delete_after=0).deleted == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("constant", "x"),
        ("constant", {"mode": 99}),
        ("constant", {"stage": -1}),
        ("constant", {"worker": 2**40}),
        ("constant", {"step": 2**40}),
        ("constant", {"mean": 1}),
        ("constant", {"other": 1}),
        ("columns", []),
        ("columns", ["step"]),
        ("columns", ["x" * 2**20]),
    ],
)
def test_a_manifest_that_states_impossible_columns_is_ignored(
    tmp_path: Path, field: str, value: object
) -> None:
    url = small_run(tmp_path)
    before = answers(open_run(url))
    compact(url)
    (path,) = tmp_path.rglob("manifest.json")
    document = json.loads(path.read_text())
    for segment in [*document["attempts"][0]["segments"], document["attempts"][0]["recent"]]:
        segment[field] = value
    path.write_text(json.dumps(document))
    assert answers(open_run(url)) == before


def test_at_most_three_unreadable_manifests_are_tried_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = small_run(tmp_path)
    run = open_run(url)
    before = answers(run)
    compact(run.location)
    (manifest,) = [
        entry.key for entry in run.store.entries("compacted/") if entry.key.endswith("manifest.json")
    ]
    tried: list[str] = []

    def counted(data: bytes, name: str) -> Manifest:
        tried.append(name)
        return decode(data, name)

    monkeypatch.setattr(compacted, "decode", counted)
    for generation in range(101, 106):
        run.store.put(manifest_key(generation), b"{}")
    reader = open_run(url)
    assert tried == [manifest_key(generation) for generation in (105, 104, 103)]
    assert answers(reader) == before
    assert reader.refresh()
    assert answers(reader) == before
    assert tried[3:] == [manifest_key(102), manifest_key(101), manifest]
