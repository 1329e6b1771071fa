"""Distributed training: shards merge to what one process would have seen, replicas record once and are compared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from watchstep import Hook, Run, open_run

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


def trained(tmp_path: Path, kind: str, ranks: int = 2) -> Run:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    torchrun = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", str(ranks), program, kind, tmp_path / "runs"],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WATCHSTEP_RUN": "r", "WATCHSTEP_ATTEMPT": "a"},
    )
    assert done.returncode == 0, done.stderr
    return open_run(tmp_path / "runs" / "default" / "r")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same training in one process, over whole batches."""
    from watchstep import CaptureConfig

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Hook(tmp_path_factory.mktemp("alone"), config=CaptureConfig(overhead_budget=None)) as hook:
        hook.watch(model, optimizer)
        generator = torch.Generator().manual_seed(1)
        for _ in range(101):
            optimizer.zero_grad()
            model(torch.randn(8, 8, generator=generator)).pow(2).mean().backward()
            optimizer.step()
    return open_run(hook.run_url)


NAMES = ("0.weight", "2.bias", "0.weight:gradient", "2.weight:gradient")


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 2), ("hsdp", 4)])
def test_shards_merge_to_what_one_process_sees(tmp_path: Path, alone: Run, kind: str, ranks: int) -> None:
    run = trained(tmp_path, kind, ranks)
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


def checksums(run: Run, name: str) -> dict[int, list[float]]:
    """Checksums by step, one for each replica."""
    rows = run.tensor(name).statistics().to_pydict()
    found: dict[int, list[float]] = {}
    for step, value in zip(rows["step"], rows["mean"], strict=True):
        found.setdefault(step, []).append(value)
    return found


def test_of_equal_replicas_one_records_and_both_send_checksums(tmp_path: Path, alone: Run) -> None:
    run = trained(tmp_path, "ddp")
    for name in NAMES:
        assert run.tensor(name).workers == [0]
        held, whole = run.series(name, "square_sum"), alone.series(name, "square_sum")
        assert np.allclose(held["square_sum"], whole["square_sum"], rtol=2e-4, atol=1e-6)
    assert run.tensor("0:output").workers == [0, 1]
    assert {step: len(set(values)) for step, values in checksums(run, "0.bias:checksum").items()} == {
        0: 1,
        100: 1,
    }


def test_checksums_tell_replicas_apart_that_went_their_own_way(tmp_path: Path) -> None:
    run = trained(tmp_path, "ddp-diverging")
    assert {step: len(set(values)) for step, values in checksums(run, "0.bias:checksum").items()} == {
        0: 1,
        100: 2,
    }


def test_each_shard_of_a_replica_has_its_checksum(tmp_path: Path) -> None:
    run = trained(tmp_path, "hsdp", 4)
    for shard in (0, 1):
        found = checksums(run, f"0.weight:checksum_{shard}")
        assert {step: (len(values), len(set(values))) for step, values in found.items()} == {
            0: (2, 1),
            100: (2, 1),
        }
