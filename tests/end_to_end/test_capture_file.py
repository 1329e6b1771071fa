"""Full tensors from an unchanged program and a capture file alone: saved on S3 by two FSDP2 ranks, and read back merged and bit-equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import S3
from watchstep import open_run

pytestmark = pytest.mark.ci

CAPTURE = """\
collections:
  encoder:
    cadence: null
    include: "encoder\\\\..*weight$"
    tensors: {every: 2}
  norms:
    cadence: null
    module_types: [LayerNorm]
    roles: [output]
    tensors: {every: null, steps: [1, 3], modes: [train]}
  moments:
    cadence: null
    roles: [momentum, second_moment]
    tensors: {every: 4}
  evaluated:
    cadence: null
    modules: [head]
    roles: [output]
    tensors: {every: 1, modes: [eval]}
"""

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 15)  # 15 rows: the ranks have shards of 8 and 7
        self.norm = nn.LayerNorm(15)
        self.head = nn.Linear(15, 3)

    def forward(self, x):
        return self.head(self.norm(self.encoder(x)))

out = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = Model()
mesh = init_device_mesh("cpu", (2,))
for layer in (model.encoder, model.norm, model.head):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
seen = {}
model.norm.register_forward_hook(lambda *args: seen.__setitem__("norm", args[2].detach().clone()))
model.head.register_forward_hook(lambda *args: seen.__setitem__("head", args[2].detach().clone()))
generator = torch.Generator().manual_seed(rank)
for step in range(6):
    x = torch.randn(5, 8, generator=generator)
    weight = model.encoder.weight.full_tensor()
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    if rank == 0:
        np.save(out / f"encoder-{step}.npy", weight.detach().numpy())
    np.save(out / f"norm-{step}-{rank}.npy", seen["norm"].numpy())
    optimizer.step()
    moment = optimizer.state[model.encoder.weight]["exp_avg"].full_tensor()
    if rank == 0:
        np.save(out / f"moment-{step}.npy", moment.numpy())
    if step == 2:
        model.eval()
        with torch.no_grad():
            for batch in range(3):
                model(torch.randn(4, 8, generator=generator))
                if batch == 0:
                    np.save(out / f"eval-{step}-{rank}.npy", seen["head"].numpy())
        model.train()
dist.destroy_process_group()
"""


def test_collections_of_a_file_are_saved_on_s3_by_two_ranks_and_merged(s3: S3, tmp_path: Path) -> None:
    s3.make_bucket("runs")
    program, capture, out = tmp_path / "train.py", tmp_path / "capture.yaml", tmp_path / "out"
    program.write_text(PROGRAM)
    capture.write_text(CAPTURE)
    out.mkdir()
    folder = Path(sys.executable).parent
    done = subprocess.run(
        [
            folder / "watchstep", "run", "--store", "s3://runs/some", "--run", "r", "--capture", capture, "--",
            folder / "torchrun", "--standalone", "--nproc-per-node", "2", program, out,
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WATCHSTEP_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = open_run("s3://runs/some/default/r")
    assert {key.collection for key in run.snapshots()} == {"encoder", "norms", "moments", "evaluated"}

    encoder = run.tensor("encoder.weight")
    assert encoder.saved_steps() == [0, 2, 4]
    for step in (0, 2, 4):
        expected = np.load(out / f"encoder-{step}.npy")
        np.testing.assert_array_equal(encoder.value(step), expected)
        np.testing.assert_array_equal(encoder.saved(step)[6:10, ::2], expected[6:10, ::2])
        assert encoder.value(step, worker=1).shape == (7, 8)
    moment = run.tensor("encoder.weight:exp_avg")
    assert moment.saved_steps() == [0, 4]
    np.testing.assert_array_equal(moment.value(4), np.load(out / "moment-4.npy"))
    norm = run.tensor("norm:output")
    assert norm.saved_steps() == [1, 3]
    for step in (1, 3):
        for worker in (0, 1):
            np.testing.assert_array_equal(
                norm.value(step, worker=worker), np.load(out / f"norm-{step}-{worker}.npy")
            )
    head = run.tensor("head:output")
    assert head.saved_steps(mode="eval") == [2]
    np.testing.assert_array_equal(head.value(2, mode="eval", worker=1), np.load(out / "eval-2-1.npy"))
