"""Runs that are opened: their tensors, collections, probes, headroom and modules."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.conftest import S3
from tests.sdk.format.blocks import Row, block_of
from tests.sdk.reading.stored import FIRST, LOSS, SECOND, new_run, sharded_rows, write
from tests.sdk.training import EVERY_STEP, Training, wait_until_there
from watchstep import Bounds, Cadence, CaptureConfig, Collection, Hook, Run, open_run
from watchstep.errors import BadNameError, ConfigError, NotFoundError, StoreError
from watchstep.format.layout import SCHEMA_VERSION
from watchstep.format.tensors import TensorInfo
from watchstep.reading.budget import OverBudgetError, ReadBudget
from watchstep.reading.compaction import compact
from watchstep.reading.comparison.diff import diff
from watchstep.reading.headroom import FORMATS, headroom_of, read_magnitudes, shares_of
from watchstep.reading.module_tree import module_tree
from watchstep.reading.tensorboard import export
from watchstep.store.store import Store

# Runs


def record_losses(url: str | Path, steps: int, *, first: int = 0, run: str = "r") -> Hook:
    hook = Hook(url, run=run)
    hook._recorder.step = first
    for step in range(first, first + steps):
        hook.log(loss=float(step), accuracy=step / 10)
        hook.step()
    hook.close()
    return hook


def test_filters(tmp_path: Path) -> None:
    run = open_run(record_losses(tmp_path, 3).run_url)
    assert run.tensors(regex="acc") == ["accuracy"]
    assert run.tensors(collection="losses") == ["loss"]
    assert run.tensors(collection="losses", regex="acc") == []
    with pytest.raises(ConfigError, match="regex"):
        run.tensors(regex="(")


def test_the_workers_of_a_run_are_known_without_its_rows(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    for worker in (2, 0):
        rows = [Row(step, FIRST, [1.0], worker=worker) for step in range(4)]
        write(store, [block_of(rows)], writer=f"w{worker}")
    run = open_run(tmp_path / "default" / "r")
    for entry in list(store.entries("stats/")):
        store.delete(entry.key)
    assert run.workers == [0, 2]


def test_a_resumed_run_shows_the_newest_attempt_of_each_step(tmp_path: Path) -> None:
    record_losses(tmp_path, 10)
    record_losses(tmp_path, 4, first=6)
    run = open_run(tmp_path / "default" / "r")
    assert run.steps() == list(range(10))
    assert run.losses().num_rows == 10
    first, second = run.attempts
    assert len(run.rows(first)) == 20
    assert sorted(set(run.rows(second).step.tolist())) == [6, 7, 8, 9]


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    hook = Hook(tmp_path, run="r")
    for value in (1.5, math.inf, -math.inf, math.nan, -2.0):
        hook.log(loss=value)
        hook.step()
    hook.close()
    values = open_run(hook.run_url).losses()["value"].to_pylist()
    assert math.isnan(values.pop(3))
    assert values == [1.5, math.inf, -math.inf, -2.0]


def test_a_damaged_segment_hides_no_other(tmp_path: Path) -> None:
    for _ in range(2):
        record_losses(tmp_path, 3)
    (victim, _) = sorted((tmp_path / "default" / "r" / "stats").rglob("*.arrow"))
    victim.write_bytes(victim.read_bytes()[:-40])
    run = open_run(tmp_path / "default" / "r")
    assert run.steps() == [0, 1, 2]
    (name,) = run.damaged
    assert name.endswith(".arrow")


def test_waiting_for_steps_of_a_run_that_continues(tmp_path: Path) -> None:
    hook = Hook(tmp_path, config=CaptureConfig(bounds=Bounds(flush_seconds=0.01)))
    hook.log(loss=0.0)
    hook.step()
    run = wait_until_there(hook)
    reading = threading.Event()

    def go_on() -> None:
        reading.wait(30)
        for step in range(1, 20):
            hook.log(loss=float(step))
            hook.step()

    writer = threading.Thread(target=go_on)
    writer.start()
    reading.set()
    assert run.wait_for_steps([0, 10, 19], timeout=60) == [0, 10, 19]
    writer.join()
    hook.close()
    assert run.wait_for_steps([5, 1000]) == [5]


def test_waiting_has_an_end(tmp_path: Path) -> None:
    hook = Hook(tmp_path)
    run = wait_until_there(hook)
    assert run.wait_for_steps([3], timeout=0.05) == []
    hook.close()


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("nowhere/default/r", NotFoundError, "not found"),
        ("{store}/default/other", NotFoundError, "not found"),
        ("r", NotFoundError, "not found"),
        ("{store}/default/..r", BadNameError, "run name"),
        ("ftp://host/default/r", ConfigError, "unknown scheme"),
        ("s3://missing-bucket/default/r", StoreError, "no such bucket"),
    ],
)
def test_a_run_that_cannot_be_read(
    tmp_path: Path, s3: S3, url: str, error: type[Exception], message: str
) -> None:
    record_losses(tmp_path, 1)
    with pytest.raises(error, match=message) as caught:
        open_run(url.format(store=tmp_path))
    assert "hint:" in str(caught.value)


def test_what_was_not_recorded_is_named(tmp_path: Path) -> None:
    run = open_run(record_losses(tmp_path, 2).run_url)
    with pytest.raises(NotFoundError, match="'nope'"):
        run.tensor("nope")
    with pytest.raises(NotFoundError, match="no full tensors were saved"):
        run.tensor("loss").value(1)


def test_a_run_of_a_later_version_is_refused(tmp_path: Path) -> None:
    record_losses(tmp_path, 1)
    store = Store.open(tmp_path).child("default/r")
    store.put("run.json", store.get("run.json").replace(b'"schema": %d' % SCHEMA_VERSION, b'"schema": 99'))
    with pytest.raises(Exception, match="newer watchstep"):
        open_run(tmp_path / "default" / "r")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pattern", ["attempts/*.json", "end/*/0.json", "stats/*/*/*/*.arrow"])
def test_a_named_pipe_in_the_place_of_an_object_does_not_block(tmp_path: Path, pattern: str) -> None:
    record_losses(tmp_path, 3)
    (file,) = (tmp_path / "default" / "r").glob(pattern)
    exchange_for_pipe(file)
    run = open_run(tmp_path / "default" / "r")
    assert (run.steps(), run.damaged) == ([] if file.suffix == ".arrow" else [0, 1, 2], {})
    assert len(run.ends()) == (0 if "end" in pattern else 1)


@pytest.mark.timeout(120)
def test_a_named_pipe_in_the_place_of_the_runs_document_is_reported(tmp_path: Path) -> None:
    record_losses(tmp_path, 3)
    exchange_for_pipe(tmp_path / "default" / "r" / "run.json")
    with pytest.raises(StoreError, match=r"run\.json is not a regular file"):
        open_run(tmp_path / "default" / "r")


def exchange_for_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


# Collections and probes


CONFIG = replace(
    EVERY_STEP,
    collections={
        **EVERY_STEP.collections,
        "updates": Cadence(),
        "inputs": Cadence(),
        "optimizer_state": Cadence(),
        "head": Collection(Cadence(), include="3", roles=("weight", "gradient")),
        "attention": Cadence(),
    },
)
STEPS = 4


def record_collections(folder: Path, run: str) -> Path:
    torch.manual_seed(0)
    training, hook = Training(), Hook(folder, run=run, config=CONFIG)
    hook.watch(training.model, training.optimizer)
    training.run(
        STEPS, lambda step, _: hook.record({"layer 3": torch.full((4,), 1.0 + step)}, collection="attention")
    )
    hook.close()
    assert not hook.health["faults"]
    return folder / "default" / run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_collections(tmp_path_factory.mktemp("store"), "r")


@pytest.fixture(scope="module", params=["recorded", "compacted"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    url = record_collections(tmp_path_factory.mktemp(request.param), "r")
    if request.param == "compacted":
        compact(url, delete_after=0)
    return open_run(url)


def test_a_tensor_is_in_each_of_its_collections(run: Run) -> None:
    assert set(run.collections["head"]) == {"3.weight", "3.weight:gradient", "3.bias:gradient"}
    assert "3.weight" in run.collections["weights"]
    assert run.tensors(collection="head", regex="bias") == ["3.bias:gradient"]
    assert run.tensors(collection="attention") == ["layer 3"]
    assert "3.weight:update" in run.tensors("updates")
    assert run.tensors("inputs")
    assert "3.weight:exp_avg" in run.tensors("optimizer_state")


def test_heatmaps_of_collections_of_ones_own(run: Run) -> None:
    heat = run.heatmap("head", "rms")
    assert heat.tensors == run.tensors("head")
    assert np.isfinite(heat.values).all()
    assert run.heatmap("attention", "max").values.tolist() == [[1.0, 2.0, 3.0, 4.0]]


def test_probes_are_figures(run: Run) -> None:
    ratio = run.series("3.weight:update", "update_ratio")
    update, weight = (run.series(name, "rms")["rms"].to_numpy() for name in ("3.weight:update", "3.weight"))
    assert ratio["update_ratio"].to_pylist()[1:] == pytest.approx(
        (update[1:] / weight[:-1]).tolist(), rel=0.05
    )
    assert run.series("3.weight:update", "probe.update_ratio").columns[-1] == ratio["update_ratio"]
    assert run.series("3.weight", "update_ratio")["update_ratio"].null_count == STEPS
    dead = run.series("1:output", "dead_channels")["dead_channels"].to_pylist()
    assert run.heatmap(["1:output"], "dead_channels").values.tolist() == [dead]
    newest = run.at_step(["gradient_cosine", "rms"])
    with_cosine = newest.filter(
        np.array([value is not None for value in newest["gradient_cosine"].to_pylist()])
    )
    assert set(with_cosine["tensor"].to_pylist()) <= set(run.tensors("gradients"))
    assert with_cosine.num_rows


def test_sql_has_collections_and_probes(run: Run) -> None:
    found = run.sql("""
        SELECT step, "probe.update_ratio" AS ratio FROM statistics JOIN tensors ON tensor = name
        WHERE role = 'update' AND list_contains(collections, 'updates') AND tensor = '3.weight:update' ORDER BY step
    """)
    assert (
        found["ratio"].to_pylist()
        == run.series("3.weight:update", "update_ratio")["update_ratio"].to_pylist()
    )
    heads = run.sql(
        "SELECT name FROM tensors WHERE list_contains(collections, 'head') ORDER BY \"order\", name"
    )
    assert sorted(heads["name"].to_pylist()) == sorted(run.tensors("head"))


def test_a_tensors_table_has_its_probes(run: Run) -> None:
    table = run.tensor("3.weight:update").statistics()
    due = run.series("3.weight:update", "update_ratio")["update_ratio"].to_pylist()
    assert table["probe.update_ratio"].to_pylist() == due
    assert table.to_pandas()["probe.update_ratio"].notna().sum() == len(due) - due.count(None)


def test_tensorboard_gets_probes(run: Run, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    export(run, tmp_path / "events")
    found = EventAccumulator(str(tmp_path / "events" / "train-0"))
    found.Reload()
    tags = found.Tags()["scalars"]
    assert {
        "3.weight_update/update_ratio",
        "1_output/dead_channels",
        "3.weight_gradient/gradient_cosine",
    } <= set(tags)
    assert "3.weight/update_ratio" not in tags
    due = [value for value in _probe(run, "3.weight:update") if value is not None]
    assert [event.value for event in found.Scalars("3.weight_update/update_ratio")] == pytest.approx(due)


def _probe(run: Run, tensor: str) -> list[float | None]:
    values: list[float | None] = run.series(tensor, "update_ratio")["update_ratio"].to_pylist()
    return values


def test_diff_compares_probes(run: Run, recorded: Path) -> None:
    assert diff(run, open_run(recorded)).step is None


@pytest.mark.parametrize("probes", [{"cosine": 0.5}, {}])
def test_a_probe_that_differs_is_a_difference(tmp_path: Path, probes: dict[str, float]) -> None:
    for name, values in (("a", {"cosine": 0.25}), ("b", probes)):
        rows = [Row(0, FIRST, [1.0], probes={"cosine": 0.1}), Row(1, FIRST, [1.0], probes=values)]
        write(new_run(tmp_path, name), [block_of(rows)])
    found = diff(open_run(tmp_path / "default" / "a"), open_run(tmp_path / "default" / "b"))
    (row,) = found.table.to_pylist()
    assert (row["step"], row["figure"], row["a"]) == (1, "probe.cosine", 0.25)
    assert row["b"] == probes.get("cosine")


# Headroom


EVERY = (0, 2**62)
TYPES = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp32": np.float32,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


def test_limits_are_those_of_the_data_types() -> None:
    for each in FORMATS:
        limits = ml_dtypes.finfo(TYPES[each.name])  # type: ignore[no-untyped-call]
        assert each.largest == float(limits.max)
        assert each.smallest_normal == float(limits.smallest_normal)
        assert each.smallest == float(limits.smallest_subnormal)


@pytest.mark.parametrize(
    ("largest", "smallest", "bits", "state"),
    [
        (1.0, 2.0**-14, (math.log2(65504), 0.0), "ok"),
        (65504.0, 1.0, (0.0, 14.0), "close"),
        (65505.0, 1.0, (math.log2(65504 / 65505), 14.0), "overflow"),
        (1.0, 2.0**-20, (math.log2(65504), -6.0), "subnormal"),
        (1.0, 2.0**-25, (math.log2(65504), -11.0), "underflow"),
        (1e308, 5e-324, (math.log2(65504) - math.log2(1e308), -1060.0), "overflow"),
    ],
)
def test_headroom_of_fp16(largest: float, smallest: float, bits: tuple[float, float], state: str) -> None:
    room = headroom_of(largest, smallest)[0]
    assert room.format == "fp16"
    assert (room.overflow_bits, room.underflow_bits) == pytest.approx(bits)
    assert room.state == state


def test_a_tensor_without_elements_has_no_headroom() -> None:
    for room in headroom_of(math.nan, math.nan):
        assert (room.overflow_bits, room.underflow_bits, room.state) == (None, None, "ok")


def test_extremes_and_their_first_steps(tmp_path: Path) -> None:
    rows = [Row(step, FIRST, [value, 0.5]) for step, value in enumerate([1.0, -8.0, 8.0, 2.0**-30])]
    rows += [Row(step, SECOND, [math.nan, 0.0]) for step in range(4)]
    rows.append(Row(3, FIRST, [1e9], mode="eval"))
    write(new_run(tmp_path), [block_of(rows[:3]), block_of(rows[3:])])
    url = tmp_path / "default" / "r"
    for _ in range(2):
        found = read_magnitudes(open_run(url).index, [FIRST.name, SECOND.name], 2, "train", EVERY)
        first, second = found.tensors
        assert (first.largest, first.largest_step) == (8.0, 1)
        assert (first.smallest, first.smallest_step) == (2.0**-30, 3)
        assert math.isnan(second.largest)
        assert (second.largest_step, second.smallest_step) == (-1, -1)
        assert found.edges.tolist() == [0, 2, 4]
        assert (found.largest.tolist(), found.smallest.tolist()) == ([8.0, 8.0], [0.5, 2.0**-30])
        compact(url, delete_after=0)
    within = read_magnitudes(open_run(url).index, [FIRST.name], 2, None, (3, 3))
    assert (within.tensors[0].largest, within.tensors[0].largest_step) == (1e9, 3)


def test_extremes_of_shards(tmp_path: Path) -> None:
    write(new_run(tmp_path), [block_of(sharded_rows(range(3), 4))])
    (found,) = read_magnitudes(
        open_run(tmp_path / "default" / "r").index, [FIRST.name], 1, "train", EVERY
    ).tensors
    assert (found.largest, found.largest_step, found.smallest) == (8.0, 0, 1.0)


def test_shares_of_elements(tmp_path: Path) -> None:
    values = [2.0**16, -(2.0**15), 1.0, 2.0**-14, 2.0**-15, -(2.0**-24), 2.0**-25, 0.0]
    write(new_run(tmp_path), [block_of([Row(0, FIRST, values)])])
    shares = shares_of(open_run(tmp_path / "default" / "r").histogram(FIRST.name))
    assert (shares[0].overflow, shares[0].subnormal, shares[0].underflow) == (1 / 7, 2 / 7, 1 / 7)
    assert (shares[2].overflow, shares[2].subnormal, shares[2].underflow) == (0.0, 0.0, 0.0)


# Modules


def info(module: str, order: int, kind: str = "Linear") -> TensorInfo:
    return TensorInfo(f"{module}.weight", ("weights",), "weight", module, kind, order)


def test_modules_precede_those_in_them() -> None:
    tree = module_tree([info("a.x", 0), info("a.y", 1, "Conv2d"), info("b", 2), info("a.x", 3)])
    assert [(each.path, each.parent, each.depth, each.rows) for each in tree] == [
        ("a", None, 0, []),
        ("a.x", 0, 1, [0, 3]),
        ("a.y", 0, 1, [1]),
        ("b", None, 0, [2]),
    ]
    assert [(each.first_row, each.end_row) for each in tree] == [(0, 4), (0, 4), (1, 2), (2, 3)]
    assert [each.module_type for each in tree] == ["", "Linear", "Conv2d", "Linear"]
    assert tree[1].name == "x"


def test_tensors_without_a_module_are_in_none() -> None:
    assert module_tree([TensorInfo("loss", ("losses",), "loss")]) == []


def test_the_depth_is_limited() -> None:
    tree = module_tree([info(".".join("a" * 1000), 0)])
    assert len(tree) == 32
    assert tree[-1].path.count(".") == 999


def test_the_steps_of_a_query_are_part_of_its_budget_and_the_workers_are_not(tmp_path: Path) -> None:
    store = new_run(tmp_path)
    rows = [Row(step, LOSS, [1.0], worker=worker) for step in range(100) for worker in range(20)]
    write(store, [block_of(rows[start : start + 200]) for start in range(0, 2000, 200)])
    run = open_run(tmp_path / "default" / "r")
    run.index.budget = ReadBudget(60, 0.05)  # the steps of one object take 0.01 MB
    assert run.workers == list(range(20))
    with pytest.raises(OverBudgetError, match=r"more than 0\.05 MiB"):
        run.steps()
