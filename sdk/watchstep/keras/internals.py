"""Names of Keras that are private, or that another version may lack: the one place where they are looked up."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from watchstep.capture.framework_names import FrameworkName, FrameworkNames

_UPDATES = "updates"
_SCALED = "updates under dynamic loss scaling"
_LOSSES = "losses of batches"
_JAX_TRAINER = "keras.src.backend.jax.trainer"
_STATE = "weights of a model whose fit is stopped, on JAX"

at = FrameworkName.at
keras_names = FrameworkNames(
    "Keras",
    {
        "apply": at(_UPDATES, "keras.optimizers:Optimizer._backend_apply_gradients"),
        "scaling_apply": at(_SCALED, "keras.optimizers:LossScaleOptimizer.apply"),
        "scaling_stateless_apply": at(_SCALED, "keras.optimizers:LossScaleOptimizer.stateless_apply"),
        "trainable_variables": at(_SCALED, "keras:*._trainable_variables"),
        "dynamic_scale": at(_SCALED, "keras:*.dynamic_scale"),
        "check_finite": at(_SCALED, "keras:*.check_finite"),
        "compute_loss": at(_LOSSES, "keras:Model.compute_loss"),
        "compute_loss_inside": at("losses of models with a loss of their own", "keras:Model._compute_loss"),
        "evaluate": at("evaluations", "keras:Model.evaluate"),
        "fit": at("the beginning and the end of fit", "keras:Model.fit"),
        "layers": at("classes of layers", "keras:*._flatten_layers"),
        "variables_of_layer": at("classes of layers", "keras:*._trainable_variables"),
        "is_state_kept": at(_STATE, "keras:*._jax_state_synced"),
        "jax_compiler": at(
            "updates of compiled steps on JAX",
            f"{_JAX_TRAINER}:jit",
            # Where it is looked up at each call, it has been replaced.
            f"{_JAX_TRAINER}:jax.jit",
        ),
    },
)


def owner_of(key: str) -> tuple[type, str] | None:
    """Return the class that defines a method of the table, and the method's name; None if it is missing, which health notes."""
    if keras_names.find(key) is None:
        return None
    module, _, path = keras_names.table[key].paths[0].partition(":")
    kind_name, name = path.split(".")
    kind: type = getattr(sys.modules[module], kind_name)
    for base in kind.__mro__:
        if name in vars(base):
            return base, name
    keras_names.lacks(key)
    return None


def replace_compiler(plain: Any, replacement: Any) -> None:
    """Let Keras compile its steps on JAX by another function, which it has imported before."""
    if keras_names.find("jax_compiler") is not plain:
        return  # missing, or the replacement already
    module, _, name = keras_names.table["jax_compiler"].paths[0].partition(":")
    setattr(sys.modules[module], name, replacement)


def set_state(trainer: Any, state: dict[str, Any]) -> None:
    """Replace the state that Keras assigns to a model's variables when ``fit`` ends, on JAX. Before the first step, the model has none."""
    trainer._jax_state = state  # noqa: SLF001 - as above


def state_of_step(frame: FrameType) -> Sequence[Any] | None:
    """Return the state of a training in a frame of the trainer on JAX; None for other frames."""
    state = frame.f_locals.get("state") if frame.f_globals.get("__name__") == _JAX_TRAINER else None
    return state if isinstance(state, list | tuple) else None
