"""Record DistributedDataParallel: each rank records its losses and activations, rank 0 also weights and gradients.

    torchrun --nproc-per-node 2 examples/ddp.py

A fault to try: replace `model(x)` by `model.module(x)`. Gradients are then not averaged over ranks, and `replica_divergence` fires.
"""

import argparse

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import watchstep
from watchstep_rules import DEFAULT_RULES, backtest_run

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--store", default="watchstep-runs", help="folder or bucket URL for recorded runs")
options = parser.parse_args()

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)  # the same weights and teacher on all ranks
teacher = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
shard = torch.Generator().manual_seed(1 + rank)  # different batches on each rank

with watchstep.Hook(options.store, on_stop="raise") as hook:
    hook.watch(model, optimizer)
    for step in range(300):
        x = torch.randn(64, 16, generator=shard)
        with torch.no_grad():
            labels = teacher(x).argmax(dim=1)
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.3f}")

distributed.barrier()  # all ranks have closed their hooks
if rank == 0:
    (attempt,) = backtest_run(hook.run_url, DEFAULT_RULES).attempts
    fired = {outcome.config.name: outcome.fired[0].step for outcome in attempt.outcomes if outcome.fired}
    print("run:", hook.run_url)
    print("workers:", watchstep.open_run(hook.run_url).workers)
    print("rules that fired, with their first step:", fired or "none")
distributed.destroy_process_group()
