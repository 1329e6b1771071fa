"""The same training with and without the hook, by turns in one process: ``python -m benchmarks.capture.pairs``.

Two processes of one program can differ by several percent for as long as they live, by where their memory lies and who
else is on the machine. Blocks of steps that take turns in one process share that; the median of their ratios is told. The
peers cannot be taken off a model again, so they are measured by processes (``python -m benchmarks.capture``).
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch

from benchmarks.capture import instruments
from benchmarks.capture.models import WORKLOADS, Training
from benchmarks.capture.variants import VARIANTS
from benchmarks.report import Figure, Report, arguments
from watchstep import Hook

_STEPS = {"transformer": 1, "transformer_small": 4, "mlp": 4, "cnn": 4}
_CHOSEN = {"gate": instruments.Gate, "statistics": instruments.Statistics}
_BLOCKS = {"transformer": 6, "transformer_small": 20, "mlp": 20, "cnn": 20}
_BLOCKS_QUICK = 4


def _seconds(training: Training, steps: int) -> float:
    began = time.process_time()
    for _ in range(steps):
        training.backward()
        training.update()
    return (time.process_time() - began) / steps


def ratios(workload: str, variant: type[instruments.Watchstep], blocks: int) -> list[float]:
    """Process CPU time of a step with the hook over that without, block by block."""
    training, steps = WORKLOADS[workload].start(), _STEPS[workload]
    found = []
    with tempfile.TemporaryDirectory() as folder, Hook(folder, **variant.options()) as hook:
        _seconds(training, 3)
        for _ in range(blocks):
            hook.watch(training.model, training.optimizer, name="")
            _seconds(training, 1)
            watched = _seconds(training, steps)
            hook._watches.pop().detach()  # noqa: SLF001 - what close does, without ending the recording
            found.append(watched / _seconds(training, steps))
    return found


def main() -> None:
    """Run it."""
    given = arguments(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    report = Report("Capture, by turns in one process", quick=given.quick)
    for workload in WORKLOADS:
        for name, variant in _CHOSEN.items():
            found = ratios(workload, variant, _BLOCKS_QUICK if given.quick else _BLOCKS[workload])
            low, _, high = statistics.quantiles(found, n=4)
            note = f"quartiles {low:.3f} and {high:.3f} of {len(found)} blocks"
            target = VARIANTS[name].targets.get(workload)
            figure = Figure(statistics.median(found), "ratio", target, note=note)
            report.add(f"{workload}/{name}/pairs", figure)
    report.finish(given.json)


if __name__ == "__main__":
    main()
