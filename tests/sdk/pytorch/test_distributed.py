"""Distributed training: shards merge to what one process would have seen, replicas record and save once and are compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.sdk.capture.saved_rows import assert_one_for_each_object, assert_steps_never_go_back
from tests.sdk.programs import run_program
from tests.sdk.training import watching
from watchstep import Run, open_run
from watchstep_rules.backtest.backtest import backtest
from watchstep_rules.config.rule_config import RuleConfig

pytestmark = pytest.mark.ci

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from watchstep import CaptureConfig, Hook

kind, store = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 2))
ranks = dist.get_world_size()
if kind.startswith("ddp"):
    model = nn.parallel.DistributedDataParallel(model)
else:
    shape, names = ((ranks,), ("shard",)) if kind == "fsdp" else ((2, ranks // 2), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with Hook(store, run="r", config=CaptureConfig(overhead_budget=None)) as hook:
    hook.watch(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(101):
        x = torch.randn(8, 8, generator=generator)
        optimizer.zero_grad()
        model(x.chunk(ranks)[dist.get_rank()]).pow(2).mean().backward()
        optimizer.step()
        if kind == "ddp-diverging" and dist.get_rank() == 1:
            with torch.no_grad():
                model.module[0].bias.add_(1e-3)
assert not hook.health["faults"], hook.health
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The training of a kind, which its tests share."""

    @functools.cache
    def run_of(kind: str) -> Run:
        folder = tmp_path_factory.mktemp(kind)
        ranks = 4 if kind == "hsdp" else 2
        run_program(
            folder, PROGRAM, kind, folder / "runs", ranks=ranks, WATCHSTEP_RUN="r", WATCHSTEP_ATTEMPT="a"
        )
        return open_run(folder / "runs" / "default" / "r")

    return run_of


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same training in one process, over whole batches."""
    from watchstep import CaptureConfig

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watching(
        tmp_path_factory.mktemp("alone"), model, optimizer, config=CaptureConfig(overhead_budget=None)
    ) as hook:
        generator = torch.Generator().manual_seed(1)
        for _ in range(101):
            optimizer.zero_grad()
            model(torch.randn(8, 8, generator=generator)).pow(2).mean().backward()
            optimizer.step()
    return open_run(hook.run_url)


NAMES = ("0.weight", "2.bias", "0.weight:gradient", "2.weight:gradient")


@pytest.mark.parametrize("kind", [pytest.param("fsdp", marks=pytest.mark.release), "hsdp"])
def test_shards_merge_to_what_one_process_sees(trained: Callable[[str], Run], alone: Run, kind: str) -> None:
    run = trained(kind)
    for name in NAMES:
        for figure in ("count", "square_sum", "min", "mean"):
            merged, whole = (held.series(name, figure, merge=True) for held in (run, alone))
            assert merged["step"].to_pylist() == whole["step"].to_pylist()
            assert np.allclose(merged[figure], whole[figure], rtol=2e-4, atol=1e-6), (name, figure)
    rows = run.tensor("0.weight").statistics()
    assert set(rows["shard_count"].to_pylist()) == {2}
    assert set(rows["replica"].to_pylist()) == {0}
    assert set(rows["stage"].to_pylist()) == {"local"}
    assert set(run.tensor("0.weight:gradient").statistics()["stage"].to_pylist()) == {"reduced"}


LATER = (1, 2, 4, 8, 16, 32, 64, 100)
"""Steps with checksums, after the first."""


def checksums(run: Run, name: str) -> dict[int, list[float]]:
    """Checksums by step, one for each replica."""
    rows = run.tensor(name).statistics().to_pydict()
    found: dict[int, list[float]] = {}
    for step, value in zip(rows["step"], rows["mean"], strict=True):
        found.setdefault(step, []).append(value)
    return found


def distinct(run: Run, name: str) -> dict[int, int]:
    """Number of different checksums by step."""
    return {step: len(set(values)) for step, values in checksums(run, name).items()}


@pytest.mark.release
def test_of_equal_replicas_one_records_and_both_send_checksums(
    trained: Callable[[str], Run], alone: Run
) -> None:
    run = trained("ddp")
    for name in NAMES:
        assert run.tensor(name).workers == [0]
        held, whole = run.series(name, "square_sum"), alone.series(name, "square_sum")
        assert np.allclose(held["square_sum"], whole["square_sum"], rtol=2e-4, atol=1e-6)
    assert run.tensor("0:output").workers == [0, 1]
    assert distinct(run, "0.bias:checksum") == dict.fromkeys((0, *LATER), 1)


@pytest.mark.release
def test_checksums_tell_replicas_apart_that_went_their_own_way(trained: Callable[[str], Run]) -> None:
    run = trained("ddp-diverging")
    assert distinct(run, "0.bias:checksum") == {0: 1, **dict.fromkeys(LATER, 2)}


@pytest.mark.release
@pytest.mark.parametrize(("kind", "found"), [("ddp", []), ("ddp-diverging", [1])])
def test_replicas_that_part_are_found(trained: Callable[[str], Run], kind: str, found: list[int]) -> None:
    rule = RuleConfig(rule="replica_divergence", severity="critical")
    (outcome,) = backtest(trained(kind).rows(), [rule])
    assert [transition.step for transition in outcome.fired] == found


def test_each_shard_of_a_replica_has_its_checksum(trained: Callable[[str], Run]) -> None:
    run = trained("hsdp")
    for shard in (0, 1):
        found = checksums(run, f"0.weight:checksum_{shard}")
        counts = {step: (len(values), len(set(values))) for step, values in found.items()}
        assert counts == dict.fromkeys((0, *LATER), (2, 1))


TENSOR_PARALLEL = """
import sys
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from watchstep import Cadence, CaptureConfig, Collection, Hook

