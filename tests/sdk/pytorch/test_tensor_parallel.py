"""Tensor parallelism with FSDP2 on four ranks: statistics and full tensors of all shards merge to those of the whole tensor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from watchstep import open_run

pytestmark = pytest.mark.ci

PROGRAM = """
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


def test_shards_of_two_mesh_dimensions_merge(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [
            Path(sys.executable).with_name("torchrun"),
            "--standalone",
            "--nproc-per-node",
            "4",
            program,
            tmp_path,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WATCHSTEP_RUN": "r", "WATCHSTEP_ATTEMPT": "a"},
    )
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "runs" / "default" / "r")
    for step in (0, 1):
        expected = np.load(tmp_path / f"{step}.npz")
        for name in ("0.weight", "2.weight", "0.weight:gradient", "2.weight:gradient"):
            np.testing.assert_allclose(run.tensor(name).value(step), expected[name], rtol=1e-6)
            (count,) = (row["count"] for row in run.series(name, "count").to_pylist() if row["step"] == step)
            assert count == expected[name].size
            (mean,) = (row["mean"] for row in run.series(name, "mean").to_pylist() if row["step"] == step)
            np.testing.assert_allclose(mean, expected[name].mean(dtype=np.float64), rtol=1e-5)
