"""Names of a framework that are private, or that another version of it may lack, and recordings that cannot be made.

Each framework has one table of such names, in one module. A name that is missing costs what is stated with it, which health notes: never the training.
What cannot be determined without it is not recorded.
"""

from __future__ import annotations

import importlib
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from watchstep.capture.health import RecorderHealth
from watchstep.errors import ConfigError
from watchstep.stopping import StopTraining

_log = logging.getLogger("watchstep")
_OBJECT = "*"
_ABSENT: Any = object()


@dataclass(frozen=True)
class FrameworkName:
    """A name of a framework.

    Attributes:
        cost: what is not recorded without it, in plain words: "updates inside of scans".
        paths: where it may be, the first one that exists counts: ``module``, ``module:attribute.attribute``, or ``package:*.attribute`` for an
            attribute of objects.
    """

    cost: str
    paths: tuple[str, ...]

    @classmethod
    def at(cls, cost: str, *paths: str) -> FrameworkName:
        """Return a name by its paths."""
        return cls(cost, paths)

    @property
    def package(self) -> str:
        """The package that it belongs to."""
        return self.paths[0].partition(":")[0].partition(".")[0]

    @property
    def is_of_objects(self) -> bool:
        """Whether it is an attribute of objects."""
        return self.paths[0].partition(":")[2].startswith(f"{_OBJECT}.")


class FrameworkNames:
    """The table of one framework. Thread-safe; no method raises, except `require`."""

    def __init__(self, framework: str, table: Mapping[str, FrameworkName]) -> None:
        """Look nothing up yet.

        Args:
            framework: name of the framework, as users know it.
            table: the names by a key.
        """
        self.framework = framework
        self.table = dict(table)
        self._values: dict[str, Any] = {}
        self._costs: dict[str, str] = {}
        self._listeners: weakref.WeakSet[RecorderHealth] = weakref.WeakSet()

    def report_to(self, health: RecorderHealth | None) -> None:
        """Note in a recording's health, if there is one, what is not recorded because a name is missing, also what turns out later."""
        if health is None:
            return
        self._listeners.add(health)
        for cost, reason in list(self._costs.items()):
            self._note(health, cost, reason)

    def find(self, key: str) -> Any:
        """Return the object of a name; None if it is missing, which health notes. It is looked up once."""
        value = self._values.get(key, _ABSENT)
        if value is _ABSENT:
            value = self._values[key] = self._imported(self.table[key])
            if value is None:
                self.lacks(key)
        return value

    def has(self, *keys: str) -> bool:
        """Return whether all of some names exist. Health notes those that are missing."""
        missing = [key for key in keys if self.find(key) is None]
        return not missing

    def require(self, key: str) -> Any:
        """Return the object of a name, for a tool that is of no use without it.

        Raises:
            ConfigError: it is missing.
        """
        value = self.find(key)
        if value is None:
            raise ConfigError(
                f"{self.table[key].cost} with this version of {self.framework}", self._reason(key)
            )
        return value

    def of(self, owner: Any, key: str, default: Any = None) -> Any:
        """Return an attribute of an object; ``default`` if it is missing, which health notes.

        Args:
            owner: the object.
            key: key of a name of objects.
            default: returned instead of a missing one.
        """
        for path in self.table[key].paths:
            value = owner
            for attribute in path.partition(f":{_OBJECT}.")[2].split("."):
                value = getattr(value, attribute, _ABSENT)
            if value is not _ABSENT:
                return value
        self.lacks(key)
        return default

    def modules_of(self, *keys: str) -> list[str]:
        """Return the modules of those of some names that exist."""
        return [self.table[key].paths[0].partition(":")[0] for key in keys if self.find(key) is not None]

    def have(self, owner: Any, *keys: str) -> bool:
        """Return whether an object has all of some attributes. Health notes those that are missing."""
        missing = [key for key in keys if self.of(owner, key, _ABSENT) is _ABSENT]
        return not missing

    def attribute(self, key: str) -> str:
        """Return the name of an attribute."""
        return self.table[key].paths[0].rpartition(".")[2].rpartition(":")[2]

    def put(self, owner: Any, key: str, value: Any) -> None:
        """Set an attribute of an object that has it."""
        *inner, last = self.table[key].paths[0].partition(f":{_OBJECT}.")[2].split(".")
        for attribute in inner:
            owner = getattr(owner, attribute)
        setattr(owner, last, value)

    def lacks(self, key: str, reason: str = "") -> None:
        """Note that a name is missing, or is not what it was. It is also logged, once.

        Args:
            key: its key.
            reason: why it is of no use; by default that it is missing.
        """
        cost = self.table[key].cost
        if cost in self._costs:
            return
        reason = self._costs[cost] = reason or self._reason(key)
        _log.warning("watchstep: %s: %s: unavailable: %s. Training continues.", self.framework, cost, reason)
        for health in tuple(self._listeners):
            self._note(health, cost, reason)

    def _note(self, health: RecorderHealth, cost: str, reason: str) -> None:
        health.note(f"{self.framework}: {cost}", f"unavailable: {reason}")

    def _reason(self, key: str) -> str:
        name = self.table[key]
        version = getattr(sys.modules.get(name.package), "__version__", "")
        place, _, attributes = name.paths[0].partition(":")
        path = f"{place}.{attributes}".rstrip(".")
        if name.is_of_objects:
            path = f"attribute {attributes.removeprefix(f'{_OBJECT}.')}"
        return f"{name.package} {version} has no {path}; use a version that the documentation lists"

    def _imported(self, name: FrameworkName) -> Any:
        for path in name.paths:
            module, _, attributes = path.partition(":")
            try:
                value = importlib.import_module(module)
                for attribute in attributes.split(".") if attributes else ():
                    value = getattr(value, attribute)
            except Exception:  # noqa: BLE001, S112 - a module that cannot be imported is missing
                continue
            return value
        return None


def health_of(hook: Any) -> RecorderHealth | None:
    """Return the health of a hook; None for a copy of it in another process, which records nothing."""
    health: RecorderHealth | None = getattr(hook, "_health", None)
    return health


@contextmanager
def contained(hook: Any, framework: str) -> Iterator[None]:
    """Contain what setting up a recording raises: the training goes on without it, and health counts the fault.

    Raises:
        ConfigError: an argument of the program's is invalid.
        StopTraining: a stop is due and the program opted in.
    """
    try:
        yield
    except (ConfigError, StopTraining):
        raise
    except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
        health = health_of(hook)
        if health is not None:
            health.fault(f"{framework} is not recorded", error)


def unrecorded(framework: str, error: Exception, base: type = object) -> Any:
    """Return a class that takes the place of a recording whose module cannot be imported: it records nothing, and health counts the error.

    Args:
        framework: name of the framework.
        error: what the import has raised.
        base: class of callbacks of the framework.
    """
    _log.error("watchstep: %s is not recorded: %s: %s", framework, type(error).__name__, error)

    class Recording(base):  # type: ignore[misc]
        """Records nothing."""

        def __init__(self, hook: Any = None, *_: Any, **__: Any) -> None:
            super().__init__()
            if hook is not None:
                with contained(hook, framework):
                    raise error

        def __call__(self, *_: Any, **__: Any) -> None:
            """Do nothing, as a callback of LightGBM."""

    if base is object:  # LightGBM reads these of a callback
        Recording.order, Recording.before_iteration = 25, False
    return Recording
