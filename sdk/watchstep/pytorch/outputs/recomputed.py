"""Outputs that activation checkpointing computes a second time, in the backward pass: their difference to those of the first pass.

Gradients of a checkpointed segment belong to its second forward pass. If that draws other dropout masks, runs under another autocast, or reads buffers
that have changed, the gradients are of another network than the loss. PyTorch compares shapes and dtypes only, and only without reentrant checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from watchstep.capture.steps.metric_names import RECOMPUTED
from watchstep.capture.steps.record import Group
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.format.tensors import TensorInfo
from watchstep.kernels.measurement import Kernel
from watchstep.pytorch.outputs.pass_hooks import CallCount
from watchstep.pytorch.probes.staging import views

_ELEMENTS = 256
"""Elements of an output that are compared."""

_MODULES = 32
"""Modules whose outputs are compared in a step, the first of each segment."""


class RecomputedOutputs:
    """Compares the outputs of one model's modules in steps in which they are measured. Runs on the training thread.

    Of several calls of a module before one backward pass, the last one is computed again first, and not each of them is measured. So only a single call is compared.

    Attributes:
        is_active: Whether a module has been computed in a backward pass. Before that nothing is kept.
    """

    def __init__(self, session: Session, kernel: Kernel) -> None:
        self._recorder = session.recorder
        self._enabled = tensors.METRICS in session.config.chosen
        self._kernel = kernel
        self.is_active = False
        self._step = -1
        self._passes = 0
        self._first: dict[str, tuple[Tensor, tuple[int, int]]] = {}
        self._compared: list[tuple[TensorInfo, Tensor, Tensor]] = []
        self._groups: dict[str, Group] = {}

    def model_called(self) -> None:
        """Count a pass of the model with gradients, in which modules may have no hooks that count their calls."""
        self._passes += 1
        self._first.clear()

    def end_turn(self) -> None:
        """Handle a backward pass or an update."""
        self._passes = 0

    def forget(self, info: TensorInfo) -> None:
        """Handle a call of a module in another mode, which the backward pass may compute again too."""
        self._first.pop(info.name, None)

    @torch.no_grad()
    def first(self, info: TensorInfo, outputs: list[Tensor], calls: CallCount) -> None:
        """Keep elements of an output of the first pass, if it is of the only call before the backward pass so far."""
        if not self._enabled or len(outputs) != 1:
            return
        if self._step != self._recorder.step:
            self._step = self._recorder.step
            self._first.clear()
        if self._passes <= 1 and calls.last[1] == 1 and len(self._first) < _MODULES:
            self._first[info.name] = views(outputs, _ELEMENTS)[0].clone(), calls.last

    @torch.no_grad()
    def again(self, info: TensorInfo, outputs: list[Tensor], calls: CallCount) -> None:
        """Keep elements of the output of the second pass, which may run on a thread of autograd's, unless the module was called meanwhile."""
        self.is_active = True
        first, call = self._first.pop(info.name, (None, None))
        if first is not None and call == calls.last and len(outputs) == 1:
            self._compared.append((info, first, views(outputs, _ELEMENTS)[0].clone()))

    @torch.no_grad()
    def record(self) -> None:
        """Record the differences of this step, relative to the largest magnitude of the first output."""
        compared, self._compared = self._compared, []
        for info, first, second in compared if self._step == self._recorder.step else ():
            if (second.dtype, second.shape) == (first.dtype, first.shape):
                largest = first.float().abs().max().clamp_min(torch.finfo(torch.float32).tiny)
                difference = (second.float() - first.float()).abs() / largest
            else:
                difference = torch.ones(1)  # computed in another precision
            self._recorder.add(self._group(info), self._kernel.measure([difference]))

    def _group(self, info: TensorInfo) -> Group:
        group = self._groups.get(info.name)
        if group is None:
            name, collections = f"{info.name}:{RECOMPUTED}", (tensors.METRICS,)
            described = TensorInfo(name, collections, "metric", info.module, info.module_type, info.order)
            group = self._groups[info.name] = Group.of((described,))
        return group
