"""The gate policy with two ranks: non-finite gradients of one rank skip or stop the update of both.

The ranks have no common launcher, as under mpirun, so each has an attempt of its own.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = """
import json, math, os, sys
import torch
import torch.distributed as dist
from torch import nn
from watchstep import Hook, StopTraining

STEPS = 6
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)

def train(case, policy):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    hook = Hook(sys.argv[1], run=case, on_nonfinite=policy)
    hook.watch(model, optimizer)
    stopped = None
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 8) + rank).pow(2).mean().backward()
            if step == 3 and rank == 0:
                net[0].weight.grad[0, 0] = math.nan
            optimizer.step()
            if step == 1 and (case == "all-closed" or case == "closed" and rank == 1):
                hook.close()
    except StopTraining as stop:
        stopped = stop.step
    hook.close()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"stopped": stopped, "weights": weights.tolist(), "health": hook.health}

results = {case: train(case, policy) for case, policy in
           (("skip", "skip"), ("limit", "skip:1"), ("stop", "stop"), ("closed", "skip"), ("all-closed", "skip"))}
print(json.dumps([rank, results]), flush=True)
os._exit(0)  # PyTorch's own threads abort some exits of such programs, also without a hook
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of two ranks, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    program = folder / "train.py"
    program.write_text(PROGRAM)
    command = (
        f"{shlex.join([sys.executable, str(program), str(folder / 'runs'), str(folder / 'store')])}; exit $?"
    )
    ranks = [
        subprocess.Popen(
            ["sh", "-c", command],  # a parent of its own
            env={**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    lines = []
    for process in ranks:
        stdout, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stderr
        lines += [json.loads(line) for line in stdout.splitlines() if line.startswith("[")]
    return [results for _, results in sorted(lines, key=lambda line: line[0])]


@pytest.mark.parametrize("case", ["skip", "limit", "closed"])
def test_both_ranks_skip(ranks: list[dict[str, Any]], case: str) -> None:
    first, second = (results[case] for results in ranks)
    assert first["weights"] == second["weights"]
    assert not any(map(math.isnan, first["weights"]))
    assert first["stopped"] is second["stopped"] is None
    assert first["health"]["counts"]["skipped_updates"] == 1
    assert first["health"]["faults"] == second["health"]["faults"] == {}


def test_both_ranks_stop_before_the_update(ranks: list[dict[str, Any]]) -> None:
    first, second = (results["stop"] for results in ranks)
    assert first["stopped"] == second["stopped"] == 3
    assert first["weights"] == second["weights"]
    assert not any(map(math.isnan, first["weights"]))


def test_without_an_open_hook_nothing_is_skipped(ranks: list[dict[str, Any]]) -> None:
    first = ranks[0]["all-closed"]
    assert any(map(math.isnan, first["weights"]))
    assert "skipped_updates" not in first["health"]["counts"]
