"""A digits classifier with a hand-written loss that takes the logarithm of a probability of zero. `--fixed` computes it in a stable way.

The network and the fault are those of TensorFlow's Debugger V2 tutorial, on the digits data of scikit-learn. See
docs/tutorials/replay-a-fault.md.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import watchstep


def build() -> nn.Module:
    """Return the network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 500), nn.ReLU(), nn.Linear(500, 10))


def cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of scores [examples, classes] and one-hot labels."""
    probabilities = torch.softmax(scores, dim=1)
    difference = labels * torch.log(probabilities)
    return -difference.sum(dim=1).mean()


def stable_cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the same, without a logarithm of probabilities."""
    return nn.functional.cross_entropy(scores, labels)


def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def replay() -> watchstep.ReplayStep:
    """Return the training step, for `watchstep replay`."""
    return watchstep.ReplayStep(build(), loss_of)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="runs")
    parser.add_argument("--run", default="digits")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=0.025)
    parser.add_argument("--fixed", action="store_true", help="use the stable loss")
    options = parser.parse_args()

    data: Any = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32)
    labels = nn.functional.one_hot(torch.tensor(data.target), 10).float()
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True, generator=generator)

    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    loss_function = stable_cross_entropy if options.fixed else cross_entropy
    # Without a budget every step is measured. A training of a second can afford it.
    config = watchstep.CaptureConfig(overhead_budget=None)
    with watchstep.Hook(options.store, run=options.run, config=config, on_nonfinite="stop") as hook:
        hook.watch(model, optimizer)
        step = 0
        while step < options.steps:
            for inputs, targets in loader:
                loss = loss_function(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step == options.steps:
                    break
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
