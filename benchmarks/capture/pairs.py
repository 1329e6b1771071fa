"""The same training with and without the hook, by turns in one process: ``python -m benchmarks.capture.pairs``.

Two processes of one program can differ by several percent for as long as they live, by where their memory lies and who
else is on the machine. Blocks of steps that take turns in one process share that; the median of their ratios is told. The
peers cannot be taken off a model again, so they are measured by processes (``python -m benchmarks.capture``).

The model is watched once, as a program does it. In the blocks without the hook everything that PyTorch calls is put aside, and put back afterwards.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.capture import instruments
from benchmarks.capture.models import WORKLOADS, Training
from benchmarks.capture.variants import VARIANTS
from benchmarks.report import Figure, Report, arguments
from watchstep import Hook
from watchstep.pytorch import losses
from watchstep.pytorch.parameters import amp, clipping, optimizer_steps

_DENSE = 100
"""So many steps the budget measures densely first; what it costs after them is told."""


@dataclass(frozen=True)
class Turns:
    """How a variant is measured: so many blocks of so many steps, after a warm-up."""

    blocks: int
    steps: int
    warm: int = 3


_SHORT = {
    "transformer": Turns(6, 1),
    "transformer_small": Turns(20, 4),
    "mlp": Turns(20, 4),
    "cnn": Turns(20, 4),
    "gpt": Turns(20, 4),
    "encoder": Turns(20, 4),
    "dcgan": Turns(20, 4),
    "ppo": Turns(20, 40),
    "bert": Turns(20, 4),
    "modules": Turns(20, 4),
}
# The budget does not do the same at each step, so its blocks are long.
_LONG = {
    "transformer": Turns(8, 5, _DENSE),
    "transformer_small": Turns(10, 25, _DENSE),
    "mlp": Turns(10, 25, _DENSE),
    "cnn": Turns(10, 25, _DENSE),
    "gpt": Turns(10, 20, _DENSE),
    "encoder": Turns(10, 20, _DENSE),
    "dcgan": Turns(10, 20, _DENSE),
    "ppo": Turns(10, 100, _DENSE),
    "bert": Turns(10, 20, _DENSE),
    "modules": Turns(10, 20, _DENSE),
}
_QUICK = Turns(4, 2)
_CHOSEN: dict[str, tuple[type[instruments.Watchstep], dict[str, Turns]]] = {
    "gate": (instruments.Gate, _SHORT),
    "statistics": (instruments.Statistics, _SHORT),
    "budget": (instruments.Budget, _LONG),
}


class Listening:
    """What PyTorch calls of the watches of a hook, which can be put aside.

    Attributes:
        watches: the watches.
    """

    def __init__(self, hook: Hook) -> None:
        self.watches = list(hook._watches)  # noqa: SLF001 - a program never puts them aside
        modules = [module for watch in self.watches for module in watch.model.modules()]
        self._hooks = [module._forward_hooks for module in modules]  # noqa: SLF001 - have no public name
        self._hooks += [module._forward_pre_hooks for module in modules]  # noqa: SLF001
        self._aside: list[dict[Any, Any]] = []
        lists: list[list[Any]] = [kind._listeners for kind in (losses, optimizer_steps, amp, clipping)]  # noqa: SLF001
        self._listeners = [(entries, list(entries)) for entries in lists]

    def set(self, *, modules: bool, losses: bool = True, steps: bool = True) -> None:
        """Choose what is called: hooks of models and of the modules in them, the wrapper of ``backward()``, and hooks of optimizers."""
        if modules:
            for hooks, put_aside in zip(self._hooks, self._aside, strict=False):
                hooks.update(put_aside)
            self._aside = []
        elif not self._aside:  # layers have hooks in some passes only
            self._aside = [dict(hooks) for hooks in self._hooks]
            for hooks in self._hooks:
                hooks.clear()
        for (listeners, all_listeners), is_on in zip(
            self._listeners, (losses, steps, steps, steps), strict=True
        ):
            listeners[:] = all_listeners if is_on else []


def watch_all(hook: Hook, training: Training) -> None:
    """Watch the models of a training, as a program does."""
    for number, (model, optimizer) in enumerate(training.watched):
        hook.watch(model, optimizer, name=f"other_{number}" if number else "")


def _seconds(training: Training, steps: int) -> float:
    began = time.process_time()
    for _ in range(steps):
        training.backward()
        training.update()
    return (time.process_time() - began) / steps


@dataclass(frozen=True)
class Taken:
    """What blocks took.

    Attributes:
        ratios: process CPU time of a step with the hook over that without, block by block.
        account: share of the program's time that the recorder's own account says it took, over all blocks with it. Both are of the account's clock,
            so that waiting for a processor is in both.
    """

    ratios: list[float]
    account: float


def measured(workload: str, variant: type[instruments.Watchstep], turns: Turns) -> Taken:
    """Take turns."""
    training = WORKLOADS[workload].start()
    found, spent, program = [], 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder, Hook(folder, **variant.options()) as hook:

        def told() -> tuple[float, float]:
            account = hook.health.get("overhead", {})
            return account.get("spent_seconds", 0.0), account.get("program_seconds", 0.0)

        watch_all(hook, training)
        listening = Listening(hook)
        _seconds(training, turns.warm)
        for _ in range(turns.blocks):
            listening.set(modules=True)
            _seconds(training, 1)
            before = told()
            watched = _seconds(training, turns.steps)
            spent, program = (
                total + now - then for total, now, then in zip((spent, program), told(), before, strict=True)
            )
            listening.set(modules=False, losses=False, steps=False)
            bare = _seconds(training, turns.steps)
            found.append(watched / bare)
        listening.set(modules=True)
    return Taken(found, spent / program if program else 0.0)


def main() -> None:
    """Run it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", choices=list(WORKLOADS), action="append", help="leave the others out")
    given = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("Capture, by turns in one process", quick=given.quick)
    for workload in given.only or WORKLOADS:
        for name, (variant, turns) in _CHOSEN.items():
            taken = measured(workload, variant, _QUICK if given.quick else turns[workload])
            low, _, high = statistics.quantiles(taken.ratios, n=4)
            note = f"quartiles {low:.3f} and {high:.3f} of {len(taken.ratios)} blocks"
            note += f"; its own account {taken.account:.2%}" if taken.account else ""
            target = VARIANTS[name].targets.get(workload)
            figure = Figure(statistics.median(taken.ratios), "ratio", target, note=note)
            report.add(f"{workload}/{name}/pairs", figure)
    report.finish(given.json)


if __name__ == "__main__":
    main()
