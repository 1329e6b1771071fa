"""What recording costs a training, its longest steps, a kernel's pass and an S3 bill."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable

from benchmarks.capture.cuda import add_cuda_figures
from benchmarks.capture.kernel import add_kernel_figures
from benchmarks.capture.longest_steps import add_longest_steps
from benchmarks.capture.models import QUICK_WORKLOADS, WORKLOADS
from benchmarks.capture.requests import add_request_figures
from benchmarks.capture.training import add_training_figures
from benchmarks.capture.variants import VARIANTS
from benchmarks.report import Report, arguments

_PARTS: dict[str, Callable[..., None]] = {
    "kernel": add_kernel_figures,
    "cuda": add_cuda_figures,
    **{name: functools.partial(add_training_figures, name) for name in WORKLOADS},
    "longest_steps": add_longest_steps,
    "requests": add_request_figures,
}


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=list(_PARTS), action="append", help="leave the other parts out")
    parser.add_argument("--variant", choices=list(VARIANTS), action="append", help="leave the others out")
    options = parser.parse_args()
    logging.getLogger("watchstep").setLevel(logging.WARNING)
    report = Report("Capture", quick=options.quick, packages=("wandb", "tensorboard", "transformers", "moto"))
    chosen = options.only or (("kernel", *QUICK_WORKLOADS, "requests") if options.quick else list(_PARTS))
    left_out = [name for name in _PARTS if name not in chosen]
    if left_out:
        report.remark(f"left out of this run: {', '.join(left_out)}")
    for name in chosen:
        print(f"measuring {name} …", file=sys.stderr, flush=True)
        chosen_variants = {"variants": options.variant} if options.variant and name in WORKLOADS else {}
        _PARTS[name](report, quick=options.quick, **chosen_variants)
    report.finish(options.json)


if __name__ == "__main__":
    main()
