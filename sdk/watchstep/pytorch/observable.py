"""Detection of code that computes no numbers, and module hooks that are inactive in a copy of their module.

Programs deep-copy models for averages and targets, and pickle them to save or spawn. A copy is not the watched model:
its hook does nothing, and can be unpickled without Watchstep. `torch.jit.script` compiles the hooks of a module, which fails on these: a
module is compiled without them.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from watchstep.capture.steps.own_work import own_work
from watchstep.pytorch import internals


def observable() -> bool:
    """Return False while code is compiled, traced, exported, transformed by `torch.func`, or run on fake tensors."""
    return not torch.compiler.is_compiling() and internals.computes_numbers()


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


def leave_hooks_out_of_scripts() -> None:
    """Let `torch.jit.script` compile modules as if they had no hook of this class, nor one of a copy."""
    internals.wrap_script_compiler(_without_hooks)


def _without_hooks(compile_module: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compile_module)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        with _hooks_left_out(module):
            return compile_module(module, *args, **kwargs)

    return call


@contextmanager
def _hooks_left_out(module: Any) -> Iterator[None]:
    # The dictionary of hooks itself stays as it is: handles refer to it, and another thread may remove a hook meanwhile.
    replaced, wrapped = [], []
    for owner in internals.modules_of(module).values():
        if (calls := internals.WrappedCalls.of(owner)) is not None:
            wrapped.append(calls)
        for name in internals.HOOKS:
            hooks = owner.__dict__.get(name)
            if hooks and any(map(_is_own, hooks.values())):
                replaced.append((owner, name, hooks))
    try:
        for calls in wrapped:
            calls.remove()
        for owner, name, hooks in replaced:
            owner.__dict__[name] = OrderedDict(item for item in hooks.items() if not _is_own(item[1]))
        yield
    finally:
        for calls in wrapped:
            calls.put_back()
        for owner, name, hooks in replaced:
            owner.__dict__[name] = hooks


def _is_own(hook: Any) -> bool:
    return isinstance(hook, ModuleHook) or getattr(hook, "__func__", None) is nullcontext.__exit__


def own_tensor(module: nn.Module, name: str) -> Tensor | None:
    """Return the parameter or buffer that a module stores under a name; None if there is none.

    Reading the attribute instead would run a parametrization or property of the program, which may use random numbers.
    """
    parameters = internals.parameters_of(module)
    return parameters[name] if name in parameters else internals.buffers_of(module).get(name)
