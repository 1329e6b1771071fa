"""Whole objects of each kind, from a short training that really recorded, was judged and compacted."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from watchstep import Cadence, CaptureConfig, Collection, Hook
from watchstep.format.control import ControlDocument, SnapshotRequest, StopRequest
from watchstep.format.journal import JournalEvaluation, JournalPart, JournalSegment, RankRows, encode
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.reading.compaction import compact

KINDS = ("segment", "compacted", "snapshot", "document", "control", "manifest", "journal")
_STEPS = 60


def record(folder: Path) -> dict[str, list[bytes]]:
    """Objects by kind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters())
    saved = {name: Collection(tensors=Cadence(every=20)) for name in ("weights", "gradients", "activations")}
    collections = {**CaptureConfig().collections, **saved}
    config = CaptureConfig(overhead_budget=None, collections=collections)
    with Hook(folder, run="whole", config=config) as hook:
        hook.watch(model, optimizer)
        for _ in range(_STEPS):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.randn(8, 8)), torch.zeros(8, dtype=torch.int64))
            loss.backward()
            hook.log(loss=loss)
            optimizer.step()
    run = folder / "default" / "whole"
    segments = _read(run, "stats/**/*.arrow")
    compact(run)
    control = ControlDocument().with_stop(StopRequest("a1", 12, "NaN", "e")).with_cadence({"weights": 5})
    control = control.with_snapshot(SnapshotRequest("s", 9, "a1"))
    return {
        "segment": segments,
        "compacted": _read(run, "compacted/**/*.parquet"),
        "snapshot": _read(run, "tensors/**/*.safetensors"),
        "document": _read(run, "run.json") + _read(run, "attempts/*.json") + _read(run, "end/**/*.json"),
        "control": [control.encode()],
        "manifest": _read(run, "compacted/**/manifest.json"),
        "journal": [encode(_journal())],
    }


def _journal() -> JournalPart:
    writer = WriterId("a1", "node", "w0")
    segments = tuple(
        JournalSegment(
            SegmentKey(writer, seq, 10 * seq, 10 * seq + 9), (RankRows(0, 10 * seq, 10 * seq + 9, 50),)
        )
        for seq in range(5)
    )
    evaluations = (
        JournalEvaluation(1, 10**18, -1, False, segments[:2]),
        JournalEvaluation(2, 10**18 + 1, 20, True, segments[2:]),
    )
    return JournalPart("a1", 0, evaluations)


def _read(run: Path, pattern: str) -> list[bytes]:
    return [file.read_bytes() for file in sorted(run.glob(pattern))]
