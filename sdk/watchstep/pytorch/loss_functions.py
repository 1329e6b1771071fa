"""Which function a loss was computed by, as autograd recorded it: what the loss of a guess is depends on it."""

from __future__ import annotations

import functools
import re
from typing import Any

from torch import Tensor

_MOST_NODES = 8
_KEEPS_THE_VALUE = frozenset(
    {
        "AliasBackward",
        "CloneBackward",
        "MeanBackward",
        "ReshapeAliasBackward",
        "SqueezeBackward",
        "ToCopyBackward",
        "UnsqueezeBackward",
        "ViewBackward",
    }
)
"""Operations that leave a loss as it is, or take the mean of the examples'."""
_MEAN, _SUM = 1, 2  # `torch.nn._reduction.get_enum`
_NUMBERED = re.compile(r"\d+$")


def loss_function(loss: Tensor) -> str:
    """The function that a loss is the plain value of, e.g. ``NllLoss``, ``MseLoss``, ``BinaryCrossEntropyWithLogits``.

    Args:
        loss: one element, on its graph.

    Returns:
        The name of autograd's node without ``Backward0``; empty where the loss is no longer on its graph, or is a sum, a
        product or anything else of a function's value.
    """
    node: Any = loss.grad_fn
    if node is None:
        return ""
    for _ in range(_MOST_NODES):
        name = _operation(type(node).__name__)
        if name not in _KEEPS_THE_VALUE:
            kind = name.removesuffix("Backward")
            is_plain = getattr(node, "_saved_reduction", _MEAN) != _SUM
            return kind if is_plain and ("Loss" in kind or "CrossEntropy" in kind) else ""
        node = node.next_functions[0][0]
    return ""


@functools.lru_cache(maxsize=256)
def _operation(node: str) -> str:
    """The name of a node's class without its number; cached, because it is needed at each ``backward()``."""
    return _NUMBERED.sub("", node)
