"""Recording of the updates of TensorFlow's graphs and of its eager code, for the adapters of Keras and of gradient tapes."""

from __future__ import annotations

import threading
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
from watchstep.updates.update_recorder import Update, UpdateRecorder

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


_MAX_GRAPHS = 64
"""Maximum number of sinks, of one optimizer each."""


@dataclass
class _Graph:
    """The sink of one optimizer.

    Attributes:
        source: weak reference to the optimizer.
        sink: its variables in graphs.
        forms: ids of the variables of its updates, which differ if some have no gradient, and their descriptions; by the sink's index.
        variables: all these variables, by their id; weakly referenced, because a training may end before the program does.
        skips: whether updates that are not finite are left out.
        functions: functions that have made its updates.
        weights: weights before the next call by the id of their variable, if they are due.
    """

    source: weakref.ref[Any]
    sink: GraphSink
    forms: dict[int, tuple[Sequence[int], Sequence[TensorInfo]]] = field(default_factory=dict)
    variables: weakref.WeakValueDictionary[int, Any] = field(default_factory=weakref.WeakValueDictionary)
    skips: bool = False
    functions: FunctionSet = field(default_factory=FunctionSet)
    weights: Mapping[int, Any] | None = None


class GraphUpdates:
    """Records updates, of one thread at a time. Its faults never reach the program."""

    def __init__(self, open_updates: OpenUpdates) -> None:
        """Start without updates.

        Args:
            open_updates: returns the recording at the first update; None if there is none.
        """
        self._lock = threading.RLock()
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

    def count(self, name: str, number: int = 1) -> None:
        """Count what is not observed."""
        if self._updates is not None:
            self._updates.session.health.count(name, number)

    def add(self, update: ObservedUpdate) -> None:
        """Record an update of eager code, or add its operations to the graph that is being traced.

        Raises:
            StopTraining: the update is one of eager code, and a stop is due and the program opted in.
        """
        if self._closed or function_calls.is_clean():
            return
        own_work.enter()
        try:
            with self._lock:
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

    def traced_call(self, function: Any, enclosing: Sequence[Any]) -> None:
        """Note that functions make the updates of one that they call."""
        with self._lock:
            for graph in self._graphs:
                if function in graph.functions:
                    for outer in enclosing:
                        graph.functions.add(outer)

    def before_call(self, function: Any) -> None:
        """Request the gradients that are due, and reference the weights before the update."""
        if not self._graphs:
            return
        own_work.enter()
        try:
            with self._lock:
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
            with self._lock:
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
            with self._lock:
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
        with self._lock:  # several threads may make the first update
            if self._updates is None and not self._is_refused:
                self._updates = self._open_updates()
                self._is_refused = self._updates is None
                if self._updates is not None:
                    tensorflow_names.report_to(self._updates.session.health)
            return self._updates

    def _record_eager(self, update: ObservedUpdate) -> None:
        updates = self._opened()
        recorded = (
            None if updates is None else updates.recorder_of(update.source, update.variables, update.describe)
        )
        if recorded is None:
            return
        recorder, rows = recorded
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
                weights=HostArrays(tuple(map(_value_of, update.variables))) if is_due else None,
                losses={} if update.loss is None else {"loss": float(update.loss)},
                metrics=scaler_metrics(scale, is_skipped=bool(is_bad)),
                hyperparameters=_rates(None if update.learning_rate is None else float(update.learning_rate)),
                is_skipped=bool(is_bad),
                is_bad=is_bad,
                rows=rows,
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
                "a function that is traced without a call, as by get_concrete_function or in a data set, is observed where the program calls the function itself, and not where it calls the trace"
            )
        functions = function_calls.current_functions()
        if not functions:
            self.note("gradients in a graph that is not that of a tf.function are not observed")
            return
        graph = self._graph_of(update)
        if graph is None:
            self.note(f"updates of more than {_MAX_GRAPHS} optimizers are not observed")
            return
        added = {id(variable): variable for variable in update.variables}
        form = graph.sink.add(
            list(map(id, update.variables)),
            update.gradients,
            loss=update.loss,
            is_finite=update.is_finite,
            scale=update.scale,
            learning_rate=update.learning_rate,
        )
        for function in functions:
            graph.functions.add(function)
        if form not in graph.forms:
            graph.forms[form] = tuple(map(id, update.variables)), tuple(update.describe())
        graph.skips = update.is_finite is not None
        added = {key: variable for key, variable in added.items() if key not in graph.variables}
        graph.variables.update(added)
        if added and (first := _first_weights(added)) is not None:
            graph.weights = {**(graph.weights or {}), **first}

    def _graph_of(self, update: ObservedUpdate) -> _Graph | None:
        """Return the sink of an optimizer; a new one if there is none. None if there are too many."""
        for graph in self._graphs:
            if graph.source() is update.source:
                return graph
        self._graphs = [graph for graph in self._graphs if graph.source() is not None]
        if len(self._graphs) >= _MAX_GRAPHS:
            return None
        graph = _Graph(weakref.ref(update.source), GraphSink(checks_all=self._checks_all()))
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
        recorder, _rows = self._recorded(graph, next(iter(graph.forms), None))
        if recorder is None:
            return
        due = recorder.due()
        graph.sink.request(is_due="gradient" in due)
        graph.weights = _values_of(graph.variables) if "weight" in due else None

    def _recorded(self, graph: _Graph, form: int | None) -> tuple[UpdateRecorder | None, Sequence[int]]:
        """Return the recorder of an optimizer, and the indices of the variables of one form among its parameters."""
        updates, source = self._opened(), graph.source()
        if updates is None or source is None or form is None:
            return None, ()
        keys, infos = graph.forms[form]
        variables = [graph.variables.get(key) for key in keys]
        if any(variable is None for variable in variables):
            return None, ()
        return updates.recorder_of(source, variables, lambda: infos) or (None, ())

    def _record_graphs(self, graphs: Sequence[_Graph]) -> None:
        """Record the updates of one call: those of the optimizer that counts steps last, since they end the step."""
        read = [(graph, *graph.sink.read()) for graph in graphs]
        for graph, _begin, made in read:
            if made:
                self._recorded(graph, made[0].form)  # the first optimizer of the program counts steps
        updates = self._updates
        if updates is None:
            return
        read.sort(key=lambda entry: updates.counts(entry[0].source()))
        for graph, begin, made in read:
            weights, graph.weights = graph.weights, None
            recorder, _rows = self._recorded(graph, made[0].form if made else None)
            if recorder is None:
                continue
            if len(graphs) > 1 and not recorder.counts_steps:
                chosen = max(made, key=_importance)
                self._record_made(graph, [chosen], chosen.number, weights or {})
            else:
                self._record_made(graph, made, begin, weights or {})

    def _record_made(
        self, graph: _Graph, made: Sequence[GraphUpdate], number: int, weights: Mapping[int, Any]
    ) -> None:
        """Record updates of one optimizer, from a number on. The weights are those before the first one."""
        form = None
        for update in made:
            if update.form != form:
                form = update.form
                recorder, rows = self._recorded(graph, form)
            if recorder is None:
                return
            arrays = tuple(map(weights.get, graph.forms[update.form][0]))
            own = HostArrays(arrays) if weights else None
            if update.number > number:
                self.count("missed_steps", update.number - number)
            for _ in range(update.number - number):
                recorder.record(Update(weights=own, rows=rows))
                own = None
            recorder.record(_as_update(update, own, rows, skips=graph.skips))
            weights, number = {}, update.number + 1


