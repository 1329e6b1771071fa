"""Trains on one worker or several, and keeps a checkpoint. It knows nothing of Watchstep."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

bad_step, last_step, checkpoint = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.set_num_threads(1)
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model: torch.nn.Module = network
if world > 1:
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
batches = torch.Generator().manual_seed(1 + rank)
step = -1
try:
    for step in range(last_step):
        batch = torch.randn(32, 8, generator=batches)
        if step == bad_step and rank == world - 1:
            batch[3, 5] = float("nan")
        loss = (model(batch).squeeze(1) - batch.mean(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)  # steps of a length, as a larger model's would be
finally:
    # At the end, and whatever ends all workers at the same step before it.
    if rank == 0:
        partial = checkpoint.with_suffix(".partial")
        torch.save({"step": step, "model": network.state_dict()}, partial)
        partial.replace(checkpoint)
    if world > 1:
        distributed.barrier()
        distributed.destroy_process_group()
