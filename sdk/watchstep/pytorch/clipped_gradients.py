"""What is measured when gradients are clipped, held until it is known whether their step is made.

A gradient scaler leaves a step out after the program has clipped: what was measured then is no part of the record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from watchstep import tensors
from watchstep.capture.record import Condition
from watchstep.capture.session import Session
from watchstep.kernels.interface import Measurement
from watchstep.pytorch.kernel import TorchKernel
from watchstep.pytorch.parameters import MeasuredGradients, Parameters

NORM = "gradient_norm"
_MOST_NORMS = 16


@dataclass(frozen=True)
class _Clip:
    """One call of a clipping function.

    Attributes:
        backward: how many backward passes there had been: after another one, the gradients are others.
        ids: of the parameters, those that were measured.
    """

    backward: int
    ids: frozenset[int]
    measured: tuple[MeasuredGradients, ...]


@dataclass(frozen=True)
class _Norm:
    """The norm that a call of a clipping function found, with the ids of its parameters."""

    backward: int
    ids: frozenset[int]
    value: float | Measurement


class ClippedGradients:
    """Of one model: gradients as they were before clipping, where they are asked for, and their norms."""

    def __init__(self, session: Session, parameters: Parameters) -> None:
        self._session = session
        self._recorder = session.recorder
        self._parameters = parameters
        self._before_clipping = session.config.gradients == "before_clipping"
        self._backward = 0
        self._clips: list[_Clip] = []
        self._norms: list[_Norm] = []
        self._numbered = (-1, 0)

    def after_backward(self) -> None:
        """Another backward pass: the gradients are no longer those that were clipped."""
        self._backward += 1

    def clipping(self, clipped: Sequence[Tensor]) -> None:
        """Measure the gradients of those parameters that were not clipped before since the backward pass."""
        if not self._before_clipping or self._nothing_under_way:
            return
        ids = self._parameters.watched(clipped)
        self._clips = [held for held in self._clips if held.backward == self._backward or not held.ids & ids]
        ids = ids.difference(*(held.ids for held in self._clips))
        if ids:
            chosen = {id(parameter): parameter for parameter in clipped if id(parameter) in ids}
            found = self._parameters.gradients_of(list(chosen.values()), self._recorder.step)
            self._clips.append(_Clip(self._backward, ids, tuple(found)))

    def clipped(self, clipped: Sequence[Tensor], norm: Tensor) -> None:
        """Keep the norm of all gradients of a call."""
        if norm.numel() != 1 or self._nothing_under_way:
            return
        if hasattr(norm, "to_local"):
            self._session.health.note(
                "gradient_norm",
                "not recorded of sharded gradients: workers would have to wait for each other",
            )
            return
        if not self._session.schedule.due((tensors.METRICS,), self._recorder.step):
            return
        ids = self._parameters.watched(clipped)
        self._norms = [held for held in self._norms if held.backward == self._backward or not held.ids & ids]
        if ids and len(self._norms) < _MOST_NORMS:
            on_host = norm.device.type == "cpu"
            value = norm.detach().item() if on_host else TorchKernel().measure([norm])
            self._norms.append(_Norm(self._backward, ids, value))

    def release(self, updated: Iterable[int], condition: Condition | None) -> frozenset[int]:
        """Their optimizer steps: record what is held of its parameters.

        Args:
            updated: the ids of its parameters.
            condition: whether the step is made, where that is not known yet.

        Returns:
            The ids of the parameters whose gradients have been measured.
        """
        ids = frozenset(updated) if self._clips or self._norms else frozenset()
        for norm in self._norms:
            if norm.ids & ids:
                self._record_norm(norm, condition)
        measured: set[int] = set()
        for clip in self._clips:
            if clip.ids & ids:
                measured |= clip.ids
                for found in clip.measured:
                    self._recorder.add(
                        found.group, found.measurement, probes=found.probes, condition=condition
                    )
        self._forget(ids)
        return frozenset(measured)

    def drop(self, updated: Collection[int]) -> None:
        """The step of these parameters is left out."""
        self._forget(frozenset(updated))

    def _forget(self, ids: frozenset[int]) -> None:
        self._clips = [clip for clip in self._clips if not clip.ids & ids]
        self._norms = [norm for norm in self._norms if not norm.ids & ids]

    def _record_norm(self, norm: _Norm, condition: Condition | None) -> None:
        """The first of a step as ``gradient_norm``, the next as ``gradient_norm_2``."""
        step, number = self._numbered
        number = number + 1 if step == self._recorder.step else 1
        self._numbered = (self._recorder.step, number)
        name = NORM if number == 1 else f"{NORM}_{number}"
        if isinstance(norm.value, float):
            self._recorder.scalar(name, norm.value, derived=True)
        else:
            self._recorder.awaited_scalar(name, norm.value, derived=True, condition=condition)

    @property
    def _nothing_under_way(self) -> bool:
        """Whether the last step is over and nothing of the next has begun: then what is clipped is of no step."""
        return self._recorder.last_finished == self._recorder.step
