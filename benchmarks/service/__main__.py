"""How fast the service is, what it costs, and how that grows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import psutil

from benchmarks.report import Report, arguments
from benchmarks.service.announcements import add_announcement_figures
from benchmarks.service.death import add_death_figures
from benchmarks.service.embedded import add_embedded_figures, add_training_figures
from benchmarks.service.growth import add_growth_figures
from benchmarks.service.load import add_load_figures

_PARTS: dict[str, Callable[..., None]] = {
    "load": add_load_figures,
    "embedded": add_embedded_figures,
    "training": add_training_figures,
    "death": add_death_figures,
    "growth": add_growth_figures,
    "announcements": add_announcement_figures,
}


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=list(_PARTS), action="append", help="leave the other parts out")
    parser.add_argument("--runs", type=int, default=0, help="runs of the part load (200; 40 with --quick)")
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="measured seconds of the part load (120; 16 with --quick)"
    )
    options = parser.parse_args()
    logging.getLogger("watchstep_services").setLevel(logging.ERROR)
    report = Report("The service", quick=options.quick, packages=("sqlalchemy", "psycopg", "celery", "redis"))
    chosen = options.only or list(_PARTS)
    left_out = [name for name in _PARTS if name not in chosen]
    if left_out:
        report.remark(f"left out of this run: {', '.join(left_out)}")
    others = psutil.getloadavg()[0]
    report.remark(
        f"load of the machine before it began: {others:.1f}; absolute times hold only where that is near 0"
    )
    for name in chosen:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        given = {"runs": options.runs, "seconds": options.seconds} if name == "load" else {}
        _PARTS[name](report, quick=options.quick, **given)
    report.finish(options.json)


if __name__ == "__main__":
    main()
