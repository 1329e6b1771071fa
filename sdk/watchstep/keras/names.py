"""Names, roles, modules and order of a Keras model's variables."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from watchstep.format.tensors import TensorInfo
from watchstep.keras.internals import keras_names
from watchstep.updates.parameter_names import describe_variables

_MAX_PARAMETERS = 100_000


def describe(variables: Sequence[Any], trainer: Any = None) -> tuple[TensorInfo, ...]:
    """Describe variables, without collections.

    Args:
        variables: Keras' variables, of an optimizer.
        trainer: the model that they belong to, if it is known; by default it is searched for.
    """
    chosen = list(variables)[:_MAX_PARAMETERS]
    return describe_variables(chosen, _layer_types(chosen, trainer))


def _layer_types(variables: Sequence[Any], trainer: Any) -> dict[int, str]:
    """Return the class of the layer that owns each variable, by the variable's id."""
    wanted = {id(variable) for variable in variables}
    types: dict[int, str] = {}
    for layer in _layers(trainer):
        try:
            own = keras_names.of(layer, "variables_of_layer")  # without those of its layers
            if own is None:
                return {}
            types.update({id(variable): type(layer).__name__ for variable in own if id(variable) in wanted})
        except Exception:  # noqa: BLE001, S112 - of a layer that is not complete
            continue
    return types


def _layers(trainer: Any) -> Iterable[Any]:
    flatten = None if trainer is None else keras_names.of(trainer, "layers")
    if flatten is not None:
        return list(flatten())  # the public list has only the outermost layers
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), keras.layers.Layer)]
