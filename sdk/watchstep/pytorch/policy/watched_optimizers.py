"""Which optimizers update the watched models. Independent of the state of a recording, which must not change how often a rank votes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping

from torch import nn
from torch.optim import Optimizer

from watchstep.pytorch import internals


class WatchedOptimizers:
    """The optimizers that update, or have updated, one of some models. Keeps no model alive."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        self._updating: MutableMapping[Optimizer, bool] = internals.weak_id_dictionary.value()

    def add(self, model: nn.Module, gone: Callable[[], None]) -> None:
        """Add a model. ``gone`` is called when no model exists any more."""

        def forget(reference: weakref.ref[nn.Module]) -> None:
            self._models.remove(reference)
            if not self._models:
                gone()

        self._models.append(weakref.ref(model, forget))

    def include(self, optimizer: Optimizer) -> None:
        """Add an optimizer, whatever its parameters are."""
        self._updating[optimizer] = True

    def __contains__(self, optimizer: Optimizer) -> bool:
        if optimizer in self._updating:
            return True
        models = [model for reference in self._models if (model := reference()) is not None]
        ids = {id(parameter) for model in models for parameter in model.parameters()}
        if not any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"]):
            return False
        self._updating[optimizer] = True
        return True
