"""How updates of Keras' optimizers are recorded on each backend.

On TensorFlow the figures leave a graph through variables, on JAX as extra outputs of the compiled step; PyTorch's tensors, and those
of eager code, are read directly.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import keras

from watchstep.capture.framework_names import health_of
from watchstep.capture.steps.own_work import own_work
from watchstep.capture.steps.session import Session
from watchstep.hook import Hook
from watchstep.keras.internals import keras_names
from watchstep.keras.names import describe
from watchstep.keras.optimizer_calls import OptimizerCall
from watchstep.stopping import StopTraining
from watchstep.updates.program_updates import ProgramUpdates, scaler_metrics

_MAX_TRAINERS = 7
"""Trainers, besides the newest one, whose losses wait for an update."""


class OpensUpdates(Protocol):
    """Starts a recording."""

    def __call__(self) -> ProgramUpdates | None:
        """Return the recording, and start it at the first call; None if there is none."""
        ...


@dataclass(frozen=True)
class _BatchLoss:
    """The loss of a training batch that no update has taken.

    Attributes:
        trainer: weak reference to the model that computed it.
        loss: the loss.
    """

    trainer: weakref.ref[Any]
    loss: Any


class _Losses(threading.local):
    """What this thread computes.

    Attributes:
        pending: losses of training batches that no update has taken; one for each trainer, in order.
        computed: number of losses since ``fit`` began.
        updates: number of updates since then.
    """

    def __init__(self) -> None:
        self.pending: list[_BatchLoss] = []
        self.computed = self.updates = 0

    def add(self, trainer: Any, loss: Any) -> None:
        """Add the loss of a batch."""
        self.computed += 1
        others = [entry for entry in self.pending if entry.trainer() not in (trainer, None)]
        self.pending = [*others[-_MAX_TRAINERS:], _BatchLoss(weakref.ref(trainer), loss)]

    def take(self, optimizer: Any) -> tuple[Any, Any]:
        """Return the trainer and the loss of an optimizer's update, once; None for what is unknown.

        It is the loss of the trainer with this optimizer, or the only one if its trainer was compiled with an optimizer that is not used.
        """
        self.updates += 1
        trained = [(entry.trainer(), entry) for entry in self.pending]
        own = [pair for pair in trained if getattr(pair[0], "optimizer", None) is optimizer]
        chosen = own or (trained if len(trained) == 1 else [])
        if not chosen:
            return None, None
        trainer, taken = chosen[0]
        self.pending = [entry for entry in self.pending if entry is not taken]
        return trainer, taken.loss


class KerasUpdates:
    """Records what Keras does, on any backend. Its faults never reach the program."""

    def __init__(self) -> None:
        """Start without updates."""
        self._losses = _Losses()
        self._lock = threading.RLock()
        self._trainings: dict[threading.Thread, int] = {}

    def start(self) -> None:
        """Start the recording now, instead of at the first update.

        Raises:
            ConfigError: the hook's gate policy is not possible.
        """

    def session(self) -> Session | None:
        """Return the recording; None if it has not started."""
        raise NotImplementedError

    def restart(self) -> None:
        """Let the next optimizer count steps: another training begins."""

    def settle(self) -> None:
        """Record all updates that were made."""

    def update(self, call: OptimizerCall, loss: Any, trainer: Any) -> None:
        """Record an update, or add it to the trace."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop observing."""

    def updating(self, call: OptimizerCall) -> None:
        """Record an update, or add it to the trace.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        own_work.enter()
        try:
            trainer, loss = self._losses.take(call.optimizer)
            self.update(call, loss, trainer)
        except StopTraining:
            raise
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self.report("keras", error)
        finally:
            own_work.leave()

    def computed(self, trainer: Any, loss: Any) -> None:
        """Keep the loss for the update that follows, unless nothing differentiates it."""
        if self.is_training(loss):
            self._losses.add(trainer, loss)

    def is_training(self, loss: Any) -> bool:  # noqa: ARG002 - of the interface
        """Return whether a loss that was just computed can be that of an update."""
        return True

    def evaluated(self, results: Mapping[str, float]) -> None:
        """Record the results of an evaluation, in mode eval."""
        session = self.session()
        if session is None:
            return
        for name, value in results.items():
            try:
                with self._lock:
                    session.recorder.scalar(str(name), float(value), "eval")
            except Exception as error:  # noqa: BLE001 - as above
                self.report("evaluation", error)

    def begins(self, trainer: Any, *, is_inner: bool) -> None:
        """Let the optimizer of this training count steps, unless it is a part of another one, or others are in progress in other threads."""
        self._losses.computed = self._losses.updates = 0
        if is_inner:
            return
        with self._lock:
            own = threading.current_thread()
            if not any(thread.is_alive() for thread in self._trainings if thread is not own):
                self.restart()
            self._trainings[own] = id(trainer)

    def ends(self, trainer: Any) -> None:
        """Record the last update, and report it if there was none of the optimizer's."""
        with self._lock:
            self.settle()
            if self._trainings.get(threading.current_thread()) == id(trainer):
                del self._trainings[threading.current_thread()]
        losses, session = self._losses, self.session()
        losses.pending.clear()
        if losses.computed and not losses.updates and session is not None and keras_names.has("apply"):
            name = type(getattr(trainer, "optimizer", None)).__name__
            session.health.note(
                "keras", f"updates of {name} are not observed: it applies gradients by code of its own"
            )

    def report(self, where: str, error: Exception) -> None:
        """Count a fault."""
        session = self.session()
        if session is not None:
            session.health.fault(where, error)


