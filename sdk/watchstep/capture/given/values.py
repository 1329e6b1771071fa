"""Recording the values of one call of `hook.record`: PyTorch tensors on their device, everything else as NumPy arrays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from watchstep.capture.given.arrays import GivenArrays
from watchstep.capture.given.names import Given, GivenNames
from watchstep.capture.steps.session import Session
from watchstep.format.tensors import Mode


class TensorRecorder(Protocol):
    """Records tensors of PyTorch."""

    def record(self, given: Given, value: Any) -> None:
        """Record one tensor if its collection is due."""
        ...


class GivenValues:
    """Records the values that the program passes, into one session."""

    def __init__(
        self, session: Session, make_tensor_recorder: Callable[[Session, GivenNames], TensorRecorder]
    ) -> None:
        """Start without values.

        Args:
            session: the recording.
            make_tensor_recorder: called at the first PyTorch tensor, so that programs without PyTorch never load it.
        """
        self._session = session
        self._make_tensor_recorder = make_tensor_recorder
        self._names = GivenNames(session)
        self._arrays = GivenArrays(session, self._names)
        self._tensors: TensorRecorder | None = None

    def record_all(
        self, values: Mapping[str, Any], collection: str | None, role: str | None, mode: Mode
    ) -> None:
        """Record values by name. An invalid value does not affect the others."""
        for name, value in values.items():
            try:
                given = self._names.check(name, collection, role, mode)
                self._recorder_of(value).record(given, value)
            except Exception as error:  # noqa: BLE001 - as above
                self._session.health.fault(f"record {name!r}"[:80], error)

    def _recorder_of(self, value: Any) -> TensorRecorder:
        if not is_torch_tensor(value):
            return self._arrays
        if self._tensors is None:
            self._tensors = self._make_tensor_recorder(self._session, self._names)
        return self._tensors


def is_torch_tensor(value: Any) -> bool:
    """Whether a value is a PyTorch tensor. Does not import PyTorch: a program that has a tensor has imported it."""
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_type is not None and isinstance(value, tensor_type)
