"""What tracing every operation of a step costs, beside PyTorch's own tools.

``python -m benchmarks.trace [--quick] [--json FILE]``. A transformer of 20 million parameters (six layers, width 512, AdamW, float32, eager) on one
thread of the CPU, with two batch sizes: an ordinary one (8 x 128 tokens) and a small one (2 x 32), where the fixed cost of an operation
counts most. Every variant runs one step in turn, in each round. Figures are ratios of process CPU time to a step without any tool, of the
fastest round each; the spread is that of two variants without a tool.

Peers in the same run: a dispatch mode that does nothing (the least that any tool of this kind costs), one that tests each output by
``isfinite().all()`` and reads the result, one that adds ``sum()`` of each output and reads once per step, and ``torch.autograd.detect_anomaly``,
which sees NaN in the backward pass only. Figures of TensorFlow's Debugger V2 cannot be measured in one process with these; measured once on
a similar model (3.7 million parameters, batch 8 x 64, graph mode): curt 1.30, concise 1.67, full health 8.6.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.report import Figure, Report, arguments
from watchstep.trace import TraceConfig, TraceMode, Tracer

_SIZES = {"ordinary": (8, 128), "small": (2, 32)}
_TARGETS = {"ordinary": 1.10, "small": 1.25}
_WIDTH, _CLASSES = 512, 1000


class _PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _TestsEach(TorchDispatchMode):
    """Tests each output, and reads the result at once."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            bool(torch.isfinite(result).all())
        return result


class _SumsEach(TorchDispatchMode):
    """Adds the elements of each output that is no view, and reads the sums at the end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sums: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = isinstance(result, Tensor) and any(
            result.data_ptr() == each.data_ptr() for each in args if isinstance(each, Tensor)
        )
        if isinstance(result, Tensor) and result.is_floating_point() and not is_view:
            self._sums.append(result.sum())
        return result

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        bool(torch.isfinite(torch.stack(self._sums)).all())


def _variants(model: nn.Module) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    def traced(mode: TraceMode) -> Callable[[], AbstractContextManager[Any]]:
        return lambda: Tracer(model, TraceConfig(mode=mode)).step()

    return {
        "nothing": nullcontext,
        "trace no_tensor": traced(TraceMode.NO_TENSOR),
        "trace curt_health": traced(TraceMode.CURT_HEALTH),
        "trace full_health": traced(TraceMode.FULL_HEALTH),
        "empty dispatch mode": _PassThrough,
        "isfinite of each output": _TestsEach,
        "sum of each output": _SumsEach,
        "detect_anomaly": torch.autograd.detect_anomaly,
        "nothing again": nullcontext,
    }


def _measure(tokens: tuple[int, int], rounds: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(_WIDTH, 8, 4 * _WIDTH, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Linear(_WIDTH, _CLASSES))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(*tokens, _WIDTH), torch.randint(0, _CLASSES, (tokens[0] * tokens[1],))

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x).flatten(0, 1), y).backward()
        optimizer.step()

    step()
    variants = _variants(model)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            began = time.process_time()
            with variant():
                step()
            seconds[name].append(time.process_time() - began)
    return seconds


def main() -> None:
    """Measure and print."""
    parsed = arguments("What tracing every operation of a step costs.").parse_args()
    warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
    torch.set_num_threads(1)
    report = Report(
        "Tracing every operation of a step: CPU time as a multiple of a step without a tool", parsed.quick
    )
    for name, tokens in _SIZES.items():
        seconds = _measure(tokens, 3 if parsed.quick else 20 if name == "ordinary" else 60)
        bare = [*seconds["nothing"], *seconds["nothing again"]]
        for variant, values in seconds.items():
            target = _TARGETS[name] if variant == "trace curt_health" else None
            note = (
                f"median {statistics.median(values) / statistics.median(bare):.3f}, of {len(values)} rounds"
            )
            report.add(f"{name} step, {variant}", Figure(min(values) / min(bare), "ratio", target, note=note))
        report.add(f"{name} step", Figure(min(bare), "s"))
    report.finish(parsed.json)


if __name__ == "__main__":
    main()
