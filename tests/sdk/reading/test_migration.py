"""Runs of schema 1 and 2 are refused, and read after a migration; an interrupted migration is completed by the next."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors

from tests.sdk.format.blocks import block_of, rows_of
from tests.sdk.reading.schema_1 import compressed_snapshot, segment, write_run
from tests.sdk.reading.schema_2 import as_schema_2, parquet_segment
from tests.sdk.reading.stored import FIRST, new_run, small_run, some_rows
from watchstep.capture.upload.outgoing import blocks_of
from watchstep.errors import FormatError, StoreError
from watchstep.format import journal
from watchstep.format import segment as segments
from watchstep.format.layout import SegmentKey
from watchstep.format.snapshot import DTYPES, open_snapshot
from watchstep.reading.compaction import compact
from watchstep.reading.migration import MigratedRun, RunInUseError, migrate_run, new_name, new_text
from watchstep.reading.run import open_run
from watchstep.store.store import Store

KEY = "tensors/a1/0/3-train.safetensors"
OUTSIDE = "fc.weight:not_in_optimizer"


def migrated(folder: Path, **options: bool) -> tuple[int, int, int, dict[str, str]]:
    done = migrate_run(Store.open(folder).child("vision/first"), "vision/first", **options)
    return done.segments, done.compacted, done.documents, done.damaged


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check(run: Path, steps: int = 12) -> None:
    opened = open_run(run)
    assert set(opened.tensors()) == {"gradients:stale", OUTSIDE}
    info = opened.tensor(OUTSIDE).info
    assert (info.role, info.collections) == ("not_in_optimizer", ("gradients", "not_in_optimizer"))
    rows = opened.tensor(OUTSIDE).statistics().to_pydict()
    assert rows["step"] == list(range(steps))
    assert rows["probe.was_optimized"] == [1.0] * steps
    assert rows["probe.optimized_share"] == [0.5] * steps
    assert not [name for name in rows if name.endswith("_held")]
    assert opened.tensor("gradients:stale").statistics().to_pydict()["mean"] == [1.0] * steps


def test_a_run_of_the_earlier_schema_is_refused_with_the_command_to_run(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with pytest.raises(FormatError, match=r"schema 1.*\n  hint: .*watchstep migrate-store"):
        open_run(run)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_migrated_run_is_read_by_its_new_names(tmp_path: Path, compacted: bool) -> None:
    run = write_run(tmp_path, compacted=compacted)
    assert migrated(tmp_path) == (0 if compacted else 2, int(compacted), 4, {})
    check(run)
    after = contents(tmp_path)
    assert migrated(tmp_path) == (0, 0, 0, {})
    assert contents(tmp_path) == after


def test_documents_have_the_new_names(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    migrated(tmp_path)
    document = json.loads((run / "run.json").read_text())
    assert document["schema"] == 3
    assert document["config"] == {
        "collections": {"not_in_optimizer": {"cadence": {"every": 25}}},
        "probes": ["stale_gradients"],
    }
    assert [rule.get("tensors") for rule in document["rules"][:2]] == [
        {"include": ".*gradients:stale(_2)?"},
        {"collection": "not_in_optimizer", "include": "fc.*:not_in_optimizer"},
    ]
    assert document["rules"][2]["sql"] == 'SELECT step FROM statistics WHERE "probe.was_optimized" > 0'
    assert document["environment"] == {"note": "unheld"}
    end = json.loads((run / "end/a1/0.json").read_text())
    assert end["health"] == {
        "faults": {"stale gradients": "no"},
        "overhead": {"seconds": {"not_in_optimizer": 0.1}},
    }
    assert json.loads((run / "control.json").read_text())["cadence"] == [["not_in_optimizer", 50]]
    assert journal.decode((run / "journal/a1/0.json").read_bytes(), "j").evaluations[0].watermark == 11


def test_a_dry_run_counts_and_writes_nothing(tmp_path: Path) -> None:
    write_run(tmp_path)
    before = contents(tmp_path)
    assert migrated(tmp_path, dry_run=True) == (2, 0, 4, {})
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("dtype", "shape"), [("F32", (700, 1500)), ("BF16", (10,)), ("U8", (0,))])
def test_compressed_snapshots_become_plain_safetensors(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    run = write_run(tmp_path)
    data = bytes(index % 7 for index in range(math.prod(shape) * DTYPES[dtype].itemsize))
    (run / KEY).parent.mkdir(parents=True)
    (run / KEY).write_bytes(compressed_snapshot(dtype, shape, data))
    store = Store.open(run)
    with pytest.raises(FormatError, match=r"compressed by an earlier version\n  hint: .*migrate-store"):
        open_snapshot(store, KEY)
    done = migrate_run(store, "vision/first")
    assert (done.snapshots, done.damaged) == (1, {})
    opened = open_snapshot(store, KEY)
    assert opened.metadata == {"step": "3"}
    assert (opened.tensors["w"].dtype, opened.tensors["w"].shape) == (dtype, shape)
    assert opened.read("w").tobytes() == data
    assert opened.read("plain").tobytes() == b"abcd"
    with safetensors.safe_open(run / KEY, "numpy") as file:
        assert file.metadata() == {"step": "3"}
        assert set(file.keys()) == {"w", "plain"}
    assert migrate_run(store, "vision/first").is_current


@pytest.mark.parametrize(
    "lie",
    [
        {"codec": "gzip"},
        {"block": 5},
        {"dtype": "F12"},
        {"shape": [-1]},
        {"shape": [2**62, 2**62]},
        {"shape": [0, 2**62], "blocks": []},
        {"shape": [9]},
        {"shape": [1] * 65},
        {"blocks": []},
        {"blocks": [2**40]},
        {"blocks": None},
    ],
)
def test_a_snapshot_with_a_false_compression_is_not_changed(tmp_path: Path, lie: dict[str, object]) -> None:
    run = write_run(tmp_path)
    (run / KEY).parent.mkdir(parents=True)
    (run / KEY).write_bytes(compressed_snapshot("F32", (1000,), bytes(4000), lie))
    done = migrate_run(Store.open(run), "vision/first")
    assert (done.snapshots, [*done.damaged]) == (0, [KEY])


class InterruptedMigrationError(Exception):
    pass


@contextmanager
def at_most(writes: int) -> Iterator[None]:
    """Interrupt after some writes and deletions."""
    left = writes
    put, delete = Store.put, Store.delete

    def spend() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise InterruptedMigrationError

    def bounded_put(store: Store, key: str, data: bytes) -> None:
        spend()
        put(store, key, data)

    def bounded_delete(store: Store, key: str) -> None:
        spend()
        delete(store, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "put", bounded_put)
        patch.setattr(Store, "delete", bounded_delete)
        yield


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("writes", range(8))
def test_an_interrupted_migration_is_completed_by_the_next(
    tmp_path: Path, compacted: bool, writes: int
) -> None:
    run = write_run(tmp_path, compacted=compacted)
    with at_most(writes):
        try:
            migrated(tmp_path)
        except InterruptedMigrationError:
            with pytest.raises(FormatError):
                open_run(run)
    migrated(tmp_path)
    check(run)
    assert migrated(tmp_path) == (0, 0, 0, {})


# Schema 2


def migrated_r(folder: Path, **options: bool) -> MigratedRun:
    return migrate_run(Store.open(folder).child("default/r"), "default/r", silent_seconds=0, **options)


def answers(run: Path) -> object:
    opened = open_run(run)
    assert not opened.damaged
    return rows_of(opened.rows("a")), opened.series(FIRST.name, "max"), opened.losses(), opened.steps()


def names(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*.*") if path.suffix != ".json")


def test_a_run_of_schema_2_is_refused_with_the_command_to_run(tmp_path: Path) -> None:
    run = as_schema_2(small_run(tmp_path))
    with pytest.raises(FormatError, match=r"schema 2.*\n  hint: .*watchstep migrate-store"):
        open_run(run)


def test_segments_of_schema_2_become_arrow_with_equal_rows(tmp_path: Path) -> None:
    run = small_run(tmp_path, workers=2)
    due, before = answers(run), names(run)
    as_schema_2(run)
    old = names(run)
    assert [name.replace(".parquet", ".arrow") for name in old] == before
    assert (run / old[0]).read_bytes().startswith(b"PAR1")
    dry = migrated_r(tmp_path, dry_run=True)
    assert names(run) == old
    done = migrated_r(tmp_path)
    assert (done.segments, done.compacted, done.documents, done.damaged) == (3, 0, 1, {})
    assert dry == done
    assert names(run) == before
    assert answers(run) == due
    compact(run, delete_after=0)
    assert answers(run) == due
    assert migrated_r(tmp_path).is_current


@pytest.mark.parametrize("deleted", [True, False])
def test_compacted_runs_of_schema_2_are_migrated_with_their_sources(tmp_path: Path, deleted: bool) -> None:
    run = small_run(tmp_path)
    due = answers(run)
    compact(run, delete_after=0 if deleted else None)
    before = names(run)
    as_schema_2(run)
    done = migrated_r(tmp_path)
    assert (done.segments, done.compacted, done.damaged) == (0 if deleted else 3, 2, {})
    assert names(run) == [name.replace("0000000001/", "0000000002/") for name in before]
    manifest = json.loads((run / "compacted/0000000002/manifest.json").read_text())
    assert manifest["schema"] == 3
    assert [SegmentKey.parse(source).path for source in manifest["sources"]] == manifest["sources"]
    assert len(manifest["sources"]) == 3
    assert answers(run) == due
    opened = open_run(run)
    assert (
        opened.index.segments == []
    )  # the manifest covers the renamed segments, so that no row counts twice
    assert compact(run).written == 0
    assert migrated_r(tmp_path).is_current


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("writes", range(12))
def test_an_interrupted_migration_of_schema_2_is_completed_by_the_next(
    tmp_path: Path, compacted: bool, writes: int
) -> None:
    run = small_run(tmp_path)
    due = answers(run)
    if compacted:
        compact(run)
    as_schema_2(run)
    with at_most(writes):
        try:
            migrated_r(tmp_path)
        except InterruptedMigrationError:
            with pytest.raises(FormatError):
                open_run(run)
    assert migrated_r(tmp_path).damaged == {}
    assert answers(run) == due
    assert not [*run.glob("stats/**/*.parquet")]
    assert migrated_r(tmp_path).is_current


def test_the_list_of_blocks_of_a_merged_segment_remains(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    run, block = tmp_path / "default/r", block_of(some_rows(range(3), workers=2))
    blocks = json.dumps({"token-0": [1, 2], "token-1": [0]}).encode()
    path = run / "stats/a/node/n0/0000000000-0-2.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(parquet_segment(block, {b"watchstep.blocks": blocks}))
    as_schema_2(run)
    assert migrated_r(tmp_path).segments == 1
    data = store.get("stats/a/node/n0/0000000000-0-2.arrow")
    assert segments.metadata_of(data, "s") == {b"watchstep.blocks": blocks}
    assert rows_of(segments.decode(data, "s")) == rows_of(block)
    assert blocks_of(data, "s") == {"token-0": (1, 2), "token-1": (0,)}


def test_a_damaged_segment_of_schema_2_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    run = as_schema_2(small_run(tmp_path))
    first, second, _ = sorted(run.glob("stats/**/*.parquet"))
    first.write_bytes(first.read_bytes()[:-10])
    second.rename(second.with_name("strange.parquet"))
    done = migrated_r(tmp_path)
    assert done.segments == 1
    assert [*done.damaged] == [str(first.relative_to(run)), "stats/a/node/w0/strange.parquet"]
    opened = open_run(run)
    assert opened.steps() == [8, 9, 10, 11]
    assert opened.damaged.keys() == done.damaged.keys()
    assert migrated_r(tmp_path).damaged == done.damaged


def test_a_run_of_a_later_schema_is_not_changed(tmp_path: Path) -> None:
    run = as_schema_2(small_run(tmp_path))
    document = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**document, "schema": 4}))
    before = contents(tmp_path)
    assert migrated_r(tmp_path).is_current
    assert contents(tmp_path) == before


@pytest.fixture
def old_clock() -> float:
    return time.time() - 10_000


def test_a_run_that_may_be_written_to_is_left_until_it_is_silent(tmp_path: Path, old_clock: float) -> None:
    run = write_run(tmp_path, ended=False)
    before = contents(tmp_path)
    with pytest.raises(RunInUseError, match=r"vision/first is open.*\n  hint: .*900 s"):
        migrated(tmp_path)
    assert contents(tmp_path) == before
    for path in tmp_path.rglob("*"):
        os.utime(path, (old_clock, old_clock))
    assert migrated(tmp_path) == (2, 0, 3, {})
    check(run)


def test_a_segment_that_arrives_later_is_rewritten_by_the_next_migration(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    migrated(tmp_path)
    (run / f"stats/a1/node/w0/{2:010d}-12-13.parquet").write_bytes(segment(range(12, 14)))
    assert migrated(tmp_path) == (1, 0, 0, {})
    check(run, 14)


def test_a_damaged_segment_is_named_and_not_changed(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (path,) = run.glob("stats/a1/node/w0/*-0-5.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    segments, _, documents, damaged = migrated(tmp_path)
    assert (segments, documents) == (1, 4)
    assert [*damaged] == [str(path.relative_to(run))]


def test_a_store_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        migrate_run(Store.open(tmp_path).child("vision/none"), "vision/none")


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("unheld", "not_in_optimizer"),
        ("a.b:unheld", "a.b:not_in_optimizer"),
        ("gradients:kept", "gradients:stale"),
        ("model.gradients:kept_2", "model.gradients:stale_2"),
        ("kept", "kept"),
        ("my_unheld", "my_unheld"),
    ],
)
def test_names(name: str, new: str) -> None:
    assert new_name(name) == new
    assert new_text(name) == new
    assert new_name(new) == new


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "watchstep.command", "migrate-store", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_command_reports_each_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    counts = "vision/first: 2 segments, 0 compacted segments, 0 snapshots, 4 documents"
    done = run_command(str(tmp_path), "--dry-run")
    assert (done.returncode, done.stdout) == (0, f"{counts} to rewrite\n1 of 1 runs to rewrite\n")
    done = run_command(str(tmp_path), "--project", "other")
    assert (done.returncode, done.stdout) == (0, "0 of 0 runs rewritten\n")
    done = run_command(str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        f"{counts} rewritten\n1 of 1 runs rewritten\n",
        "",
    )
    done = run_command(str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "vision/first: current\n0 of 1 runs rewritten\n")


def test_the_command_exits_with_1_where_a_run_may_be_written_to(tmp_path: Path) -> None:
    write_run(tmp_path, ended=False)
    done = run_command(str(tmp_path))
    assert done.returncode == 1
    assert "vision/first is open, and was written to" in done.stdout
