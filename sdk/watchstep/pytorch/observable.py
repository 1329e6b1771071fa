"""Detection of code that computes no numbers, and module hooks that are inactive in a copy of their module.

Programs deep-copy models for averages and targets, and pickle them to save or spawn. A copy is not the watched model:
its hook does nothing, and can be unpickled without Watchstep.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class _OwnWork(threading.local):
    """Calls of the recorder in this thread.

    Attributes:
        depth: Number of calls in progress.
        seconds: Time in all calls so far that `enter` and `leave` enclose.
    """

    depth = 0
    seconds = 0.0
    _began = 0.0

    def enter(self) -> None:
        """Begin a call, whose time counts as recording if it is not within another."""
        if not self.depth:
            self._began = time.perf_counter()
        self.depth += 1

    def leave(self) -> None:
        """End a call."""
        self.depth -= 1
        if not self.depth:
            self.seconds += time.perf_counter() - self._began


own_work = _OwnWork()
"""While its ``depth`` is not zero, operations are the recorder's own and not the program's. A tracer leaves them out."""

_FAKE = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001 - has no public name


def observable() -> bool:
    """Return False while code is compiled, traced, exported, transformed by `torch.func`, or run on fake tensors."""
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._get_tracing_state() is None  # noqa: SLF001 - as torch.jit.is_tracing
        and torch._C._functorch.maybe_current_level() is None  # noqa: SLF001 - inside vmap, grad, jvp, …
        and torch._C._get_dispatch_mode(_FAKE) is None  # noqa: SLF001 - programs estimate memory with fake tensors
    )


def dense_values(tensor: Tensor) -> Tensor | None:
    """Return a tensor of one shape with values: all values of a nested tensor; None for a meta tensor."""
    if tensor.is_meta:
        return None
    return tensor.values() if tensor.is_nested else tensor


class ModuleHook:
    """Calls a function when its module is called, unless the module computes no numbers."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        """Call the function. PyTorch calls this with the hook's arguments."""
        if observable():
            own_work.enter()
            try:
                self._call(*arguments)
            finally:
                own_work.leave()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        # A callable of the standard library that accepts any arguments and returns None.
        return getattr, (nullcontext(), "__exit__")


def own_tensor(module: nn.Module, name: str) -> Tensor | None:
    """Return the parameter or buffer that a module stores under a name; None if there is none.

    Reading the attribute instead would run a parametrization or property of the program, which may use random numbers.
    """
    stored = module.__dict__
    tensor: Tensor | None = stored["_parameters"].get(name, stored["_buffers"].get(name))
    return tensor
