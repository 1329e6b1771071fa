"""Watchstep on a training loop of one's own: three lines are added to it."""

import torch
from torch import nn

import watchstep

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

hook = watchstep.Hook("watchstep-runs", on_stop="raise")  # where runs lie; a stop raises StopTraining
hook.watch(model, optimizer)  # weights, gradients, activations, and the loss at backward()

for _ in range(200):
    x = torch.randn(64, 8)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    hook.log(lr=optimizer.param_groups[0]["lr"])  # any number more that you care for

hook.close()

run = watchstep.open_run(hook.run_url)
print(run.tensor("0.weight:gradient").statistics().select(["step", "mean", "std", "nan"]).slice(0, 3))
