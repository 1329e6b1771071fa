"""Whether what runs now computes numbers that can be looked at."""

from __future__ import annotations

import torch
from torch import Tensor

_FAKE = torch._C._TorchDispatchModeKey.FAKE  # noqa: SLF001 - has no public name


def observable() -> bool:
    """Not where code is compiled, traced, exported, transformed by `torch.func`, or run on tensors that hold nothing."""
    if torch.compiler.is_compiling():
        return False
    return (
        torch._C._get_tracing_state() is None  # noqa: SLF001 - what torch.jit.is_tracing asks
        and torch._C._functorch.maybe_current_level() is None  # noqa: SLF001 - inside vmap, grad, jvp, …
        and torch._C._get_dispatch_mode(_FAKE) is None  # noqa: SLF001 - programs estimate memory with fake tensors
    )


def dense_values(tensor: Tensor) -> Tensor | None:
    """A tensor that has one shape and holds numbers: of a nested one all its values; None where there are none."""
    if tensor.is_meta:
        return None
    return tensor.values() if tensor.is_nested else tensor
