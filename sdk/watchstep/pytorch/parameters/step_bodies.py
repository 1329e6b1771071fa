"""Gates before the bodies of optimizer steps: what runs between PyTorch's hooks before a step and those after it.

PyTorch replaces ``step`` of each class of optimizers by a wrapper, which calls the hooks and in between the class's own ``step``, its free variable
``func``. A gate takes the place of that function. So it follows all hooks of the program, whoever registers or removes them, and decides whether
the body runs at all. References to the wrapper, as learning rate schedulers have them, stay valid, and a step that has begun is gated as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FrameType
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from watchstep.pytorch import internals

Body: TypeAlias = Callable[..., Any]
Run: TypeAlias = Callable[[Body, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a body with its arguments, the optimizer included, or does not."""


class GatedBody:
    """Stands for the body of a step. Compiled code contains the body itself, and a copy in another process is the body."""

    __slots__ = ("_run", "body")

    def __init__(self, body: Body, run: Run) -> None:
        self.body = body
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body, or not. PyTorch's wrapper calls this."""
        if torch.compiler.is_compiling():
            return self.body(*args, **kwargs)
        return self._run(self.body, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self.body,)


_gates: list[tuple[CellType, GatedBody]] = []


def gate(optimizer: Optimizer, wrapper: FrameType, run: Run) -> bool:
    """Gate the body of a step that has begun, and of later ones. Returns False if that is not possible.

    Args:
        optimizer: The optimizer.
        wrapper: Frame of PyTorch's wrapper of ``step``, before it calls the body.
        run: Called instead of the body.
    """
    if isinstance(internals.step_body(wrapper), GatedBody):
        return True
    cell = internals.step_body_cell(optimizer, wrapper)
    if cell is None:
        return False
    gated = GatedBody(cell.cell_contents, run)
    _gates.append((cell, gated))
    cell.cell_contents = gated
    return True


def remove_gates() -> None:
    """Remove all gates."""
    while _gates:
        cell, gated = _gates.pop()
        if cell.cell_contents is gated:
            cell.cell_contents = gated.body
