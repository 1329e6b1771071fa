"""Hooks of modules that come and go, because any hook makes each call of a module slower.

A hook costs microseconds at each call. Where small modules are called hundreds of times in a step, such as a cell at each time step or the function of a
differential equation, that is much of the step. If the fixed cost of the steps of a program is above its limit, see `Budget.is_overloaded`, the hooks of
a module are removed after its first calls, and come back with the next backward pass or update. Health names such modules.

Passes that are not recorded, or of which nothing is due, are as many where a policy acts or a model generates text. After the first ones the hooks are removed too,
and come back with the next pass with gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from watchstep.capture.steps.session import Session

MOST_CALLS = 8
"""Calls of a module that are observed between two backward passes or updates, if the fixed cost of steps is above its limit."""

_REPEATED_SECONDS = 5e-6
"""Estimated time of one hook at a repeated call: 1 µs of PyTorch's, as in a loop, and that of noting an output, which does not measure itself."""

_NAMED = 5


class Handle(Protocol):
    """A registered hook."""

    def remove(self) -> None:
        """Remove it."""
        ...


class PassHook:
    """A hook of a module that comes and goes: any hook makes each call of a module slower.

    Attributes:
        of_layer: Whether it is of a layer, and not of the model itself.
        in_passes_only: Whether it is registered in single passes only, and by nothing else.
        is_called: Whether it has ever been called. In compiled code it is not, and PyTorch would compile anew if it came and went.
    """

    __slots__ = ("_handle", "_is_fixed", "_register", "in_passes_only", "is_called", "of_layer")

    def __init__(
        self, register: Callable[[], Handle], *, of_layer: bool, in_passes_only: bool = False
    ) -> None:
        """Register it, unless it is registered in single passes only.

        Args:
            register: Registers the hook.
            of_layer: Whether it is of a layer.
            in_passes_only: Whether it is registered in single passes only.
        """
        self._register, self.of_layer, self.in_passes_only = register, of_layer, in_passes_only
        self._handle: Handle | None = None
        self._is_fixed = self.is_called = False
        if not in_passes_only:
            self.register()

    def register(self) -> None:
        """Register it if it is not."""
        if self._handle is None and not self._is_fixed:
            self._handle = self._register()

    def remove(self) -> None:
        """Remove it if it is registered."""
        if not self._is_fixed:
            handle, self._handle = self._handle, None
            if handle is not None:
                handle.remove()

    def fix(self) -> None:
        """Let it be as it is now for good, because its module is compiled: PyTorch would compile anew if it came or went."""
        self._is_fixed = True

    def detach(self) -> None:
        """Remove it for good, and drop what it calls."""
        self._is_fixed = False
        self.remove()
        del self._register


