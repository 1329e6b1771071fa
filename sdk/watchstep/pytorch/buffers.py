"""Running statistics of normalisation layers, and the training state of these layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from watchstep.capture.steps.record import Group
from watchstep.capture.steps.session import Session
from watchstep.format.statistics import Floats
from watchstep.format.tensors import Placement, TensorInfo
from watchstep.kernels.measurement import Kernel
from watchstep.pytorch import internals
from watchstep.pytorch.names import Names, placement_of
from watchstep.pytorch.observable import own_tensor
from watchstep.pytorch.parameters.parameters import Parameters
from watchstep.pytorch.probes.staging import HostCopy, stacked
from watchstep.pytorch.tensors import full_tensors

_RUNNING = ("running_mean", "running_var")
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class _Buffer:
    """One running statistic of a layer."""

    module: Any
    leaf: str
    info: TensorInfo
    place: Placement

    @property
    def values(self) -> Tensor:
        """Current values."""
        values = own_tensor(self.module, self.leaf)
        assert values is not None
        return values

    def learns(self, optimized: frozenset[int]) -> bool:
        """Return whether the layer's scale is in an optimizer and has a gradient."""
        scale = own_tensor(self.module, "weight")
        return (
            isinstance(scale, Tensor)
            and scale.requires_grad
            and scale.grad is not None
            and id(scale) in optimized
        )


@dataclass(frozen=True)
class _States:
    """One value per buffer, which describes its layer.

    Columns: ``training``: whether the layer is in training mode. ``model_training``: whether the model is in training mode.
    ``learns``: whether an optimizer updates the layer's scale, and the scale has a gradient. ``batches_tracked``: number of
    batches in its running statistics; NaN if the layer does not count them. ``affine_square``: ``mean(scale²) + mean(shift²)``
    of a layer in evaluation mode, also if these are frozen and have no rows of their own; NaN in training mode.
    """

    training: Floats
    model_training: Floats
    learns: Floats
    counted: list[int]
    batches: HostCopy | None
    affine: list[int]
    squares: HostCopy | None

    def collect(self) -> dict[str, Floats]:
        numbers = [] if self.batches is None else self.batches.numbers().tolist()
        squares = [] if self.squares is None else self.squares.numbers().tolist()
        # Index -1 means no value, and selects the NaN at the end.
        batches = np.array([*numbers, np.nan])[self.counted]
        affine_square = np.array([*squares, np.nan])[self.affine]
        return {
            "training": self.training,
            "model_training": self.model_training,
            "learns": self.learns,
            "batches_tracked": batches,
            "affine_square": affine_square,
        }


class Buffers:
    """Measures the running statistics of one model's layers when their collection is due."""

    def __init__(self, session: Session, names: Names, parameters: Parameters, kernel: Kernel) -> None:
        self._recorder = session.recorder
        self._capture = session.full_tensors
        self._schedule = session.schedule
        self._model = names.model
        self._names = names
        self._kernel = kernel
        self._parameters = parameters
        self._measured = -1
        self.list_layers()

    def list_layers(self) -> None:
        """Find the running statistics of the layers that the model has now."""
        names = self._names
        self._groups: dict[tuple[str, ...], Group] = {}
        self._by_collections: dict[tuple[str, ...], list[_Buffer]] = {}
        for order, (path, module) in enumerate(names.model.named_modules()):
            if not isinstance(module, internals.norm_base.value):
                continue
            for leaf in _RUNNING:
                values = own_tensor(module, leaf)
                if isinstance(values, Tensor) and placement_of(values, names.whole).records:
                    info = names.buffer(path, leaf, module, order)
                    place = placement_of(values, names.whole).weight
                    self._by_collections.setdefault(info.collections, []).append(
                        _Buffer(module, leaf, info, place)
                    )
        self._by_collections.pop((), None)
        for collections, buffers in self._by_collections.items():
            self._groups[collections] = Group(
                tuple(buffer.info for buffer in buffers), tuple(buffer.place for buffer in buffers)
            )

    def measure(self, step: int) -> None:
        """Record the collections that are due, once per step.

        Args:
            step: Step of the run to which the current gradients belong.
        """
        if step == self._measured:
            return
        self._measured = step
        for collections, buffers in self._by_collections.items():
            charged = self._schedule.due(collections, step)
            if charged is not None:
                since = self._schedule.now()
                measured = self._kernel.measure([buffer.values for buffer in buffers])
                self._recorder.add(self._groups[collections], measured, probes=(self._states(buffers),))
                self._schedule.spent(charged, since)

    def save(self, step: int) -> None:
        """Save the full buffers of the collections that are due.

        Args:
            step: Step of the run.
        """
        for collections, buffers in self._by_collections.items():
            values = [(buffer.info, buffer.values) for buffer in buffers]
            full_tensors.save(self._capture, collections, step, "train", values)

    def _states(self, buffers: list[_Buffer]) -> _States:
        optimized = self._parameters.optimized()
        layers = {id(buffer.module): buffer.module for buffer in buffers}
        counts = {key: layer.num_batches_tracked for key, layer in layers.items()}
        numbers = {key: count.reshape(()) for key, count in counts.items() if isinstance(count, Tensor)}
        place = {key: number for number, key in enumerate(numbers)}
        squares = {key: _affine_square(layer) for key, layer in layers.items() if not layer.training}
        square_index = {key: number for number, key in enumerate(squares)}
        return _States(
            training=np.array([float(buffer.module.training) for buffer in buffers]),
            model_training=np.full(len(buffers), float(self._model.training)),
            learns=np.array([float(buffer.learns(optimized)) for buffer in buffers]),
            counted=[place.get(id(buffer.module), -1) for buffer in buffers],
            batches=HostCopy(stacked(list(numbers.values()))) if numbers else None,
            affine=[square_index.get(id(buffer.module), -1) for buffer in buffers],
            squares=HostCopy(stacked(list(squares.values()))) if squares else None,
        )


@torch.no_grad()
def _affine_square(layer: Any) -> Tensor:
    """Return ``mean(scale²) + mean(shift²)``, float32 of shape (): the mean square of a layer's output if its statistics fit the data.

    NaN if the scale or shift is a shard, or is computed by a parametrization.
    """
    statistic = next(
        values for values in (layer.running_var, layer.running_mean) if isinstance(values, Tensor)
    )
    total = torch.zeros((), device=statistic.device)
    for name, default in (("weight", 1.0), ("bias", 0.0)):
        parameter = own_tensor(layer, name)
        if parameter is None and name in internals.parameters_of(layer):
            total = total + default
        elif parameter is not None and type(parameter) in _PLAIN:
            total = total + parameter.float().square().mean()
        else:
            total = total + float("nan")
    return total
