"""Stopped every time, and never for nothing: ``python -m benchmarks.estimator --backend local|slurm|ray [--repeats N]
[--quick] [--json FILE]``.

The same program is launched on a real cluster of this machine, with a NaN in a batch and without, and judged by the service
beside it.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.estimator.launches import BACKENDS, Launched, launch, missing, place
from benchmarks.report import Figure, Report, arguments

REPEATS = {"local": 50, "slurm": 10, "ray": 10}


def main() -> int:
    """Launch again and again; 1 where one was not as it should be."""
    parser = arguments("Launches a training with a fault and without, again and again.")
    parser.add_argument("--backend", choices=BACKENDS, default="local")
    parser.add_argument("--repeats", type=int, help="of each of the two")
    parsed = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if why := missing(parsed.backend):
        raise SystemExit(why)
    repeats = parsed.repeats or (1 if parsed.quick else REPEATS[parsed.backend])
    faulty: list[Launched] = []
    healthy: list[Launched] = []
    with (
        tempfile.TemporaryDirectory(prefix="ws-launch-", ignore_cleanup_errors=True) as folder,
        place(parsed.backend, Path(folder)) as where,
    ):
        for number in range(repeats):
            for kind, name in ((faulty, "faulty"), (healthy, "healthy")):
                kind.append(launch(where, faulty=kind is faulty, number=number))
                said = "; ".join(kind[-1].amiss) or "as it should be"
                print(
                    f"{name} {number + 1} of {repeats}: {said}, {kind[-1].seconds:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
    report = Report(
        f"Launches on {parsed.backend}", parsed.quick, ("ray",) if parsed.backend == "ray" else ()
    )
    _add(report, "faulty runs stopped by their rule, checkpoint saved", faulty)
    _add(report, "healthy runs left alone", healthy)
    report.finish(parsed.json)
    return int(any(one.amiss for one in [*faulty, *healthy]))


def _add(report: Report, name: str, held: list[Launched]) -> None:
    right = sum(not one.amiss for one in held)
    seconds = statistics.median(one.seconds for one in held)
    note = f"of {len(held)}; {seconds:.0f} s each (median), launch to end"
    report.add(name, Figure(right, "runs", float(len(held)), "at least", note=note))


if __name__ == "__main__":
    sys.exit(main())
