"""The state of a model that a bundle does not have, such as counters in Python attributes: saved before a computation, and set again for another."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = frozenset(
    name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set, frozenset))
)
"""Attributes of every module in which PyTorch keeps its parameters, buffers, submodules and hooks: copied without their entries."""


class ModelState:
    """The attributes of all modules of a model, and the values of chosen tensors, at the time of its creation.

    Parameters, buffers and modules are not copied: a copied attribute refers to the same ones. Values that cannot be copied, such as locks,
    and state outside of the model's modules are not restored.
    """

    def __init__(self, model: nn.Module, tensors: Iterable[Tensor]) -> None:
        """Save the state.

        Args:
            model: The model.
            tensors: Its parameters and buffers whose values are saved, too.
        """
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        modules = list(model.modules())
        shared: dict[int, Any] = {
            id(each): each for each in chain(modules, model.parameters(), model.buffers())
        }
        self._attributes = [
            (module, {name: _copied(name, value, shared) for name, value in vars(module).items()})
            for module in modules
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Set the state again. Call this once: the attributes are then the copies."""
        for module, attributes in self._attributes:
            own = vars(module)
            for name in set(own) - set(attributes):
                del own[name]
            for name, value in attributes.items():
                present = own.get(name)
                # In place, because handles of hooks refer to the container.
                if name in _CONTAINERS and isinstance(present, dict | set):
                    present.clear()
                    present.update(value)
                else:
                    own[name] = value
        for tensor, values in self._tensors:
            tensor.copy_(values)


def _copied(name: str, value: Any, shared: dict[int, Any]) -> Any:
    if name in _CONTAINERS:
        return copy.copy(value)
    try:
        return copy.deepcopy(value, shared)
    except Exception:  # noqa: BLE001 - an object of the program may not be copyable; a difference is found by comparison
        return value
