"""How often the tensors of a training are recorded by default: ``python -m benchmarks.capture.density``."""

from __future__ import annotations

import tempfile
from collections import defaultdict

import torch

from benchmarks.capture.models import WORKLOADS
from benchmarks.capture.pairs import watch_all
from benchmarks.report import Figure, Report, arguments
from watchstep import Hook, open_run
from watchstep.capture.schedule import SHORT_STEP
from watchstep.format.tensors import ACTIVATIONS, GRADIENTS, UPDATES, WEIGHTS

_STEPS, _QUICK_STEPS = 300, 30
_FEWEST, _LONGEST_GAP = 30, 10


def recorded(workload: str, steps: int) -> tuple[dict[str, list[int]], float, float]:
    """Train with the defaults. Returns the steps of each tensor's rows, the cost by the recorder's own account, and the seconds of a step."""
    training = WORKLOADS[workload].start()
    with tempfile.TemporaryDirectory() as folder:
        with Hook(folder, run="run") as hook:
            watch_all(hook, training)
            for _ in range(steps):
                training.backward()
                training.update()
            overhead = hook.health["overhead"]
        found: dict[str, set[int]] = defaultdict(set)
        block = open_run(f"{folder}/default/run").rows()
        for place, step in zip(block.tensor.tolist(), block.step.tolist(), strict=True):
            info = block.catalogue[place]
            if {WEIGHTS, GRADIENTS, ACTIVATIONS, UPDATES}.intersection(info.collections):
                found[info.name].add(step)
    rows = {tensor: sorted(at) for tensor, at in found.items()}
    return rows, float(overhead["share"]), float(overhead["program_seconds"]) / steps


def main() -> None:
    """Run it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=list(WORKLOADS), action="append", help="leave the others out")
    given = parser.parse_args()
    torch.set_num_threads(1)
    steps = _QUICK_STEPS if given.quick else _STEPS
    report = Report("Density of the default recording", quick=given.quick)
    for workload in given.only or WORKLOADS:
        series, share, seconds = recorded(workload, steps)
        fewest = min(len(at) for at in series.values())
        gap = max(
            after - before
            for at in series.values()
            for before, after in zip(at, [*at[1:], steps], strict=True)
        )
        note = f"{len(series)} tensors; {share:.1%} of steps of {1000 * seconds:.1f} ms by its own account, first steps included"
        is_short = seconds < SHORT_STEP  # for which there is no longest gap
        target, longest = (None, None) if is_short else (_FEWEST, _LONGEST_GAP)
        report.add(f"{workload}/rows", Figure(fewest, f"rows in {steps} steps", target, "at least", note))
        report.add(f"{workload}/gap", Figure(gap, "steps at most between two rows", longest))
    report.finish(given.json)


if __name__ == "__main__":
    main()
