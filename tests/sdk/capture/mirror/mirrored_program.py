"""A program with active runs of W&B, MLflow and Trackio, which it also logs to itself, and a run that is mirrored into all of them.

    python -m tests.sdk.capture.mirror.mirrored_program FOLDER STEPS BAD_STEP

What the libraries then read back is written to FOLDER/read.json.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import watchstep


def gradient(step: int, bad_step: int) -> np.ndarray[Any, Any]:
    values = np.linspace(1.0, 2.0 + step, 8, dtype=np.float32)
    if step == bad_step:
        values[3] = np.nan
    return values


def loss_of(step: int) -> float:
    return 1.0 / (step + 1)


def main(folder: Path, steps: int, bad_step: int) -> None:
    import mlflow
    import trackio
    import wandb

    run = wandb.init(project="p", dir=str(folder))
    active = mlflow.start_run()
    tracked = trackio.init(project="p", config={"lr": 0.1}, embed=False)
    rules = folder / "rules.yaml"
    rules.write_text("rules:\n  - rule: non_finite_values\n    severity: critical\n    actions: [stop]\n")
    config = watchstep.CaptureConfig(overhead_budget=None, system=None)
    hook = watchstep.Hook(
        folder / "store",
        run="r",
        config=config,
        guard=rules,
        mirror=["wandb", "mlflow", "trackio", f"tensorboard:{folder / 'events'}"],
    )
    stopped = ""
    try:
        for step in range(steps):
            hook.record(first=gradient(step, bad_step), second=gradient(step, -1), role="gradient")
            loss = loss_of(step)
            hook.log(loss=loss, accuracy=step / 10)
            if step % 5 == 4:
                hook.log(loss=2 * step, mode="eval")
            run.log({"loss": loss}, step=10 * step)
            mlflow.log_metric("loss", loss, step=step)
            trackio.log({"loss": loss})
            hook.step()
    except watchstep.StopTraining as error:
        stopped = error.request.reason
    hook.close()
    run.finish()
    mlflow.end_run()
    trackio.finish()
    read = {
        "stopped": stopped,
        "health": hook.health,
        "wandb": from_wandb(next(folder.rglob("*.wandb"))),
        "mlflow": from_mlflow(active.info.run_id),
        "trackio": from_trackio(tracked.name),
    }
    (folder / "read.json").write_text(json.dumps(read))


def from_wandb(path: Path) -> dict[str, Any]:
    """The rows, alerts and axes of an offline run, and the config and summary at its end."""
    from wandb.proto import wandb_internal_pb2

    new_record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]
    read: dict[str, Any] = {"rows": [], "alerts": [], "axes": {}, "config": {}, "summary": {}}
    for data in records(path):
        record = new_record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            read["rows"].append(entries(record.history.item))
        elif kind == "alert":
            read["alerts"].append([record.alert.title, record.alert.text, record.alert.level])
        elif kind == "metric":
            read["axes"][record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind in ("config", "summary"):
            read[kind].update(entries(getattr(record, kind).update))
    return read


def entries(items: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def records(path: Path) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, behind seven bytes of W&B's own."""
    data, position, part = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        rest = 32768 - position % 32768
        _, size, kind = struct.unpack("<IHB", data[position : position + 7]) if rest >= 7 else (0, 0, 0)
        if kind == 0:
            position += rest
            continue
        chunk = data[position + 7 : position + 7 + size]
        position += 7 + size
        part = chunk if kind in (1, 2) else part + chunk
        if kind in (1, 4):
            yield part


def from_mlflow(run_id: str) -> dict[str, Any]:
    import mlflow

    client = mlflow.MlflowClient()
    data = client.get_run(run_id).data
    series = {
        name: [[metric.step, metric.value] for metric in client.get_metric_history(run_id, name)]
        for name in data.metrics
    }
    return {"run": run_id, "series": series, "tags": dict(data.tags)}


def from_trackio(name: str) -> dict[str, Any]:
    from trackio.sqlite_storage import SQLiteStorage

    return {
        "rows": SQLiteStorage.get_logs("p", name),
        "config": SQLiteStorage.get_run_config("p", name),
        "alerts": SQLiteStorage.get_alerts("p"),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