out = Path(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh["data"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = Collection(tensors=Cadence())
config = CaptureConfig(collections={"weights": saved, "gradients": saved}, overhead_budget=None)
with Hook(out / "runs", run="r", config=config) as hook:
    hook.watch(model, optimizer)
    for step in range(2):
        weights = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
        model(torch.randn(4, 8)).pow(2).mean().backward()
        gradients = {f"{name}:gradient": p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        if dist.get_rank() == 0:
            np.savez(out / f"{step}.npz", **{name: t.numpy() for name, t in (weights | gradients).items()})
        optimizer.step()
        optimizer.zero_grad()
assert not hook.health["faults"], hook.health
dist.destroy_process_group()
"""


@pytest.mark.release
def test_shards_of_two_mesh_dimensions_merge(tmp_path: Path) -> None:
    run_program(tmp_path, TENSOR_PARALLEL, tmp_path, ranks=4, WATCHSTEP_RUN="r", WATCHSTEP_ATTEMPT="a")
    run = open_run(tmp_path / "runs" / "default" / "r")
    for step in (0, 1):
        expected = np.load(tmp_path / f"{step}.npz")
        for name in ("0.weight", "2.weight", "0.weight:gradient", "2.weight:gradient"):
            np.testing.assert_allclose(run.tensor(name).value(step), expected[name], rtol=1e-6)
            (count,) = (row["count"] for row in run.series(name, "count").to_pylist() if row["step"] == step)
            assert count == expected[name].size
            (mean,) = (row["mean"] for row in run.series(name, "mean").to_pylist() if row["step"] == step)
            np.testing.assert_allclose(mean, expected[name].mean(dtype=np.float64), rtol=1e-5)


SAVING = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from watchstep import Cadence, CaptureConfig, Collection, Hook

kind, store, expected = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
plain = model = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 1))
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
else:
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
scaled = kind == "fsdp_scaled"
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=scaled)
scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, enabled=scaled)
names = ("weights", "biases", "gradients", "activations", "optimizer_state", "inputs")
saved = Collection(None, tensors=Cadence(2))
config = CaptureConfig(collections={"losses": Cadence(), **dict.fromkeys(names, saved)}, system=None)

def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

outputs, values = {}, {}
plain[0].register_forward_hook(lambda _, __, output: outputs.update({"0:output": output.detach().clone()}))
with Hook(store, run="r", config=config) as hook:
    hook.watch(model, optimizer)
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        x = torch.randn(4, 8, generator=generator)
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        scaler.scale(loss).backward()
        tensors = {"0:output": outputs["0:output"], "model:input": x}
        for name, p in plain.named_parameters():
            tensors[name] = whole(p)
            tensors[name + ":gradient"] = whole(p.grad) / (scaler.get_scale() if scaled else 1)
        scaler.step(optimizer)
        scaler.update()
        for name, p in plain.named_parameters():
            for key, state in optimizer.state[p].items():
                if state.dim():
                    tensors[name + ":" + key] = whole(state)
        values[step] = tensors
assert not hook.health["faults"], hook.health
assert not hook.health["counts"].get("dropped_tensors"), hook.health
torch.save(values, f"{expected}/{rank}.pt")
dist.destroy_process_group()
"""


def saved_by_ranks(tmp_path: Path, kind: str) -> tuple[Run, list[dict[int, dict[str, torch.Tensor]]]]:
    """The run, and what each rank computed."""
    run_program(
        tmp_path, SAVING, kind, tmp_path / "runs", tmp_path, ranks=2, WATCHSTEP_RUN="r", WATCHSTEP_ATTEMPT="a"
    )
    run = open_run(tmp_path / "runs" / "default" / "r")
    assert_one_for_each_object(run)
    assert_steps_never_go_back(tmp_path / "runs")
    return run, [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]


def is_of_parameters(name: str) -> bool:
    return name not in {"0:output", "model:input"}


def assert_bits(found: Any, tensor: torch.Tensor, name: str) -> None:
    assert found.shape == tuple(tensor.shape), name
    assert found.tobytes() == tensor.contiguous().numpy().tobytes(), name


@pytest.mark.release
def test_of_replicas_one_saves_parameters_and_each_saves_its_activations(tmp_path: Path) -> None:
    run, expected = saved_by_ranks(tmp_path, "ddp")
    for step in (0, 2):
        for name, tensor in expected[0][step].items():
            if is_of_parameters(name):
                assert_bits(run.tensor(name).value(step), tensor, name)
        for rank in range(2):
            for name in ("0:output", "model:input"):
                assert_bits(run.tensor(name).value(step, worker=rank), expected[rank][step][name], name)
    workers = {key.collection: set[int]() for key in run.snapshots()}
    for key in run.snapshots():
        workers[key.collection].add(key.worker)
        assert run.open_snapshot(key).parts == {}
    assert workers == {
        **{name: {0} for name in ("weights", "biases", "gradients", "optimizer_state")},
        **{name: {0, 1} for name in ("activations", "inputs")},
    }


@pytest.mark.release
@pytest.mark.parametrize("kind", ["fsdp", "fsdp_scaled"])
def test_each_rank_saves_its_shard_with_its_place(tmp_path: Path, kind: str) -> None:
    run, expected = saved_by_ranks(tmp_path, kind)
    for step in (0, 2):
        for name, tensor in expected[0][step].items():
            if is_of_parameters(name):
                assert_bits(run.tensor(name).value(step), tensor, name)
    shapes = {}
    for key in run.snapshots():
        snapshot = run.open_snapshot(key)
        for name, part in snapshot.parts.items():
            assert part.is_shard
            shapes[name, key.worker] = snapshot.tensors[name].shape, part.start
            whole = expected[0][key.step][name].numpy()
            rows = slice(part.start[0], part.start[0] + snapshot.tensors[name].shape[0])
            np.testing.assert_array_equal(snapshot.read(name), whole[rows])
    # 15 rows are not divisible by two ranks, and of one row the second rank has nothing.
    assert shapes["0.weight", 0] == ((8, 8), (0, 0))
    assert shapes["0.weight", 1] == ((7, 8), (8, 0))
    assert shapes["2.weight:gradient", 0] == ((1, 15), (0, 0))
    assert shapes["2.weight:gradient", 1] == ((0, 15), (1, 0))
    assert {name for name, _ in shapes} == {name for name in expected[0][0] if is_of_parameters(name)}
