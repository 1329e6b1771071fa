"""Hooks of layers, which are removed for passes without measurements, or only note outputs in them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from watchstep.capture.steps.session import Session
from watchstep.pytorch import internals
from watchstep.pytorch.gate import Describe, LiveOutputs, version_of
from watchstep.pytorch.observable import ModuleHook

# Called for each module of each pass, so they are not looked up there.
is_compiling = torch.compiler.is_compiling
graph_task_id, functorch_level = internals.graph_task_id, internals.functorch_level

REMOVED = object()
"""The output of a call of a hook that was removed meanwhile by another thread: PyTorch leaves the keywords out."""


class LayerHook:
    """The hook of a layer, which is removed for passes without measurements: any hook makes each call of a module slower.

    Attributes:
        is_called: Whether it has ever been called. In compiled code it is not, and PyTorch would compile anew if it came and went.
    """

    __slots__ = ("_call", "_handle", "_module", "is_called")

    def __init__(self, module: nn.Module, call: ModuleHook) -> None:
        self._module, self._call = module, call
        self._handle: RemovableHandle | None = None
        self.is_called = False
        self.register()

    def register(self) -> None:
        """Register it if it is not."""
        if self._handle is None:
            self._handle = self._module.register_forward_hook(self._call, with_kwargs=True)

    def remove(self) -> None:
        """Remove it if it is registered."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def detach(self) -> None:
        """Remove it for good, and drop what it calls."""
        self.remove()
        del self._call, self._module


class Removable(Protocol):
    """A registered hook."""

    def remove(self) -> None:
        """Remove it."""
        ...


class UnmeasuredPass:
    """A training pass in which nothing is due, so that hooks only note outputs.

    Attributes:
        step: Step of the pass; -1 outside of such a pass.
        thread: Thread of the pass.
        time_ns: Time of the pass, in nanoseconds since the epoch.
        of_parts: Whether the program calls modules of the model, and not the model itself. Then calls without gradients are not of the pass,
            and a loss that is logged as NaN ends it.
        output: The output of the model in the last such pass.
        note: Notes an output, see `LiveOutputs.append`.
    """

    __slots__ = ("note", "of_parts", "output", "recorder", "session", "step", "thread", "time_ns")

    def __init__(self, session: Session, live: LiveOutputs) -> None:
        self.step, self.thread, self.time_ns = -1, -1, 0
        self.of_parts = False
        self.output: weakref.ref[Tensor] | None = None
        self.recorder, self.session, self.note = session.recorder, session, live.append

    def begin(self, *, of_parts: bool) -> None:
        """Begin such a pass on this thread."""
        self.step, self.thread, self.of_parts = self.recorder.step, get_ident(), of_parts
        self.time_ns = time.time_ns()


class NotingHook(ModuleHook):
    """The hook of a module whose output, or of a model whose input, is noted in unmeasured passes.

    It runs for each module of each pass, most of which are unmeasured: then it calls little else than functions of PyTorch. Everything that
    the general case decides again at each call, because a program may change it within a pass, is compared here.
    """

    __slots__ = ("_describe", "_of_input", "_unmeasured")

    def __init__(
        self, call: Callable[..., None], unmeasured: UnmeasuredPass, describe: Describe, *, of_input: bool
    ) -> None:
        super().__init__(call)
        self._unmeasured, self._describe, self._of_input = unmeasured, describe, of_input

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any = REMOVED) -> None:
        """Note the output of the module, or its only argument, or measure it."""
        if is_compiling() or output is REMOVED:  # a compiler that looks at the output may warn
            return
        unmeasured = self._unmeasured
        noted = output
        if self._of_input:
            noted = args[0] if len(args) == 1 and not kwargs else None
            if unmeasured.step != -1:
                unmeasured.output = weakref.ref(output) if type(output) is Tensor else None
        if (
            unmeasured.step == unmeasured.recorder.step
            and type(noted) is Tensor
            and module.training
            and unmeasured.session.mode == "train"
            and unmeasured.thread == get_ident()
            and graph_task_id.value() == -1
            and functorch_level.value() is None
            and not (unmeasured.of_parts and (unmeasured.recorder.logged_nan or not torch.is_grad_enabled()))
        ):
            unmeasured.note((self._describe, (weakref.ref(noted),), (version_of(noted),), unmeasured.time_ns))
        else:
            super().__call__(module, args, kwargs, output)
