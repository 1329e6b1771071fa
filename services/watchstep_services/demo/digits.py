"""The training program of the demo: a plain PyTorch loop without any reference to Watchstep.

A convolutional network learns scikit-learn's handwritten digits; a step takes some 20 ms on one core, long enough
for statistics every few steps. The data has two parts, and the training uses the second one
later. With ``--fault`` one value of the second part is missing and read as NaN. This is the bug of Stack Overflow question 53640858,
where a single NaN in the inputs turns the loss and every weight into NaN.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

BATCH = 64
STEPS = 300
SECOND_PART_AT = 150


def network() -> nn.Sequential:
    """Return a network of two convolutions and two linear layers, for images of 8 by 8 pixels in ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def read_parts(seed: int, *, fault: bool) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Return two halves of the shuffled digits; with the fault, one pixel of the second half is NaN."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    x = torch.tensor(images[order] / 16 - 0.3, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(labels[order])
    half = len(x) // 2
    if fault:
        row = half + int(np.random.default_rng(seed).integers(half))
        x[row, 0, 3, 5] = float("nan")
    return (x[:half], y[:half]), (x[half:], y[half:])


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    parts = read_parts(options.seed, fault=options.fault)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        images, labels = parts[step >= SECOND_PART_AT]
        batch = torch.randint(len(images), (BATCH,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)  # noqa: T201 - the program's own output


if __name__ == "__main__":
    main()
