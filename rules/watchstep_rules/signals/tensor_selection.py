"""Which rows speak of tensors of a kind, asked of each catalogue once: rules ask the same of every block of a run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from watchstep.format.block import Block
from watchstep.format.tensors import TensorInfo
from watchstep_rules.signals.catalogue_cache import OfCatalogue

_flags: OfCatalogue[NDArray[np.bool_]] = OfCatalogue()


def tensors_where(
    catalogue: tuple[TensorInfo, ...], holds: Callable[..., Any], *more: Hashable
) -> NDArray[np.bool_]:
    """A flag for each tensor of a catalogue, bool of shape (tensors,); not to be changed.

    Args:
        catalogue: the tensors.
        holds: called with a tensor and ``more``; a function of a module, for what it said is remembered by it.
        more: further arguments.
    """
    return _flags.get(
        catalogue, (holds, more), lambda: np.array([bool(holds(info, *more)) for info in catalogue], np.bool_)
    )


def rows_where(block: Block, holds: Callable[..., Any], *more: Hashable) -> NDArray[np.bool_]:
    """A flag for each row of a block, bool of shape (n,): those of its tensor, as `tensors_where` gives them."""
    return tensors_where(block.catalogue, holds, *more)[block.tensor]


def has_role(info: TensorInfo, *roles: str) -> bool:
    """Whether a tensor has one of some roles."""
    return info.role in roles


def is_matrix_of(info: TensorInfo, role: str) -> bool:
    """Whether a tensor has a role, and more than one dimension."""
    return info.role == role and len(info.shape) > 1
