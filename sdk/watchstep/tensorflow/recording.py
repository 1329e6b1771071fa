"""Recording of TensorFlow 2 programs with loops of their own, by their gradient tapes.

A step is one call of ``gradient`` of an outermost tape with variables as sources. In a program with an optimizer of Keras, the
recording of Keras counts steps instead (`watchstep.keras`).
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from watchstep.capture.framework_names import contained
from watchstep.capture.shutdown.ending import live
from watchstep.hook import Hook
from watchstep.tensorflow import function_calls, tape_calls
from watchstep.tensorflow.function_calls import FunctionSet
from watchstep.tensorflow.graph_updates import GraphUpdates, ObservedUpdate
from watchstep.tensorflow.tape_calls import TapeGradients
from watchstep.updates.parameter_names import describe_variables
from watchstep.updates.program_updates import ProgramUpdates

_MAX_SOURCES = 16
_CALLS_WITHOUT_UPDATE = 20
"""Calls with gradients of a tape but without an update of a Keras optimizer, after which the user learns that they are not observed. A program that
accumulates gradients makes several for each update."""

_log = logging.getLogger("watchstep")


class _VariableSet:
    """The variables that a tape's gradients are computed for: they stand for an optimizer. They are weakly referenced."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._references = tuple(map(weakref.ref, variables))

    def exists(self) -> bool:
        """Return whether the program still has these variables."""
        return all(reference() is not None for reference in self._references)


class _OwnTapes:
    """Gradients of tapes in a program whose recording is that of a Keras optimizer. They are not observed unless the optimizer gets them."""

    def __init__(self) -> None:
        self._functions = FunctionSet()
        self._updates: list[int] = []
        self._calls = 0
        function_calls.observe(self)

    def differentiated(self) -> None:
        """Note gradients of eager code, or those that a function computes at each of its calls."""
        if tf.executing_eagerly():
            self._count()
        for function in function_calls.current_functions():
            self._functions.add(function)

    def traced_call(self, function: Any, enclosing: Sequence[Any]) -> None:
        """Note that functions compute the gradients of one that they call."""
        if function in self._functions:
            for outer in enclosing:
                self._functions.add(outer)

    def before_call(self, function: Any) -> None:
        """Do nothing yet."""

    def after_call(self, function: Any) -> None:
        """Count a call that has computed gradients."""
        if function in self._functions:
            self._count()

    def call_failed(self, function: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Stop observing."""
        function_calls.forget(self)

    def _count(self) -> None:
        recordings = live()
        updates = [recording.updates for recording in recordings]
        self._calls = self._calls + 1 if updates == self._updates else 0
        self._updates = updates
        if not recordings or self._calls != _CALLS_WITHOUT_UPDATE:
            return
        text = (
            f"{self._calls} calls computed gradients of tapes without an update by a Keras optimizer: "
            "updates that the program makes with them itself, if any, are not observed, and NaN in them stops nothing"
        )
        _log.warning("watchstep: %s", text)
        for recording in recordings:
            recording.note("tapes", text)
        self.close()


class TapeUpdates:
    """Records the gradients of tapes, until its hook is closed."""

    def __init__(self, open_hook: Callable[[], Hook | None]) -> None:
        """Start observing.

        Args:
            open_hook: returns the hook at the first update; None if nothing is recorded.
        """
        self._open_hook = open_hook
        self._graphs = GraphUpdates(self._open)
        self._sets: dict[tuple[int, ...], _VariableSet] = {}
        self._has_optimizers: bool | None = None
        self._own_tapes: _OwnTapes | None = None
        tape_calls.install()
        tape_calls.observe(self)

    def start(self) -> None:
        """Start the recording now, instead of at the first update.

        Raises:
            ConfigError: the hook's gate policy is not possible.
        """
        self._graphs.start()

    def differentiated(self, result: TapeGradients) -> None:
        """Record gradients, or add their recording to the graph that is traced.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        if self._has_optimizers is None:
            self._has_optimizers = _has_keras_optimizers()
        if self._has_optimizers:
            if self._graphs.updates is not None:
                self._graphs.note(
                    "gradients of tapes are not recorded: the program has a Keras optimizer, whose updates watchstep.keras records"
                )
            elif self._own_tapes is None:
                self._own_tapes = _OwnTapes()
            if self._own_tapes is not None:
                self._own_tapes.differentiated()
            return
        key = tuple(map(id, result.variables))
        source = self._sets.get(key)
        if source is None or not source.exists():
            source = None  # a later training begins
            self._sets = {other: entry for other, entry in self._sets.items() if entry.exists()}
            if len(self._sets) >= _MAX_SOURCES:
                self._graphs.count("unobserved_optimizers")
                self._graphs.note(
                    f"updates of more than {_MAX_SOURCES} sets of variables are not recorded, and no stop comes from them"
                )
                return
            source = self._sets[key] = _VariableSet(result.variables)
        self._graphs.add(
            ObservedUpdate(
                source=source,
                variables=tuple(
                    variable if hasattr(variable, "read_value") else variable.value
                    for variable in result.variables
                ),
                gradients=result.gradients,
                describe=lambda: describe_variables(result.variables),
                loss=result.target,
            )
        )

    def report(self, where: str, error: Exception) -> None:
        """Count a fault of the recorder."""
        self._graphs.report(where, error)

    def close(self) -> None:
        """Stop observing."""
        tape_calls.forget(self)
        if self._own_tapes is not None:
            self._own_tapes.close()
        self._graphs.close()
        self._sets.clear()

    def _open(self) -> ProgramUpdates | None:
        hook = self._open_hook()
        if hook is None:
            tape_calls.forget(self)
            return None
        updates = ProgramUpdates(hook._session, hook._on_nonfinite)  # noqa: SLF001 - part of the hook's own package
        hook.attach_updates(updates.count_by_hand, self.close)
        return updates


_recordings: weakref.WeakValueDictionary[int, TapeUpdates] = weakref.WeakValueDictionary()
"""Recordings by the id of their hook, which they reference: a program may create one for each training."""


class TapeRecording:
    """Records a TensorFlow program with a loop of its own. Another one with the same hook is the same recording.

    Example::

        import watchstep
        from watchstep.tensorflow import Recording

        hook = watchstep.Hook("s3://bucket/runs")
        Recording(hook)                     # before the step is traced
        for x, y in batches:
            train_step(x, y)                # computes gradients with a tf.GradientTape
        hook.close()
    """

    def __init__(self, hook: Hook) -> None:
        """Record with a hook.

        Args:
            hook: an open hook. The recording ends when it is closed.

        Raises:
            ConfigError: the hook's gate policy skips updates, which is not possible from outside of a compiled step.
        """
        with contained(hook, "TensorFlow"):
            updates = _recordings.get(id(hook))
            if updates is None:
                updates = TapeUpdates(lambda: hook)
                updates.start()
                _recordings[id(hook)] = updates
            self._updates = updates


def _has_keras_optimizers() -> bool:
    """Return whether the program has an optimizer of Keras, on TensorFlow."""
    keras = sys.modules.get("keras")
    kind = getattr(getattr(keras, "optimizers", None), "Optimizer", None)
    if keras is None or kind is None or keras.backend.backend() != "tensorflow":
        return False
    return any(issubclass(type(candidate), kind) for candidate in gc.get_objects())