class TensorFlowUpdates(KerasUpdates):
    """Records updates on TensorFlow, in graphs and in eager code."""

    def __init__(self, open_updates: OpensUpdates) -> None:
        """Start without updates."""
        super().__init__()
        from watchstep.tensorflow import tape_calls
        from watchstep.tensorflow.graph_updates import GraphUpdates

        tape_calls.install()
        self._graphs = GraphUpdates(open_updates)

    def start(self) -> None:
        """Start the recording."""
        self._graphs.start()

    def session(self) -> Session | None:
        """Return the recording."""
        updates = self._graphs.updates
        return None if updates is None else updates.session

    def is_training(self, loss: Any) -> bool:  # noqa: ARG002 - of the interface
        """Return whether a tape records."""
        from watchstep.tensorflow import tape_calls

        return tape_calls.is_recording()

    def restart(self) -> None:
        """Let the next optimizer count steps."""
        if self._graphs.updates is not None:
            self._graphs.updates.restart()

    def update(self, call: OptimizerCall, loss: Any, trainer: Any) -> None:
        """Record an update, or add its operations to the graph."""
        import tensorflow as tf

        from watchstep.tensorflow import tape_calls
        from watchstep.tensorflow.graph_updates import ObservedUpdate

        targets = tape_calls.take_targets(call.variables)
        if loss is not None and not tape_calls.belongs_here(loss):
            loss = None
        if loss is None and len(targets) == 1:
            loss = _unscaled(targets[0], call)
        if loss is None and len(targets) > 1:
            self._graphs.note(
                "updates by gradients of several losses have no loss: it is unknown which one is that of the batch"
            )
        is_scalar = loss is not None and loss.shape.rank == 0
        self._graphs.add(
            ObservedUpdate(
                source=call.optimizer,
                variables=tuple(
                    variable if hasattr(variable, "read_value") else variable.value
                    for variable in call.variables
                ),
                gradients=call.gradients,
                describe=lambda: describe(call.variables, trainer),
                loss=loss if is_scalar else None,
                scale=call.scale,
                is_finite=call.is_finite,
                learning_rate=tf.convert_to_tensor(_learning_rate(call.optimizer)),
            )
        )

    def close(self) -> None:
        """Stop observing."""
        self._graphs.close()


def _unscaled(target: Any, call: OptimizerCall) -> Any:
    """Return what a tape has differentiated, without the scale of the loss."""
    scale = call.scale if call.scale is not None else getattr(call.optimizer, "loss_scale_factor", None)
    return target if scale is None else keras.ops.divide(target, keras.ops.cast(scale, target.dtype))


