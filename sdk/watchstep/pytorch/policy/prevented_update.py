"""Preventing one update of an optimizer whose step has begun: by hiding its gradients, or by undoing what it did.

PyTorch's own optimizers leave a parameter without a gradient, its momentum and its step count as they are, and do not decay its weight. Their
gradients are hidden, which costs nothing. Other optimizers may need gradients, change parameters without one, or clear gradients themselves, and hooks
of the program on an optimizer may read gradients during its step. There the update is made, and then undone from copies of the
parameters and the optimizer's state. The copies exist during that step only.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer


class PreventedUpdate(Protocol):
    """An update that is being prevented."""

    def end(self) -> None:
        """Make everything as it was before the step, and gradients visible again."""
        ...


def prevent(optimizer: Optimizer) -> PreventedUpdate:
    """Prevent the update that an optimizer is about to make."""
    return HiddenGradients(optimizer) if tolerates_none(optimizer) else UndoneUpdate(optimizer)


def tolerates_none(optimizer: Optimizer) -> bool:
    """Return whether the step of an optimizer runs nothing but PyTorch's own code, which leaves parameters without a gradient alone."""
    return type(optimizer).__module__.startswith("torch.optim.") and not has_own_hooks(optimizer)


def has_own_hooks(optimizer: Optimizer, *, before_only: bool = False) -> bool:
    """Return whether the program has registered hooks on the steps of an optimizer."""
    names = (
        ("_optimizer_step_pre_hooks",)
        if before_only
        else ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    )
    return any(getattr(optimizer, name, None) for name in names)


class HiddenGradients:
    """Gradients that are None during a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._gradients = [
            (parameter, parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for parameter, _ in self._gradients:
            parameter.grad = None

    def end(self) -> None:
        """Make the gradients visible again."""
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient


class UndoneUpdate:
    """Copies of parameters and of the optimizer's state, from before the step."""

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [
            (parameter, parameter.detach().clone())
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self._state = {parameter: _copied(state) for parameter, state in optimizer.state.items()}
        self._groups = [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def end(self) -> None:
        """Undo the update."""
        for parameter, before in self._parameters:
            parameter.copy_(before)
        state = self._optimizer.state
        for key in list(state):
            if key not in self._state:
                del state[key]
        for key, before in self._state.items():
            state[key] = _restored(state.get(key), before)
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=False):
            for name, before in values.items():
                group[name] = _restored(group.get(name), before)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(entry) for key, entry in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_copied(entry) for entry in value)
    return copy.copy(value)


def _restored(now: Any, before: Any) -> Any:
    """Return the earlier value; in the same tensors and dictionaries, if they still exist, because others may refer to them."""
    if (
        isinstance(before, Tensor)
        and isinstance(now, Tensor)
        and now.shape == before.shape
        and now.dtype == before.dtype
    ):
        return now.copy_(before)
    if type(before) is dict and isinstance(now, dict):
        for key in list(now):
            if key not in before:
                del now[key]
        for key, entry in before.items():
            now[key] = _restored(now.get(key), entry)
        return now
    return before
