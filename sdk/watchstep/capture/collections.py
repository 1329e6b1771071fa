"""Collections: which tensors belong together, and how often they are measured."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from watchstep import tensors
from watchstep.capture.cadence import ADAPTIVE, Cadence
from watchstep.errors import ConfigError
from watchstep.tensors import MODES, Mode, TensorInfo

BUILT_IN = (
    tensors.WEIGHTS,
    tensors.BIASES,
    tensors.GRADIENTS,
    tensors.ACTIVATIONS,
    tensors.OPTIMIZER_STATE,
    tensors.UPDATES,
    tensors.LOSSES,
    tensors.METRICS,
    tensors.INPUTS,
    tensors.OUTPUTS,
    tensors.LABELS,
    tensors.CUSTOM,
    tensors.CHECKSUMS,
    tensors.BUFFERS,
    tensors.UNHELD,
    tensors.CONFUSION,
)
"""Collections whose tensors are known without selectors; selectors make them smaller."""

ROLES = (
    "weight",
    "bias",
    "gradient",
    "output",
    "input",
    "update",
    "momentum",
    "second_moment",
    "state",
    "checksum",
    "buffer",
    "unheld",
)
"""Roles of what can be selected."""

STATE_ROLES = frozenset({"momentum", "second_moment", "state"})
_ASKED_FOR = STATE_ROLES | {"input", "buffer", "unheld"}


@dataclass(frozen=True)
class Collection:
    """A named group of tensors. A tensor is measured when one of its collections is due.

    Of a built-in collection, selectors keep those of its tensors that meet all of them. A collection of any other name
    is the user's own, and takes from everything that can be recorded what meets all its selectors; inputs of modules,
    the optimizer's state, buffers and what no optimizer holds only where ``roles`` names them. Without selectors it holds
    what the program gives it by ``hook.record(collection=…)``.

    Attributes:
        cadence: how often it is measured.
        modes: another cadence in a mode; None for not in that mode.
        include: only names that this regular expression matches from the start.
        exclude: not names that this regular expression matches from the start.
        modules: only tensors of modules at these paths, or below them.
        module_types: only tensors of modules of these classes, by name, or of classes derived from them.
        roles: only tensors of these roles: weight, bias, gradient, output, input, update, ….
    """

    cadence: Cadence = ADAPTIVE
    modes: Mapping[Mode, Cadence | None] = field(default_factory=dict)
    include: str | None = None
    exclude: str | None = None
    modules: tuple[str, ...] = ()
    module_types: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, words in (
            ("modules", self.modules),
            ("module_types", self.module_types),
            ("roles", self.roles),
        ):
            if isinstance(words, str):
                raise ConfigError(f"collection: {name}={words!r}", f"give a tuple: {name}=({words!r},)")
        if unknown := set(self.roles) - set(ROLES):
            raise ConfigError(f"collection: roles {sorted(unknown)}", f"use some of {', '.join(ROLES)}")
        for pattern in (self.include, self.exclude):
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ConfigError(
                    f"collection: {pattern!r} is no regular expression ({error})", "see the re module"
                ) from error
        for mode in self.modes:
            if mode not in MODES:
                raise ConfigError(f"collection: mode {mode!r}", f"use one of {', '.join(MODES)}")

    @property
    def selects(self) -> bool:
        """Whether it has any selector."""
        return bool(self.include or self.exclude or self.modules or self.module_types or self.roles)

    def holds(self, info: TensorInfo, bases: Iterable[str] = ()) -> bool:
        """Whether a tensor meets every selector.

        Args:
            info: the tensor.
            bases: names of the classes that its module's class derives from, its own included.
        """
        return (
            (self.include is None or re.match(self.include, info.name) is not None)
            and (self.exclude is None or re.match(self.exclude, info.name) is None)
            and (not self.roles or info.role in self.roles)
            and (not self.modules or any(_lies_in(info.module, path) for path in self.modules))
            and (not self.module_types or not {info.module_type, *bases}.isdisjoint(self.module_types))
        )

    def in_mode(self, mode: Mode) -> Cadence | None:
        """The cadence in a mode; None where it is not measured in it."""
        return self.modes.get(mode, self.cadence)

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form; what was left at its default is left out."""
        default = Collection()
        held = {name: value for name, value in asdict(self).items() if value != getattr(default, name)}
        return {**held, "cadence": asdict(self.cadence)}


def _lies_in(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def checked(collections: Mapping[str, Cadence | Collection]) -> dict[str, Collection]:
    """Collections by name, a bare cadence made a collection of it.

    Raises:
        ConfigError: one is no collection, or of a name that is nearly a built-in one's.
    """
    held = {}
    for name, given in collections.items():
        collection = Collection(given) if isinstance(given, Cadence) else given
        if not isinstance(collection, Collection):
            raise ConfigError(f"collections[{name!r}]={given!r}", "give a Cadence or a Collection")
        meant = difflib.get_close_matches(name, BUILT_IN, 1, 0.85)
        if meant and name not in BUILT_IN and not collection.selects:
            raise ConfigError(f"collection {name!r} is not built in and selects nothing", f"use {meant[0]!r}")
        held[name] = collection
    return held


def placed(
    info: TensorInfo, built_in: tuple[str, ...], collections: Mapping[str, Collection], bases: Iterable[str]
) -> TensorInfo:
    """The tensor with the configured collections that it belongs to, sorted; with none it is never recorded.

    Args:
        info: the tensor; what it says of collections is replaced.
        built_in: the built-in collections whose tensor it is.
        collections: as configured.
        bases: names of the classes that its module's class derives from.
    """
    bases = tuple(bases)
    held = sorted(
        name
        for name, collection in collections.items()
        if collection.holds(info, bases) and (name in built_in or _may_take(name, collection, info.role))
    )
    return replace(info, collections=tuple(held))


def _may_take(name: str, collection: Collection, role: str) -> bool:
    return (
        name not in BUILT_IN and collection.selects and (role not in _ASKED_FOR or role in collection.roles)
    )