def _importance(update: GraphUpdate) -> tuple[bool, bool, int]:
    """Return what decides which of several updates of an optimizer is recorded at the step of another one."""
    return update.gradients is not None and update.is_bad, update.gradients is not None, update.number


def _as_update(
    update: GraphUpdate, weights: HostArrays | None, rows: Sequence[int], *, skips: bool
) -> Update:
    is_skipped = skips and update.is_bad
    return Update(
        gradients=update.gradients,
        weights=weights,
        losses={} if update.loss is None else {"loss": update.loss},
        metrics=scaler_metrics(update.scale, is_skipped=is_skipped),
        hyperparameters=_rates(update.learning_rate),
        is_skipped=is_skipped,
        is_bad=update.is_bad,
        rows=rows,
    )


def _rates(learning_rate: float | None) -> Mapping[str, float]:
    return {} if learning_rate is None else {"learning_rate": learning_rate}


def _value_of(variable: Any) -> Any:
    """Return the current value of a variable. It does not change with the variable: an update writes to other memory."""
    return host_array(variable.read_value())


def _values_of(variables: Mapping[int, Any]) -> Mapping[int, Any]:
    return {key: _value_of(variable) for key, variable in variables.items()}


def _first_weights(variables: Mapping[int, Any]) -> Mapping[int, Any] | None:
    """Return the values of variables at the first trace; None if they are not initialized yet."""
    try:
        with tf.init_scope():
            return _values_of(variables)
    except Exception:  # noqa: BLE001 - as above
        return None
