"""Recording of the updates of TensorFlow's graphs and of its eager code, for the adapters of Keras and of gradient tapes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from watchstep.capture.steps.own_work import own_work
from watchstep.format.tensors import TensorInfo
from watchstep.stopping import StopTraining
from watchstep.tensorflow import function_calls
from watchstep.tensorflow.function_calls import FunctionSet
from watchstep.tensorflow.graph_sink import GraphSink, GraphUpdate
from watchstep.tensorflow.host_tensors import ScaledArrays, host_array, host_values
from watchstep.tensorflow.internals import tensorflow_names
from watchstep.updates.program_updates import ProgramUpdates, scaler_metrics
from watchstep.updates.tensor_values import HostArrays, TensorValues
from watchstep.updates.update_recorder import Update

OpenUpdates = Callable[[], "ProgramUpdates | None"]
"""Returns the recording, and starts it at the first call; None if there is none."""


@dataclass(frozen=True)
class ObservedUpdate:
    """One call of an optimizer, or of a tape, in a graph or in eager code.

    Attributes:
        source: the optimizer, or the object that stands for it.
        variables: the variables that it updates: `tf.Variable`, in the order of the gradients.
        gradients: their gradients, multiplied by ``scale``; None for one that does not exist.
        describe: returns descriptions of the variables.
        loss: the loss, of shape (); None if it is unknown.
        scale: scale of the loss; None without loss scaling.
        is_finite: whether all gradients are finite, if the program computes that. An update that is not finite is left out.
        learning_rate: the learning rate; None if it is unknown.
    """

    source: Any
    variables: Sequence[Any]
    gradients: Sequence[Any]
    describe: Callable[[], Sequence[TensorInfo]]
    loss: Any = None
    scale: Any = None
    is_finite: Any = None
    learning_rate: Any = None


_MAX_GRAPHS = 16
"""Maximum number of sinks. A program whose updates have more forms is not observed in all of them."""


@dataclass
class _Graph:
    """The sink of one optimizer, for updates with gradients of the same variables and shapes.

    Attributes:
        source: weak reference to the optimizer.
        sink: its variables in graphs.
        variables: the variables that it updates.
        describe: returns their descriptions.
        skips: whether updates that are not finite are left out.
        functions: functions that have made its updates.
        weights: weights before the next call, if they are due.
    """

    source: weakref.ref[Any]
    sink: GraphSink
    variables: tuple[Any, ...]
    describe: Callable[[], Sequence[TensorInfo]]
    skips: bool
    functions: FunctionSet = field(default_factory=FunctionSet)
    weights: HostArrays | None = None


class GraphUpdates:
    """Records updates. Its faults never reach the program."""

    def __init__(self, open_updates: OpenUpdates) -> None:
        """Start without updates.

        Args:
            open_updates: returns the recording at the first update; None if there is none.
        """
        self._open_updates = open_updates
        self._updates: ProgramUpdates | None = None
        self._is_refused = False
        self._graphs: list[_Graph] = []
        self._closed = False
        self._has_functions = function_calls.install()
        function_calls.observe(self)

    @property
    def updates(self) -> ProgramUpdates | None:
        """The recording; None before the first update."""
        return self._updates

    def start(self) -> None:
        """Start the recording now, instead of at the first update.

        Raises:
            ConfigError: the hook's gate policy is not possible.
        """
        self._opened()

    def report(self, where: str, error: Exception) -> None:
        """Count a fault of the recorder."""
        if self._updates is not None:
            self._updates.session.health.fault(where, error)

    def count(self, name: str) -> None:
        """Count what is not observed."""
        if self._updates is not None:
            self._updates.session.health.count(name)

    def add(self, update: ObservedUpdate) -> None:
        """Record an update of eager code, or add its operations to the graph that is being traced.

        Raises:
            StopTraining: the update is one of eager code, and a stop is due and the program opted in.
        """
        if self._closed or function_calls.is_clean():
            return
        own_work.enter()
        try:
            if self._opened() is None:
                return
            if tf.executing_eagerly():
                self._record_eager(update)
            else:
                self._add_to_graph(update)
        except StopTraining:
            raise
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self.report("tensorflow", error)
        finally:
            own_work.leave()

    def before_call(self, function: Any) -> None:
        """Request the gradients that are due, and reference the weights before the update."""
        if not self._graphs:
            return
        own_work.enter()
        try:
            for graph in self._graphs:
                if function in graph.functions:
                    self._prepare(graph)
        except Exception as error:  # noqa: BLE001 - as above
            self.report("tensorflow", error)
        finally:
            own_work.leave()

    def after_call(self, function: Any) -> None:
        """Record the updates of a call.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        graphs = [graph for graph in self._graphs if function in graph.functions]
        if not graphs or self._closed:
            return
        own_work.enter()
        try:
            self._record_graphs(graphs)
        except StopTraining:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self.report("tensorflow", error)
        finally:
            own_work.leave()

    def call_failed(self, function: Any) -> None:
        """Record the updates that a call has made before it failed. The program's own exception is raised, and no stop."""
        with suppress(StopTraining):
            self.after_call(function)
        try:
            for graph in self._graphs:
                if function in graph.functions:
                    graph.sink.forgive()
        except Exception as error:  # noqa: BLE001 - as above
            self.report("tensorflow", error)

    def close(self) -> None:
        """Stop observing, and release the variables."""
        self._closed = True
        function_calls.forget(self)
        self._graphs.clear()

    def _opened(self) -> ProgramUpdates | None:
        if self._updates is None and not self._is_refused:
            self._updates = self._open_updates()
            self._is_refused = self._updates is None
            if self._updates is not None:
                tensorflow_names.report_to(self._updates.session.health)
        return self._updates

    def _record_eager(self, update: ObservedUpdate) -> None:
        updates = self._opened()
        recorder = (
            None if updates is None else updates.recorder_of(update.source, update.variables, update.describe)
        )
        if recorder is None:
            return
        scale = None if update.scale is None else float(update.scale)
        gradients: TensorValues = host_values(update.gradients)
        if scale is not None:
            gradients = ScaledArrays(host_values(update.gradients), scale)
        is_due = "weight" in recorder.due()
        skips = update.is_finite is not None
        is_bad = not bool(update.is_finite) if skips else None
        recorder.record(
            Update(
                gradients=gradients,
                weights=_values_of(update.variables) if is_due else None,
                losses={} if update.loss is None else {"loss": float(update.loss)},
                metrics=scaler_metrics(scale, is_skipped=bool(is_bad)),
                hyperparameters=_rates(None if update.learning_rate is None else float(update.learning_rate)),
                is_skipped=bool(is_bad),
                is_bad=is_bad,
            )
        )

    def _add_to_graph(self, update: ObservedUpdate) -> None:
        if not self._has_functions:
            return  # health has it
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            self.note("updates of several replicas in one process are not observed")
            return
        traced = function_calls.traced_function()
        if traced is not None:
            self.note(
                "a function that is traced without a call, as by get_concrete_function or in a data set, is observed where the program calls it"
            )
        function = traced or function_calls.current_function()
        if function is None:
            self.note("gradients in a graph that is not that of a tf.function are not observed")
            return
        graph = self._graph_of(update)
        if graph is None:
            self.note(f"updates of more than {_MAX_GRAPHS} forms are not observed")
            return
        graph.sink.add(
            update.gradients,
            loss=update.loss,
            is_finite=update.is_finite,
            scale=update.scale,
            learning_rate=update.learning_rate,
        )
        graph.functions.add(function)

    def _graph_of(self, update: ObservedUpdate) -> _Graph | None:
        """Return the sink for an update; a new one if there is none for its variables and shapes. None if there are too many."""
        identities = list(map(id, update.variables))
        for graph in self._graphs:
            is_same = graph.source() is update.source and list(map(id, graph.variables)) == identities
            if is_same and graph.sink.fits(update.gradients):
                return graph
        self._graphs = [graph for graph in self._graphs if graph.source() is not None]
        if len(self._graphs) >= _MAX_GRAPHS:
            return None
        graph = _Graph(
            source=weakref.ref(update.source),
            sink=GraphSink(update.gradients, checks_all=self._checks_all()),
            variables=tuple(update.variables),
            describe=update.describe,
            skips=update.is_finite is not None,
        )
        graph.weights = _first_weights(graph.variables)
        self._graphs.append(graph)
        return graph

    def _checks_all(self) -> bool:
        """Return whether each update is checked completely, because it may stop the training."""
        updates = self._updates
        if updates is None:
            return False
        return updates.on_nonfinite.action == "stop" or updates.session.recorder.guarding is not None

    def note(self, text: str) -> None:
        """Report in health what is not observed."""
        updates = self._opened()
        if updates is not None:
            updates.session.health.note("tensorflow", text)

    def _prepare(self, graph: _Graph) -> None:
        recorder = self._recorder_of(graph)
        if recorder is None:
            return
        due = recorder.due()
        graph.sink.request(is_due="gradient" in due)
        graph.weights = _values_of(graph.variables) if "weight" in due else None

    def _recorder_of(self, graph: _Graph) -> Any:
        updates, source = self._opened(), graph.source()
        if updates is None or source is None:
            return None
        return updates.recorder_of(source, graph.variables, graph.describe)

    def _record_graphs(self, graphs: Sequence[_Graph]) -> None:
        """Record the updates of one call: those of the optimizer that counts steps last, since they end the step."""
        read = [(graph, self._recorder_of(graph), graph.sink.read()) for graph in graphs]
        updates = self._updates
        if updates is None:
            return
        read.sort(key=lambda entry: updates.counts(entry[0].source()))
        has_parts = len({id(graph.source()) for graph in graphs}) > 1
        for graph, recorder, (begin, made) in read:
            weights, graph.weights = graph.weights, None
            if recorder is None or not made:
                continue
            is_part = has_parts and not recorder.counts_steps
            number = made[-1].number if is_part else begin
            for update in made[-1:] if is_part else made:
                if update.number > number:
                    updates.session.health.count("missed_steps", update.number - number)
                for _ in range(update.number - number):
                    recorder.record(Update(weights=weights))
                    weights = None
                recorder.record(_as_update(update, weights, skips=graph.skips))
                weights, number = None, update.number + 1


def _as_update(update: GraphUpdate, weights: HostArrays | None, *, skips: bool) -> Update:
    is_skipped = skips and update.is_bad
    return Update(
        gradients=update.gradients,
        weights=weights,
        losses={} if update.loss is None else {"loss": update.loss},
        metrics=scaler_metrics(update.scale, is_skipped=is_skipped),
        hyperparameters=_rates(update.learning_rate),
        is_skipped=is_skipped,
        is_bad=update.is_bad,
    )


def _rates(learning_rate: float | None) -> Mapping[str, float]:
    return {} if learning_rate is None else {"learning_rate": learning_rate}


def _values_of(variables: Sequence[Any]) -> HostArrays:
    """Return the current values of variables. They do not change with the variables: an update writes to other memory."""
    return HostArrays(tuple(host_array(variable.read_value()) for variable in variables))


def _first_weights(variables: Sequence[Any]) -> HostArrays | None:
    """Return the values of variables at the first trace; None if they are not initialized yet."""
    try:
        with tf.init_scope():
            return _values_of(variables)
    except Exception:  # noqa: BLE001 - as above
        return None
