"""The rows that a recording wrote, spilled to disk and dropped, counted from outside the process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.sdk.store.faulty_s3 import FaultyS3
from tests.sdk.training import EVERY_STEP, Training
from watchstep import Hook, open_run
from watchstep.capture.upload.uploader import spill_folders
from watchstep.format.documents import EndDocument, decode
from watchstep.format.layout import SegmentKey, SnapshotKey
from watchstep.format.segment import decode as decode_segment

STEPS = 20
LONGEST_STEP = 5.0
"""Seconds that a step may take whatever the store does. A stall lasts for tens of them."""
_RUN = "/runs/default/r/"


@dataclass
class Watched:
    """A training that was watched.

    Attributes:
        losses: as the program saw them.
        longest: seconds of its longest step, all calls into the recorder included.
    """

    losses: list[float]
    longest: float


def train(
    hook: Hook,
    steps: int = STEPS,
    each: Callable[[int], None] = lambda step: None,
) -> Watched:
    """Train for some steps, watched and logged; ``each`` is called between steps, and its time does not count."""
    training = Training()
    hook.watch(training.model, training.optimizer)
    longest, began = 0.0, time.perf_counter()

    def log(step: int, loss: Tensor) -> None:
        nonlocal longest, began
        hook.log(accuracy=step / steps)
        longest = max(longest, time.perf_counter() - began)
        each(step)
        began = time.perf_counter()

    return Watched(training.run(steps, log), longest)


def plain_losses(steps: int = STEPS) -> list[float]:
    """The losses of the training without a hook."""
    return Training().run(steps)


@cache
def rows_of(folder: Path, steps: int = STEPS) -> int:
    """Rows that a training gives on a store that works."""
    hook = Hook(folder, run="whole", config=EVERY_STEP)
    train(hook, steps)
    hook.close()
    return len(open_run(hook.run_url).rows())


def accounted(health: Mapping[str, Any]) -> int:
    """Rows that the recorder reports as written, spilled or dropped."""
    return sum(int(health["counts"].get(name, 0)) for name in ("rows", "spilled_rows", "dropped_rows"))


@dataclass
class OnServer:
    """The rows on a server; all objects must be complete and valid.

    Attributes:
        steps: of the segments' rows, in the order of the sequence.
        rows: how many rows.
        seqs: numbers of the segments, ascending.
        attempts: names of the attempts.
        ends: how the workers ended.
    """

    steps: list[int]
    rows: int
    seqs: list[int]
    attempts: list[str]
    ends: list[EndDocument]


def on_server(server: FaultyS3) -> OnServer:
    """Read every object; a foreign or incomplete object is an error."""
    found = OnServer([], 0, [], [], [])
    for path, data in sorted(server.objects.items()):
        _, within, name = path.partition(_RUN)
        assert within, path
        kind = name.split("/")[0]
        if kind == "stats":
            found.seqs.append(SegmentKey.parse(name).seq)
            block = decode_segment(data, name)
            found.rows += len(block)
            found.steps += sorted(set(block.step.tolist()))
        elif kind == "tensors":
            SnapshotKey.parse(name)
        elif kind == "end":
            found.ends.append(decode(EndDocument, data, name))
        else:
            assert kind in {"run.json", "attempts"}, name
            if kind == "attempts":
                found.attempts.append(json.loads(data)["attempt"])
    return found


def spilled(root: Path) -> list[Path]:
    """Files that wait in spill folders, but for their own."""
    own = {"lock", "spill.json"}
    return [
        file for folder in spill_folders(root) for file in sorted(folder.iterdir()) if file.name not in own
    ]
