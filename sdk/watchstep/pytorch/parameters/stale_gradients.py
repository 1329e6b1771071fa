"""Whether gradients of before an optimizer's last step are still in those of the next: nobody cleared them.

Of each optimizer one parameter is looked at, when a backward pass begins and after the step. Its gradient was *kept* where
at the first pass after a step it is what that step left (the same tensor, not written to since), at no pass before the
next step is all zero or gone, and was added to by then. Micro-batches between two steps are no matter: before the
first of them a program that accumulates clears, too. `zero_grad` of either kind, a gradient set to None by hand, and one
that takes another tensor's place are all seen as cleared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from watchstep.capture.session import Session
from watchstep.format import tensors
from watchstep.pytorch.losses import record_tensor
from watchstep.pytorch.names import NamedParameter
from watchstep.pytorch.probes.staging import views

METRIC = "gradients:stale"
_ELEMENTS = 64
_AT_EACH_STEP = (
    100  # steps that began with cleared gradients, after which a program is looked at now and then
)
_NOW_AND_THEN = 4


@dataclass
class _Looked:
    """One optimizer's parameter.

    Attributes:
        name: of its metric.
        parameter: whose gradient is looked at; None where there is none to look at. No weak reference: `torch.utils.swap_tensors`, by
            which modules of sharded parameters change their dtype, refuses tensors that have one.
        version: of the gradient, as the last step left it; None where the time until the next is left out.
        kept: what the passes since then say; None before the first.
        cleared: how many steps did not find it kept.
        told: whether the last step said something that a later one has to take back.
    """

    name: str
    parameter: Tensor | None = None
    version: int | None = None
    kept: bool | Tensor | None = None
    cleared: int = 0
    told: bool = False

    def gradient(self) -> Tensor | None:
        """As it is now."""
        return None if self.parameter is None else self.parameter.grad


class StaleGradients:
    """Records 1 as ``gradients:stale`` at each step whose gradients hold those of before the last, and 0 when that ends.

    Of a program's second optimizer it is ``gradients:stale_2``. On a device nothing waits: a number that is not known yet
    is recorded as it will be.
    """

    def __init__(self, session: Session, prefix: str) -> None:
        self._recorder = session.recorder
        self._prefix = f"{prefix}." if prefix else ""
        self._wanted = (
            "stale_gradients" in session.config.probes and tensors.METRICS in session.config.collections
        )
        self._looked: MutableMapping[Optimizer, _Looked] = WeakIdKeyDictionary()

    def backward_begins(self) -> None:
        """A backward pass is about to add to gradients."""
        for looked in list(self._looked.values()):  # a copy: another training's thread may add to it
            if looked.version is None or looked.kept is False:
                continue
            gradient = looked.gradient()
            if gradient is None or (looked.kept is None and gradient._version != looked.version):  # noqa: SLF001 - has no public name
                looked.kept = False
                continue
            some = _some(gradient)
            if gradient.device.type == "cpu":
                looked.kept = bool(some)
            else:
                looked.kept = some if looked.kept is None else some & looked.kept

    def after_step(self, optimizer: Optimizer, parameters: Callable[[], list[NamedParameter]]) -> None:
        """An optimizer has stepped: say what was seen since its last step, and look anew.

        Args:
            optimizer: the optimizer.
            parameters: gives the watched ones that it updates, in its order; called where none is looked at yet.
        """
        if not self._wanted:
            return
        looked = self._looked.get(optimizer)
        if looked is None:
            if not parameters():
                return
            number = len(self._looked) + 1
            name = f"{self._prefix}{METRIC}" + (f"_{number}" if number > 1 else "")
            looked = self._looked[optimizer] = _Looked(name)
        gradient = looked.gradient()
        if looked.version is not None and looked.kept is not None:
            self._tell(looked, gradient)
        if gradient is None:
            looked.parameter, gradient = _last(parameters())
        rests = looked.cleared > _AT_EACH_STEP and looked.cleared % _NOW_AND_THEN != 0
        looked.cleared += rests
        looked.version = None if gradient is None or rests else gradient._version  # noqa: SLF001 - as above
        looked.kept = None

    def _tell(self, looked: _Looked, gradient: Tensor | None) -> None:
        added = gradient is not None and looked.version is not None and gradient._version > looked.version  # noqa: SLF001 - as above
        kept = looked.kept if added else False
        if isinstance(kept, Tensor):
            record_tensor(self._recorder, looked.name, kept.float(), "train")
        elif kept or looked.told:
            self._recorder.scalar(looked.name, float(bool(kept)))
        looked.told = kept is not False
        looked.cleared = (
            0 if kept is True else looked.cleared + 1
        )  # what is not known yet is cleared, most likely


@torch.no_grad()
def _some(gradient: Tensor) -> Tensor:
    """Whether some of its elements are not zero, of a few that are evenly spaced."""
    return views([gradient], _ELEMENTS)[0].any()


def _last(parameters: Iterable[NamedParameter]) -> tuple[Tensor | None, Tensor | None]:
    """The last parameter that has a dense gradient: closest to the loss, so that its gradient is hardly ever zero."""
    for named in reversed(list(parameters)):
        gradient = named.parameter.grad
        if gradient is not None and gradient.layout is torch.strided and gradient.numel():
            return named.parameter, gradient
    return None, None