class TorchUpdates(KerasUpdates):
    """Records updates on PyTorch."""

    def __init__(self, open_updates: OpensUpdates) -> None:
        """Start without updates."""
        super().__init__()
        self._open_updates = open_updates
        self._updates: ProgramUpdates | None = None

    def start(self) -> None:
        """Start the recording."""
        with self._lock:  # several threads may make the first update
            self._updates = self._updates or self._open_updates()

    def session(self) -> Session | None:
        """Return the recording."""
        return None if self._updates is None else self._updates.session

    def begins(self, trainer: Any, *, is_inner: bool) -> None:
        """Let the optimizer of this training count steps, and report a compiled step."""
        super().begins(trainer, is_inner=is_inner)
        session = self.session()
        if getattr(trainer, "jit_compile", False) and session is not None:
            session.health.note("keras", "updates with jit_compile=True are not observed on PyTorch")

    def is_training(self, loss: Any) -> bool:
        """Return whether the loss has a graph of gradients."""
        return bool(getattr(loss, "requires_grad", False))

    def restart(self) -> None:
        """Let the next optimizer count steps."""
        if self._updates is not None:
            self._updates.restart()

    def update(self, call: OptimizerCall, loss: Any, trainer: Any) -> None:
        """Record an update before it is made, of one thread at a time."""
        with self._lock:
            self._record(call, loss, trainer)

    def _record(self, call: OptimizerCall, loss: Any, trainer: Any) -> None:
        from watchstep.keras.torch_values import TorchTensors, number_of
        from watchstep.updates.update_recorder import Update

        self.start()
        updates = self._updates
        recorded = None
        if updates is not None:
            recorded = updates.recorder_of(
                call.optimizer, call.variables, lambda: describe(call.variables, trainer)
            )
        if recorded is None:
            return
        recorder, rows = recorded
        scale = None if call.scale is None else number_of(call.scale)
        is_skipped = call.is_finite is not None and not bool(call.is_finite)
        weights = tuple(variable.value for variable in call.variables) if "weight" in recorder.due() else None
        recorder.record(
            Update(
                gradients=TorchTensors(call.gradients, scale),
                weights=None if weights is None else TorchTensors(weights),
                losses={} if loss is None else {"loss": number_of(loss)},
                metrics=scaler_metrics(scale, is_skipped=is_skipped),
                hyperparameters={"learning_rate": number_of(_learning_rate(call.optimizer))},
                is_skipped=is_skipped,
                is_bad=is_skipped if call.is_finite is not None else None,
                rows=rows,
            )
        )


class JaxUpdates(KerasUpdates):
    """Passes updates on JAX to the recording of JAX programs, which reads them from the compiled step."""

    def __init__(self, open_hook: Callable[[], Hook | None]) -> None:
        """Start without updates.

        Args:
            open_hook: returns the hook at the first update; None if nothing is recorded.
        """
        super().__init__()
        from watchstep.keras import jax_updates

        self._open_hook: Callable[[], Hook | None] | None = open_hook
        self._session: Session | None = None
        self._recording: Any = None
        self._module = jax_updates
        jax_updates.install()

    def start(self) -> None:
        """Start the recording."""
        with self._lock:  # as above
            open_hook, self._open_hook = self._open_hook, None
            hook = None if open_hook is None else open_hook()
            if hook is not None:
                keras_names.report_to(health_of(hook))
                self._session = hook._session  # noqa: SLF001 - part of the hook's own package
                self._recording = self._module.record_with(hook)

    def restart(self) -> None:
        """Let the optimizer of the next update count steps."""
        if self._recording is not None:
            self._recording.restart()

    def begins(self, trainer: Any, *, is_inner: bool) -> None:
        """Let the optimizer of this training count steps, and keep its state if it is stopped."""
        super().begins(trainer, is_inner=is_inner)
        self._module.begins(trainer)

    def ends(self, trainer: Any) -> None:
        """Record the last update."""
        super().ends(trainer)
        self._module.ends(trainer)

    def session(self) -> Session | None:
        """Return the recording."""
        return self._session

    def updating(self, call: OptimizerCall) -> None:
        """Note an update, and keep the state of an eager step that is stopped."""
        try:
            super().updating(call)
        except StopTraining:
            self._module.keep_state_of(sys._getframe(1))  # noqa: SLF001 - the documented way to a caller's frame
            raise

    def update(self, call: OptimizerCall, loss: Any, trainer: Any) -> None:  # noqa: ARG002 - of the interface
        """Note an update; its loss was noted by JAX's gradient function."""
        self.start()
        self._module.note(call)


def _learning_rate(optimizer: Any) -> Any:
    """Return the learning rate of the next update, as a tensor of shape ()."""
    return keras.ops.convert_to_tensor(optimizer.learning_rate)
