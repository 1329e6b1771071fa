"""Record a program in this process: ``python -m benchmarks.detection.other_frameworks NAME FOLDER SEED …``. Writes ``FOLDER/runs.json``."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.detection.fixed_clock import FixedClock
from benchmarks.detection.other_frameworks.program import PROGRAMS
from watchstep import CaptureConfig, Hook

STEP_SECONDS = 0.001


def main() -> None:
    """Train each seed, healthy and faulty, with the shipped default capture."""
    name, folder, *seeds = sys.argv[1:]
    program = PROGRAMS[name]
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", **dict(program.environment)}
    train = program.train()
    runs: list[dict[str, Any]] = []
    for seed in map(int, seeds):
        for faulty in (False, True):
            clock = FixedClock(STEP_SECONDS)
            before = time.process_time()
            kind = "faulty" if faulty else "healthy"
            with Hook(Path(folder), run=f"{kind}-{seed}", config=CaptureConfig(clock=clock)) as hook:
                losses = train(hook, seed, clock, faulty)
            if faults := hook.health["faults"]:
                raise SystemExit(f"{name}, seed {seed}, {kind}: the recorder had faults: {faults}")
            seconds = time.process_time() - before
            runs.append(
                {
                    "seed": seed,
                    "faulty": faulty,
                    "url": hook.run_url,
                    "first": losses[0],
                    "last": losses[-1],
                    "seconds": round(seconds, 2),
                }
            )
    (Path(folder) / "runs.json").write_text(json.dumps(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
