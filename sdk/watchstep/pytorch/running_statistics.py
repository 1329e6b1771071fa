"""Running statistics of a model, and their copies from before the current forward passes.

They are the buffers of PyTorch's normalization layers, and those of the program's own modules that are named like running statistics. A bad batch
makes them non-finite in the forward pass, and a skipped update alone does not change that: they are set back to their copies.

PyTorch does not count the changes of normalization layers, so all are copied before the first pass after an update. A program that drops its gradients
and begins anew without an update has later copies too. In compiled code no pass is observed; there they are copied at the end of an update.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from watchstep.pytorch import internals
from watchstep.pytorch.gate import any_is_nonfinite
from watchstep.pytorch.names import bases_of
from watchstep.pytorch.observable import own_tensor
from watchstep.pytorch.probes.staging import has_all_memory

_OWN_CLASSES = re.compile("norm|whiten|running|moving|standardi[sz]", re.IGNORECASE)
_OWN_BUFFERS = re.compile("(^|_)(running|moving|ema)(_|$)", re.IGNORECASE)
_MAX_ELEMENTS = 2**20
"""Maximum size of the program's own buffers: running statistics are small, queues of examples are not."""


def own_statistics(model: nn.Module) -> Iterator[tuple[int, str, nn.Module, str, Tensor]]:
    """Yield buffers of modules outside PyTorch that are named like running statistics and saved with the model.

    Each has the number and path of its module, the module, its name there, and its values.
    """
    for order, (path, module) in enumerate(model.named_modules()):
        if isinstance(module, internals.norm_base.value) or type(module).__module__.startswith("torch."):
            continue
        normalizes = any(_OWN_CLASSES.search(base) for base in bases_of(module))
        for leaf, values in module.named_buffers(recurse=False):
            if not (normalizes or _OWN_BUFFERS.search(leaf)):
                continue
            is_saved = internals.is_saved(module, leaf)
            is_small = 0 < values.numel() <= _MAX_ELEMENTS and values.device.type in ("cpu", "cuda")
            if is_saved and is_small and values.is_floating_point():
                yield order, path, module, leaf, values


@dataclass
class _Statistic:
    """One running statistic.

    Attributes:
        name: its name in the model.
        module, leaf: where it is.
        first: copy from before the first pass after the last update.
        later: copy from before a later pass without gradients, so after a new beginning; None if there is none.
    """

    name: str
    module: nn.Module
    leaf: str
    first: Tensor | None = None
    later: Tensor | None = None

    def values(self) -> Tensor | None:
        """Return the current values; None if the module has none that can be copied."""
        values = own_tensor(self.module, self.leaf)
        if values is None or type(values) is not Tensor or not _is_plain(values):
            return None
        return values.detach()

    def restore(self) -> bool:
        """Set the values to the last copy that is finite. Returns False if there is none."""
        values = self.values()
        for copy in (self.later, self.first):
            if (
                values is not None
                and copy is not None
                and copy.shape == values.shape
                and bool(copy.isfinite().all())
            ):
                values.copy_(copy)
                return True
        return False


@dataclass(frozen=True)
class Restored:
    """What became of the buffers of a model after a prevented update.

    Attributes:
        number: number of running statistics that were restored.
        nonfinite: names of buffers that stay non-finite, and were finite when the model was watched or their module was added.
    """

    number: int = 0
    nonfinite: list[str] = field(default_factory=list)


class RunningStatistics:
    """The running statistics of one watched model. Used on the training thread."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._statistics: list[_Statistic] = []
        self._nonfinite_before: set[str] = set()
        self._is_first_pass, self._has_passed = True, False
        self.list_statistics()
        self._copy()

    def list_statistics(self) -> None:
        """Find the statistics of the modules that the model has now. Copies of those that it had before are kept."""
        known = {(id(each.module), each.leaf): each for each in self._statistics}
        places = [
            (path, module, leaf)
            for path, module in self._model.named_modules()
            if isinstance(module, internals.norm_base.value)
            for leaf in ("running_mean", "running_var")
        ]
        places += [(path, module, leaf) for _, path, module, leaf, _ in own_statistics(self._model)]
        statistics = [
            known.get((id(module), leaf)) or _Statistic(f"{path}.{leaf}" if path else leaf, module, leaf)
            for path, module, leaf in places
        ]
        self._statistics = [statistic for statistic in statistics if statistic.values() is not None]
        self._nonfinite_before.update(self._nonfinite())
        self._parameters = list(self._model.parameters())

    def pass_begins(self) -> None:
        """Handle the start of a forward pass of training: copy what it may change."""
        if not self._statistics:
            return
        self._has_passed = True
        if self._is_first_pass:
            self._is_first_pass = False
            self._copy()
        elif all(parameter.grad is None for parameter in self._parameters):
            self._copy(is_later=True)

    def update_ends(self) -> None:
        """Handle the end of an update. If no pass was observed before it, copy what the next one may change."""
        if not self._statistics:
            return
        if not self._has_passed and not any_is_nonfinite(self._values()):
            self._copy()
        self._is_first_pass, self._has_passed = True, False

    @torch.no_grad()
    def restore(self) -> Restored:
        """Set running statistics that are NaN or infinite to their copies. Waits for devices."""
        number = 0
        if any_is_nonfinite(self._values()):
            for statistic in self._statistics:
                values = statistic.values()
                if values is not None and _is_damaged(values):
                    number += statistic.restore()
        return Restored(number, [name for name in self._nonfinite() if name not in self._nonfinite_before])

    def _values(self) -> list[Tensor]:
        return [values for statistic in self._statistics if (values := statistic.values()) is not None]

    def _nonfinite(self) -> Iterator[str]:
        """Yield the names of damaged statistics, and of other buffers with NaN. Infinity may be there on purpose, as in a mask."""
        names = {statistic.name for statistic in self._statistics}
        for name, buffer in self._model.named_buffers():
            if not _is_plain(buffer):
                continue
            try:
                is_bad = _is_damaged(buffer) if name in names else bool(buffer.isnan().any())
            except (RuntimeError, NotImplementedError):
                continue  # some types of few bits have no such operation
            if is_bad:
                yield name

    @torch.no_grad()
    def _copy(self, *, is_later: bool = False) -> None:
        targets, sources = [], []
        for statistic in self._statistics:
            values = statistic.values()
            if not is_later:
                statistic.later = None
            if values is None:
                continue
            copy = statistic.later if is_later else statistic.first
            if copy is not None and (copy.shape, copy.dtype, copy.device) == (
                values.shape,
                values.dtype,
                values.device,
            ):
                targets.append(copy)
                sources.append(values)
            elif is_later:
                statistic.later = values.clone()
            else:
                statistic.first = values.clone()
        if targets:
            internals.copy_each(targets, sources)


def _is_plain(values: Tensor) -> bool:
    return (
        values.is_floating_point()
        and values.layout is torch.strided
        and not (values.is_meta or values.is_nested or values.is_quantized)
        and has_all_memory(values)
    )


def _is_damaged(values: Tensor) -> bool:
    """Return whether a statistic is NaN or infinite. Negative infinity is the start of a maximum."""
    return bool((values.isnan() | values.isposinf()).any())
