"""Names, roles and collections of values that a program records itself, and the steps that they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from watchstep.capture.config import placed
from watchstep.capture.steps.record import Group
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.format.tensors import MODES, Mode, TensorInfo

COLLECTIONS = {
    "weight": tensors.WEIGHTS,
    "bias": tensors.BIASES,
    "gradient": tensors.GRADIENTS,
    "momentum": tensors.OPTIMIZER_STATE,
    "second_moment": tensors.OPTIMIZER_STATE,
    "state": tensors.OPTIMIZER_STATE,
    "output": tensors.OUTPUTS,
    "input": tensors.INPUTS,
    "label": tensors.LABELS,
    "loss": tensors.LOSSES,
    "custom": tensors.CUSTOM,
}
"""The roles that a program can give to its values, and the built-in collection of each."""

_BY_NAME = {tensors.INPUTS: "input", tensors.OUTPUTS: "output", tensors.LABELS: "label"}
"""Roles of values with these names, or in these collections."""

_MAX_NAMES = 10_000


@dataclass(frozen=True)
class Given:
    """One value of the program, with checked arguments.

    Attributes:
        name: name of the tensor.
        role: as in `TensorInfo.role`.
        collections: names of its collections, sorted; empty if the selectors of each leave it out.
        mode: mode of the row.
    """

    name: str
    role: str
    collections: tuple[str, ...]
    mode: Mode


class DueCollections(NamedTuple):
    """What is due of a value: the collection whose statistics are measured, and the one whose full tensors are saved; None for neither."""

    measured: str | None
    saved: str | None


class GivenNames:
    """Checks the arguments of `hook.record`, and describes the tensors. Used on the training thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last_steps: dict[str, int] = {}
        self._groups: dict[str, Group] = {}
        self._collections: dict[tuple[str, str | None, str | None], tuple[str, tuple[str, ...]]] = {}

    def check(self, name: Any, collection: str | None, role: str | None, mode: Mode) -> Given:
        """Check the arguments of a value, and begin the step that it belongs to.

        Args:
            name: name of the tensor.
            collection: name of its collection; None derives it from the role, or else from the name.
            role: its role; None derives it from the name and the collection.
            mode: mode of the row.

        Raises:
            ValueError: the mode, the role or the collection is unknown, or the name was recorded with another role.
            TypeError: the name is not a string.
        """
        if mode not in MODES:
            raise ValueError(f"mode {mode!r}: use one of {', '.join(MODES)}")
        if not isinstance(name, str) or not name:
            raise TypeError("a name must be a string")
        name.encode()
        if role is not None and role not in COLLECTIONS:
            raise ValueError(f"role {role!r}: use one of {', '.join(COLLECTIONS)}")
        if collection is not None and collection not in self._session.config.collections:
            raise ValueError(f"collection {collection!r}: name it in CaptureConfig.collections")
        key = (name, role, collection)
        found = self._collections.get(key)
        if found is None:
            found = self._placed(*key)
        given = Given(name, *found, mode)
        group = self._groups.get(name)
        if group is not None and group.tensors[0].role != given.role:
            raise ValueError(
                f"role {given.role!r}: this name was recorded with the role {group.tensors[0].role!r}; "
                f"use another name, such as '{name[:40]}:{given.role}'"
            )
        if mode == "train":
            self._begin_if_repeated(name)
        return given

    def _placed(self, name: str, role: str | None, collection: str | None) -> tuple[str, tuple[str, ...]]:
        """Return the role of a value, and its collections: its own, and those of the user with selectors that match."""
        chosen_role, own = _role_and_collection(name, role, collection)
        info = placed(TensorInfo(name, (), chosen_role), (own,), self._session.config.chosen, ())
        if len(self._collections) >= _MAX_NAMES:
            self._collections.clear()
        placement = self._collections[name, role, collection] = (chosen_role, info.collections)
        return placement

    def due(self, given: Given) -> DueCollections:
        """Return what is due of a value at the current step."""
        session = self._session
        step = session.recorder.step
        return DueCollections(
            session.schedule.due(given.collections, step, given.mode),
            session.full_tensors.due(given.collections, step, given.mode),
        )

    def group(self, given: Given, shape: tuple[int, ...], dtype: str) -> Group:
        """Return the description of a value. A changed dtype is counted and named in health; shapes may change, as the last batch does."""
        before = self._groups.get(given.name)
        info = before.tensors[0] if before is not None else None
        if (
            before is not None
            and info is not None
            and (info.shape, info.dtype, info.collections) == (shape, dtype, given.collections)
        ):
            return before
        if info is not None and info.dtype != dtype:
            self._session.health.count("changed_dtypes")
            self._session.health.note(
                "dtypes",
                f"{given.name[:80]!r} changed from {info.dtype} to {dtype} at step {self._session.recorder.step}",
            )
        described = TensorInfo(
            name=given.name, collections=given.collections, role=given.role, shape=shape, dtype=dtype
        )
        group = Group.of((described,))
        if len(self._groups) < _MAX_NAMES or before is not None:
            self._groups[given.name] = group
        return group

    def _begin_if_repeated(self, name: str) -> None:
        """Begin the next step if a name is repeated after the update that ended its step: the next forward pass has not begun yet."""
        recorder = self._session.recorder
        if recorder.finished and self._last_steps.get(name) == recorder.step:
            recorder.begin()
        if len(self._last_steps) >= _MAX_NAMES:
            self._last_steps.clear()
        self._last_steps[name] = recorder.step


def _role_and_collection(name: str, role: str | None, collection: str | None) -> tuple[str, str]:
    if role is not None:
        return role, collection or COLLECTIONS[role]
    of_name = _BY_NAME.get(name)
    chosen = collection or (name if of_name else tensors.CUSTOM)
    return of_name or _BY_NAME.get(chosen, "custom"), chosen
