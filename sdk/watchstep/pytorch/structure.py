"""Which modules a model has. A program may replace some between two steps, add some, or remove them."""

from __future__ import annotations

from torch import nn

from watchstep.pytorch import internals

_GROWING = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Structure:
    """The modules of one model at the last look."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._look()

    def _look(self) -> None:
        self._children = [
            (module, list(children.values()))
            for module in internals.modules_of(self._model).values()
            if (children := internals.children_of(module)) or isinstance(module, _GROWING)
        ]

    def has_changed(self) -> bool:
        """Return whether the model has other modules than at the last look, and look anew."""
        for module, children in self._children:
            if list(internals.children_of(module).values()) != children:
                self._look()
                return True
        return False