class RepeatedCalls:
    """Counts the calls of the modules of one watched model, and removes hooks of modules that are called too often. Used on the training thread.

    Attributes:
        turn: Number of backward passes and updates so far, between which calls are counted.
        most: Calls of a module in a turn that are observed; infinite while the fixed cost of steps is below its limit.
        number: Calls in this turn that were not the first ones of their module.
        ignores_unrecorded: Whether hooks of layers leave out calls without gradients in this turn.
    """

    __slots__ = (
        "_health", "_model_calls", "_names", "_paused", "_schedule", "_sentinel", "_unrecorded", "ignores_unrecorded", "most",
        "number", "turn",
    )  # fmt: skip

    def __init__(self, session: Session) -> None:
        self._schedule, self._health = session.schedule, session.health
        self._paused: list[PassHook] = []
        self._names: set[str] = set()
        self._sentinel: PassHook | None = None
        self._model_calls = self._unrecorded = 0
        self.turn = self.number = 0
        self.ignores_unrecorded = False
        self.most = math.inf

    def model_called(self, hooks: Sequence[PassHook]) -> bool:
        """Count a training pass of the model itself. Returns whether it has been called too often, and all its hooks were removed.

        Args:
            hooks: Hooks of the model and of its layers.
        """
        self._model_calls += 1
        if self._model_calls <= self.most:
            return False
        self.pause("model", hooks)
        return True

    def other_pass(self, hooks: Sequence[PassHook], sentinel: Callable[[], Handle]) -> bool:
        """Count a pass that is not of training, or has no gradients. Returns whether there are too many, and all hooks were removed.

        Args:
            hooks: Hooks of the model and of its layers.
            sentinel: Registers the hook that calls `resume` in the next pass with gradients.
        """
        self._unrecorded += 1
        if self._unrecorded <= self.most:
            return False
        self._remove(hooks)
        if self._sentinel is None:  # another thread may do the same
            self._sentinel = PassHook(sentinel, of_layer=False)
        return True

    def unrecorded_call(self, hooks: int) -> None:
        """Count a call of a layer that is not recorded.

        Args:
            hooks: Number of layers.
        """
        self._unrecorded += 1
        self.ignores_unrecorded = self._unrecorded > self.most * hooks

    def _remove(self, hooks: Sequence[PassHook]) -> None:
        removed = [hook for hook in hooks if hook.is_called or not hook.of_layer]
        for hook in removed:
            hook.remove()
        self._paused += (hook for hook in removed if not hook.in_passes_only)

    def pause(self, path: str, hooks: Sequence[PassHook]) -> None:
        """Remove the hooks of a module until the turn ends."""
        self._remove(hooks)
        if path not in self._names:
            self._names.add(path)
            names = sorted(self._names)
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            self._health.note(
                "calls",
                f"only the first {MOST_CALLS} calls before each backward pass are observed of {', '.join(names[:_NAMED])}{more}: hooks at "
                "each call would take much of the program's time",
            )

    def end_turn(self, *, has_layer_hooks: bool) -> None:
        """Handle a backward pass or an update: the hooks that were removed come back, those of layers if layers have hooks at present."""
        self.turn += 1
        if self.number:
            self._schedule.dispatched(_REPEATED_SECONDS * self.number)
            self.number = 0
        if self.most == math.inf and self._schedule.is_overloaded:
            self.most = MOST_CALLS
        self._model_calls = self._unrecorded = 0
        self.ignores_unrecorded = False
        self.resume(has_layer_hooks=has_layer_hooks)

    def resume(self, *, has_layer_hooks: bool) -> None:
        """Register the hooks that were removed."""
        if self._sentinel is not None:
            self._sentinel.detach()
            self._sentinel = None
        paused, self._paused = self._paused, []
        for hook in paused:
            if has_layer_hooks or not hook.of_layer:
                hook.register()

    def forget(self) -> None:
        """Drop the hooks."""
        if self._sentinel is not None:
            self._sentinel.detach()
        self._paused, self._sentinel = [], None


class CallCount:
    """Counts the calls of one module in passes of training.

    Attributes:
        hook: The hook of the module; None until it is registered.
    """

    __slots__ = ("_calls", "_path", "_repeated", "_turn", "hook")

    def __init__(self, repeated: RepeatedCalls, path: str) -> None:
        self._repeated, self._path = repeated, path
        self._turn = self._calls = 0
        self.hook: PassHook | None = None

    @property
    def last(self) -> tuple[int, int]:
        """The turn of the last call, and its number in that turn, from 1."""
        return self._turn, self._calls

    def is_surplus(self) -> bool:
        """Count a call. Returns whether it is beyond those that are observed in a turn, and the hook was removed."""
        repeated = self._repeated
        # A checkpointed or frozen part of this pass runs without gradients.
        repeated.ignores_unrecorded = False
        if self._turn != repeated.turn:
            self._turn, self._calls = repeated.turn, 1
            return False
        self._calls += 1
        repeated.number += 1
        if self._calls <= repeated.most or self.hook is None:
            return False
        repeated.pause(self._path, [self.hook])
        return True
