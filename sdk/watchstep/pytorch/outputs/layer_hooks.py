"""Hooks of layers that only note outputs in passes without measurements."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from watchstep.capture.health import RecorderHealth
from watchstep.capture.steps.own_work import own_work
from watchstep.capture.steps.session import Session
from watchstep.pytorch import internals
from watchstep.pytorch.gate import Describe, LiveOutputs, version_of
from watchstep.pytorch.observable import ModuleHook
from watchstep.pytorch.outputs.pass_hooks import CallCount, PassHook, RepeatedCalls
from watchstep.pytorch.outputs.passes import ForwardPasses

# Called for each module of each pass, so they are not looked up there.
is_compiling = torch.compiler.is_compiling
graph_task_id, functorch_level = internals.graph_task_id, internals.functorch_level

REMOVED = object()
"""The output of a call of a hook that was removed meanwhile by another thread: PyTorch leaves the keywords out."""


EVALUATES_FASTER = nn.TransformerEncoderLayer
"""PyTorch's class of layers that compute other numbers in evaluation if any module in them has a hook: those of their slow path."""


def sees_passes_of(model: nn.Module) -> bool:
    """Return whether forward passes of a model can be observed: hooks know them, and do not change them."""
    return internals.sees_passes() and not isinstance(model, EVALUATES_FASTER)


class EncoderCalls:
    """Calls of one `EVALUATES_FASTER` layer in a training pass of the model: modules in it have hooks while such a call runs.

    The layer looks for hooks when it is called, so what it computes in evaluation is the same wherever the program switches its mode, and
    after a pass that never ended, e.g. by Ctrl-C.

    Attributes:
        encoder: The layer.
        hook: Wraps its calls, in single passes.
    """

    def __init__(
        self,
        encoder: nn.Module,
        hooks: Sequence[PassHook],
        passes: ForwardPasses,
        calls: CallCount,
        health: RecorderHealth,
    ) -> None:
        """Create it.

        Args:
            encoder: The layer.
            hooks: Hooks of modules in it.
            passes: Decides which calls are recorded.
            calls: Counts its calls.
            health: Counts faults, which do not reach the program.
        """
        self.encoder, self._health = encoder, health
        self._hooks, self._passes, self._calls = hooks, passes, calls
        self.hook = calls.hook = PassHook(
            lambda: internals.WrappedCalls(encoder, self._call), of_layer=True, in_passes_only=True
        )

    def _call(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.hook.is_called = True
        is_observed = self.encoder.training and self._passes.mode_of_call() == "train"
        if not is_observed or self._calls.is_surplus():
            return call(*args, **kwargs)
        try:
            self._for_each(PassHook.register)
            return call(*args, **kwargs)
        finally:
            self._for_each(PassHook.remove)

    def _for_each(self, change: Callable[[PassHook], None]) -> None:
        own_work.enter()
        try:
            for hook in self._hooks:
                change(hook)
        except Exception as error:  # noqa: BLE001 - no fault may end the program
            self._health.fault("activations", error)
        finally:
            own_work.leave()


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
        repeated: Counts the calls of modules, also in other passes of training.
    """

    __slots__ = ("note", "of_parts", "output", "recorder", "repeated", "session", "step", "thread", "time_ns")

    def __init__(self, session: Session, live: LiveOutputs) -> None:
        self.step, self.thread, self.time_ns = -1, -1, 0
        self.of_parts = False
        self.output: weakref.ref[Tensor] | None = None
        self.recorder, self.session, self.note = session.recorder, session, live.append
        self.repeated = RepeatedCalls(session)

    def begin(self, *, of_parts: bool) -> None:
        """Begin such a pass on this thread."""
        self.step, self.thread, self.of_parts = self.recorder.step, get_ident(), of_parts
        self.time_ns = time.time_ns()


class Sentinel(ModuleHook):
    """The only hook of a model in passes of which nothing is recorded: it calls a function in the first pass of training with gradients."""

    __slots__ = ()

    def __call__(self, module: nn.Module, *given: Any) -> None:
        """Call the function if this is such a pass."""
        if module.training and torch.is_grad_enabled():
            super().__call__(module, *given)


class NotingHook(ModuleHook):
    """The hook of a module whose output, or of a model whose input, is noted in unmeasured passes.

    It runs for each module of each pass, most of which are unmeasured: then it calls little else than functions of PyTorch. Everything that
    the general case decides again at each call, because a program may change it within a pass, is compared here.
    """

    __slots__ = ("_calls", "_describe", "_of_input", "_unmeasured")

    def __init__(
        self,
        call: Callable[..., None],
        unmeasured: UnmeasuredPass,
        describe: Describe | None,
        calls: CallCount,
        *,
        of_input: bool,
    ) -> None:
        """Create it.

        Args:
            call: Called in other passes.
            unmeasured: The present pass.
            describe: Describes what is noted; None if the general case always decides.
            calls: Counts the calls.
            of_input: Whether the input is noted.
        """
        super().__init__(call)
        self._unmeasured, self._describe, self._of_input = unmeasured, describe, of_input
        self._calls = calls

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any = REMOVED) -> None:
        """Note the output of the module, or its only argument, or measure it."""
        if is_compiling() or output is REMOVED:  # a compiler that looks at the output may warn
            return
        unmeasured = self._unmeasured
        if unmeasured.repeated.ignores_unrecorded and not torch.is_grad_enabled():
            return
        noted = output
        if self._of_input:
            noted = args[0] if len(args) == 1 and not kwargs else None
            if unmeasured.step != -1:
                unmeasured.output = weakref.ref(output) if type(output) is Tensor else None
        if (
            unmeasured.step == unmeasured.recorder.step
            and type(noted) is Tensor
            and self._describe is not None
            and module.training
            and unmeasured.session.mode == "train"
            and unmeasured.thread == get_ident()
            and graph_task_id.value() == -1
            and functorch_level.value() is None
            and not (unmeasured.of_parts and (unmeasured.recorder.logged_nan or not torch.is_grad_enabled()))
        ):
            if not self._calls.is_surplus():
                unmeasured.note(
                    (self._describe, (weakref.ref(noted),), (version_of(noted),), unmeasured.time_ns)
                )
        else:
            super().__call__(module, args, kwargs, output)
