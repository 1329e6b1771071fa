"""A map from optimizers to what is known about them, which does not keep them alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, overload

from torch.optim import Optimizer

_Value = TypeVar("_Value")
_Default = TypeVar("_Default")


class OptimizerMap(Generic[_Value]):
    """Values by optimizer, compared by identity. An entry is removed when its optimizer is deleted.

    Every step looks up an optimizer some ten times. `torch.utils.weak.WeakIdKeyDictionary`, which is also safe for tensors, takes ten times as
    long for each.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Optimizer], _Value]] = {}

    @overload
    def get(self, optimizer: Optimizer) -> _Value | None: ...
    @overload
    def get(self, optimizer: Optimizer, default: _Default) -> _Value | _Default: ...
    def get(self, optimizer: Optimizer, default: object = None) -> object:
        """Return the value of an optimizer, or the default."""
        entry = self._entries.get(id(optimizer))
        return default if entry is None or entry[0]() is not optimizer else entry[1]

    @overload
    def pop(self, optimizer: Optimizer) -> _Value | None: ...
    @overload
    def pop(self, optimizer: Optimizer, default: _Default) -> _Value | _Default: ...
    def pop(self, optimizer: Optimizer, default: object = None) -> object:
        """Remove an optimizer. Returns its value, or the default."""
        entry = self._entries.pop(id(optimizer), None)
        return default if entry is None or entry[0]() is not optimizer else entry[1]

    def __getitem__(self, optimizer: Optimizer) -> _Value:
        entry = self._entries[id(optimizer)]
        if entry[0]() is not optimizer:
            raise KeyError(optimizer)
        return entry[1]

    def __setitem__(self, optimizer: Optimizer, value: _Value) -> None:
        key = id(optimizer)
        entry = self._entries.get(key)
        if entry is not None and entry[0]() is optimizer:
            self._entries[key] = entry[0], value
        else:
            self._entries[key] = weakref.ref(optimizer, _removal(key, self._entries)), value

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter([optimizer for optimizer, _ in self.items()])

    def items(self) -> list[tuple[Optimizer, _Value]]:
        """Return the existing optimizers and their values."""
        entries = list(self._entries.values())  # a copy, because another thread may change them
        return [(optimizer, value) for reference, value in entries if (optimizer := reference()) is not None]

    def values(self) -> list[_Value]:
        """Return the values of the existing optimizers."""
        return [value for _, value in self.items()]


def _removal(
    key: int, entries: dict[int, tuple[weakref.ref[Optimizer], _Value]]
) -> Callable[[weakref.ref[Optimizer]], None]:
    """Return a callback that removes an entry, unless a new optimizer with the same id has replaced it."""

    def remove(reference: weakref.ref[Optimizer]) -> None:
        entry = entries.get(key)
        if entry is not None and entry[0] is reference:
            entries.pop(key, None)

    return remove
