"""The module tree of a model, as far as the paths of its recorded tensors name it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from watchstep.format.tensors import TensorInfo

_MAX_DEPTH = 32
"""Deeper parts of a path are one module, because paths are hostile input: each of their parts becomes a module."""


@dataclass
class Module:
    """A module.

    Attributes:
        path: path from the model, e.g. ``model.blocks.0.mlp``.
        name: last part of the path.
        parent: index of the parent in the list of modules; None for an outermost module.
        depth: number of modules around it.
        module_type: its class; empty if it has no tensor itself.
        rows: places of its own tensors.
        first_row: first place of a tensor of it, or of a module in it.
        end_row: place after the last one.
    """

    path: str
    name: str
    parent: int | None
    depth: int
    module_type: str = ""
    rows: list[int] = field(default_factory=list)
    first_row: int = 0
    end_row: int = 0


def module_tree(infos: Sequence[TensorInfo]) -> list[Module]:
    """Return the modules of tensors, each before the modules in it, otherwise in the order of their first tensors.

    Tensors without a module, such as losses, are in none.
    """
    modules: dict[tuple[str, ...], Module] = {}
    children: dict[tuple[str, ...], list[tuple[str, ...]]] = {(): []}
    for row, info in enumerate(infos):
        if not info.module:
            continue
        parts = tuple(info.module.split(".", _MAX_DEPTH - 1))
        for depth in range(len(parts)):
            key = parts[: depth + 1]
            if key not in modules:
                modules[key] = Module(".".join(key), key[-1], None, depth, first_row=row)
                children[key] = []
                children[key[:-1]].append(key)
            modules[key].end_row = row + 1
        modules[parts].module_type = info.module_type
        modules[parts].rows.append(row)
    ordered: list[Module] = []
    waiting: list[tuple[tuple[str, ...], int | None]] = [(key, None) for key in reversed(children[()])]
    while waiting:
        key, parent = waiting.pop()
        modules[key].parent = parent
        waiting += [(child, len(ordered)) for child in reversed(children[key])]
        ordered.append(modules[key])
    return ordered
