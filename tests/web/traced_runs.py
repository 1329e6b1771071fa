"""Runs with operation traces for the browser tests: a recorded training with a planted fault, and a large trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.web.site import PROJECT
from watchstep.format.layout import TraceKey
from watchstep.trace import CallSite, Operation, TensorHealth, Trace, TracedTensor
from watchstep.trace.trace_file import encode_trace

RUN = "traced"
"""Name of the recorded training. Its steps 0 and 1 are healthy; in step 5 `torch.log` reads a zero."""
HOSTILE = "<img src=x onerror=alert(1)>\n\u202ereversed\u202c " + "w" * 400
LARGE_STEPS = 50
LARGE_BAD_STEP = 31

_PROGRAM = """
import sys

import torch
from torch import nn

import watchstep


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.linear = nn.Linear(width, classes)

    def forward(self, x):
        # Far apart logits make a probability of zero.
        probabilities = torch.softmax(self.linear(x) * self.scale, dim=-1)
        return torch.log(probabilities)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Block(8), Block(8)])
        self.head = Head(8, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
torch.set_num_threads(1)
model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with watchstep.Hook(sys.argv[1], project=sys.argv[2], run=sys.argv[3], trace=watchstep.TraceSteps("0:1,4:5", mode="statistics")) as hook:
    hook.watch(model, optimizer)
    for step in range(6):
        model.head.scale = 1e4 if step == 5 else 1
        x = torch.randn(16, 6)
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(x), torch.arange(16) % 3)
        loss.backward()
        optimizer.step()
"""


def record_traced_run(store: Path, folder: Path) -> list[TraceKey]:
    """Record the training with traces in another process, and return the keys of its traces, by step.

    Args:
        store: folder of the service's store.
        folder: folder for the program.
    """
    program = folder / "train.py"
    program.write_text(_PROGRAM, encoding="utf-8")
    subprocess.run(
        [sys.executable, str(program), str(store), PROJECT, RUN], check=True, cwd=folder, timeout=600
    )
    run = store / PROJECT / RUN
    keys = [TraceKey.parse(str(path.relative_to(run))) for path in run.glob("traces/*/*/*.zip")]
    return sorted(keys, key=lambda key: key.first)


def put_trace(store: Path, key: TraceKey, trace: Trace) -> TraceKey:
    """Write a trace to the recorded run, and return its key."""
    path = store / PROJECT / RUN / key.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_trace(trace))
    return key


def large_trace(operations: int = 100_000) -> Trace:
    """Return a trace of a transformer of 12 layers: `LARGE_STEPS` steps with forward, backward and update.

    In step `LARGE_BAD_STEP`, a softmax in layer 7 makes NaN, which all later operations of the step spread.
    """
    layers = [
        f"encoder.layers.{layer}.{part}"
        for layer in range(12)
        for part in (
            "norm",
            "attention.query",
            "attention.key",
            "attention.value",
            "attention",
            "mlp.up",
            "mlp.down",
        )
    ]
    modules = ["embedding", *layers, "head"]
    stack = (
        CallSite("/lib/torch/nn/functional.py", 2140, "softmax", is_library=True),
        CallSite("/home/user/model.py", 3, "forward"),
        CallSite("/home/user/train.py", 2, "main"),
    )
    sources = {
        "/home/user/model.py": "def forward(self, x):\n    scores = x @ x.T\n    return softmax(scores - scores.max())\n",
        "/home/user/train.py": "for step in range(50):\n    loss = model(batch)\n",
    }
    found: list[Operation] = []
    losses: list[tuple[int, int]] = []
    per_step = operations // LARGE_STEPS
    forward = per_step * 2 // 5
    for step in range(LARGE_STEPS):
        for place in range(per_step):
            is_backward = forward <= place < per_step * 9 // 10
            is_update = place >= per_step * 9 // 10
            share = place / forward
            if is_backward:
                share = 1 - (place - forward + 1) / (per_step / 2)
            elif is_update:
                share = (place - per_step * 9 // 10) / (per_step / 10)
            module = "" if is_update else modules[int(max(0.0, share) * len(modules))]
            is_origin = step == LARGE_BAD_STEP and place == forward * 3 // 5
            bad = step == LARGE_BAD_STEP and place >= forward * 3 // 5 and not is_update
            names = (
                ("aten._foreach_add_",) if is_update else ("aten.addmm", "aten.mul", "aten.relu", "aten.view")
            )
            health = TensorHealth(512, nan=7 if is_origin else 512, first_bad=(0, 3)) if bad else None
            found.append(
                Operation(
                    len(found),
                    step,
                    "aten._softmax" if is_origin else names[place % len(names)],
                    "optimizer" if is_update else "backward" if is_backward else "forward",
                    module,
                    (TracedTensor(place, (16, 32), "float32", nonfinite=bad and not is_origin),),
                    (TracedTensor(place + 1, (16, 32), "float32", nonfinite=bad, health=health),),
                    stack=0,
                    node=f"{names[place % len(names)].partition('.')[2].title()}Backward0"
                    if is_backward
                    else "",
                )
            )
        losses.append((forward, len(found) - per_step + forward))
    return Trace(found, (stack,), sources, losses=tuple(losses), program="torch 2.13.0")


def hostile_trace() -> Trace:
    """Return a trace whose names are long, contain markup, and turn the direction of writing."""
    tensor = TracedTensor(1, (2,), HOSTILE, nonfinite=True, name=HOSTILE, health=TensorHealth(2, nan=1))
    operation = Operation(0, 0, HOSTILE, "forward", HOSTILE, (tensor,), (tensor,), stack=0, node=HOSTILE)
    return Trace(
        [operation], ((CallSite(HOSTILE, 1, HOSTILE),),), {HOSTILE: f"{HOSTILE}\n"}, notes=(HOSTILE,)
    )
