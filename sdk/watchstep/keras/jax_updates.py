"""Updates of Keras' optimizers on JAX: they leave a compiled step as those of optax do."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import jax
import keras

from watchstep.capture.steps.metric_names import SCALE
from watchstep.hook import Hook
from watchstep.jax import compiled_steps, optimizers, recording, traced_updates
from watchstep.jax.traced_updates import TracedUpdate
from watchstep.keras.internals import keras_names, replace_compiler, set_state, state_of_step
from watchstep.keras.optimizer_calls import OptimizerCall
from watchstep.updates.parameter_names import parameter_words
from watchstep.updates.program_updates import check_policy


def install() -> None:
    """Let Keras compile its steps such that their updates leave them.

    Keras takes `jax.jit` when it is imported, which may be before this is called.
    """
    plain = jax.jit
    compiled_steps.install()
    optimizers.install_losses()
    replace_compiler(plain, jax.jit)
    if _keep_state not in compiled_steps.stopping:
        compiled_steps.stopping.append(_keep_state)


_PARTS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
"""The state of a training, in the order in which Keras passes it to a step."""

_trainers: list[weakref.ref[Any]] = []


def begins(trainer: Any) -> None:
    """``fit`` of a model begins."""
    ends(trainer)
    if keras_names.have(trainer, "is_state_kept"):
        _trainers.append(weakref.ref(trainer))


def ends(trainer: Any) -> None:
    """``fit`` of a model ends."""
    _trainers[:] = [other for other in _trainers if other() is not None and other() is not trainer]


def _keep_state(arguments: Sequence[Any]) -> None:
    """Let Keras assign the arguments of a step that is not made to the variables of its model.

    In ``fit`` the variables have no values. Keras keeps those of the last step for the case of an exception, but not before the first step, and not between
    those of one execution of several steps, which have been donated.
    """
    try:
        state = arguments[0]
        if not isinstance(state, list | tuple) or len(state) != len(_PARTS):
            return
        lengths = [len(part) for part in state]
        for trainer in [found for reference in reversed(_trainers) if (found := reference()) is not None]:
            variables = (
                trainer.trainable_variables,
                trainer.non_trainable_variables,
                trainer.optimizer.variables,
                trainer.metrics_variables,
            )
            if keras_names.of(trainer, "is_state_kept", True) or [len(part) for part in variables] != lengths:
                continue
            set_state(trainer, dict(zip(_PARTS, state, strict=True)))
            return
    except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
        traced_updates.report("keras", error)


def keep_state_of(frame: FrameType | None) -> None:
    """Do the same for the eager step of Keras' trainer around a frame, which is not made: the step has its state in a local variable."""
    while frame is not None:
        state = state_of_step(frame)
        if state is not None:
            _keep_state((state,))
            return
        frame = frame.f_back


def record_with(hook: Hook) -> recording.Recording:
    """Record the program's compiled steps with a hook, until it is closed.

    Raises:
        ConfigError: the hook's gate policy is not possible.
    """
    check_policy(hook._on_nonfinite)  # noqa: SLF001 - part of the hook's own package
    return recording.Recording(hook)


def note(call: OptimizerCall) -> None:
    """Note an update that is being traced, or that eager code makes."""
    variables = [
        variable
        for variable, gradient in zip(call.variables, call.gradients, strict=True)
        if gradient is not None
    ]
    gradients = [gradient for gradient in call.gradients if gradient is not None]
    hyperparameters = {"learning_rate": keras.ops.convert_to_tensor(call.optimizer.learning_rate)}
    skipped = None
    if call.scale is not None:
        gradients = [gradient / call.scale for gradient in gradients]
        hyperparameters[SCALE] = call.scale
        traced_updates.divide_loss(call.scale)
        skipped = ~jax.numpy.asarray(call.is_finite)
    traced_updates.note_update(
        TracedUpdate(
            _tree(variables, gradients),
            _tree(variables, [variable.value for variable in variables]),
            hyperparameters,
            skipped=skipped,
        )
    )


def _tree(variables: list[Any], values: list[Any]) -> dict[str, Any]:
    """Return values as nested dictionaries by the names of their variables."""
    tree: dict[str, Any] = {}
    for words, value in zip(parameter_words([variable.path for variable in variables]), values, strict=True):
        place = tree
        for word in words[:-1]:
            place = place.setdefault(word, {})
        place[words[-1]] = value
    return tree
