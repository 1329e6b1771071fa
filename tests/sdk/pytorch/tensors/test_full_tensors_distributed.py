"""Full tensors under distributed training: replicas are saved once, shards by each rank with their place, whatever their size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.sdk.capture.saved_rows import assert_one_for_each_object, assert_steps_never_go_back
from watchstep import Run, open_run

pytestmark = pytest.mark.ci

PROGRAM = """
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


def trained(tmp_path: Path, kind: str) -> tuple[Run, list[dict[int, dict[str, torch.Tensor]]]]:
    """The run, and what each rank computed."""
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    torchrun = Path(sys.executable).with_name("torchrun")
    done = subprocess.run(
        [torchrun, "--standalone", "--nproc-per-node", "2", program, kind, tmp_path / "runs", tmp_path],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WATCHSTEP_RUN": "r", "WATCHSTEP_ATTEMPT": "a"},
    )
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "runs" / "default" / "r")
    assert_one_for_each_object(run)
    assert_steps_never_go_back(tmp_path / "runs")
    return run, [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]


def is_of_parameters(name: str) -> bool:
    return name not in {"0:output", "model:input"}


def assert_bits(found: Any, tensor: torch.Tensor, name: str) -> None:
    assert found.shape == tuple(tensor.shape), name
    assert found.tobytes() == tensor.contiguous().numpy().tobytes(), name


def test_of_replicas_one_saves_parameters_and_each_saves_its_activations(tmp_path: Path) -> None:
    run, expected = trained(tmp_path, "ddp")
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


@pytest.mark.parametrize("kind", ["fsdp", "fsdp_scaled"])
def test_each_rank_saves_its_shard_with_its_place(tmp_path: Path, kind: str) -> None:
    run, expected = trained(tmp_path, kind)
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
