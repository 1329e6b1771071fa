"""User-defined collections, other tensor kinds and probes in every reader, with and without compaction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.sdk.format.blocks import Row, block_of
from tests.sdk.reading.stored import FIRST, new_run, write
from tests.sdk.training import EVERY_STEP, Training
from watchstep import Cadence, Collection, Hook, Run, open_run
from watchstep.reading.compaction import compact
from watchstep.reading.comparison.diff import diff
from watchstep.reading.tensorboard import export

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


def record(folder: Path, run: str) -> Path:
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
    return record(tmp_path_factory.mktemp("store"), "r")


@pytest.fixture(scope="module", params=["recorded", "compacted"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    url = record(tmp_path_factory.mktemp(request.param), "r")
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
