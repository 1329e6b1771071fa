"""Hooks that stay behind when their module is copied, saved whole, or sent to another process.

Programs deep-copy models for averages and targets, and pickle them to save or spawn. A copy is not the watched model: its
hook does nothing, and unpickles where Watchstep is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from watchstep.pytorch.observable import observable


class ModuleHook:
    """Calls a function when its module is called, but not where it computes no numbers."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> None:
        """Called by the module."""
        if observable():
            self._call(*given)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        # What the standard library has that takes anything and returns None.
        return getattr, (nullcontext(), "__exit__")
