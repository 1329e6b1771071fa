"""Recording of JAX programs with optax: gradients, weights, losses and hyperparameters of each update.

``watchstep.jax.Recording(hook)`` records the compiled steps that are created afterwards. A step's extra outputs are read when the
program calls the next one, so that the program never waits for more than the update that it depends on anyway.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from watchstep.capture.framework_names import contained, health_of
from watchstep.capture.steps.metric_names import SCALE
from watchstep.capture.steps.own_work import own_work
from watchstep.capture.steps.session import Session
from watchstep.format import tensors
from watchstep.format.tensors import Placement
from watchstep.hook import Hook
from watchstep.jax import compiled_steps, optimizers, traced_updates
from watchstep.jax.activations import modules
from watchstep.jax.activations.activation_reader import ActivationReader
from watchstep.jax.activations.activation_ring import ActivationSnapshot, activation_ring
from watchstep.jax.compiled_steps import CompiledStep, dispatching, stacked_of
from watchstep.jax.host_values import HostLayout, JaxArrays, PremeasuredWeights, is_on_host
from watchstep.jax.internals import has_rings, jax_names, surroundings
from watchstep.jax.names import describe, layer_descriptions
from watchstep.jax.replay.step_bundles import BundledCall, StepBundles
from watchstep.jax.replay.step_redo import CallRedo
from watchstep.jax.ring.ring_reader import RingReader, warn_of_unobserved
from watchstep.jax.ring.ring_snapshots import RingStep
from watchstep.jax.step_settings import StepSettings, request_settings, withdraw_settings
from watchstep.jax.traced_updates import (
    StepOutputs,
    TracedUpdate,
    UpdateLayout,
    UpdateOutputs,
    ranks_of,
)
from watchstep.jax.update_parts import is_top_level
from watchstep.stopping import OnNonfinite, StopTraining
from watchstep.updates.parameter_names import prefixed
from watchstep.updates.program_updates import scaler_metrics
from watchstep.updates.tensor_values import TensorValues
from watchstep.updates.update_recorder import Update, UpdateRecorder

_MAX_RECORDERS = 32
_CALLS_UNTIL_OVER = 200
"""Number of calls without an update of a model, after which its training is over if another one needs its place."""

_CALLS_UNTIL_OTHER = 20
"""Number of calls without an update of the model that counts steps, after which another one does: the program trains another model now. A
critic is updated a few times for each update of its generator."""


@dataclass
class _Model:
    """The parameters of one optimizer.

    Attributes:
        recorder: records its updates.
        layout: sizes and kinds of the gradients.
        layers: number of layers of each parameter; 1 for one that is not a stack.
        ring: reads its updates inside of scans; None if there are none.
        held: updates that were taken from the ring, and wait for those of other models.
        called: number of the last call with its updates.
    """

    recorder: UpdateRecorder
    layout: HostLayout | None
    layers: tuple[int, ...]
    ring: RingReader | None = None
    held: list[RingStep] = field(default_factory=list)
    called: int = 0


@dataclass(frozen=True)
class _PendingUpdate:
    """The extra outputs of one update of a call, which are not read yet.

    Attributes:
        model: the parameters.
        outputs: the extra outputs.
        weights: the weights before it, if they were due.
        activations: rows that the call has written, if they were due.
    """

    model: _Model
    outputs: UpdateOutputs
    weights: PremeasuredWeights | None
    activations: ActivationSnapshot | None = None


@dataclass(frozen=True)
class _PendingCall:
    """A call whose updates are not read yet.

    Attributes:
        updates: its updates.
        bundled: its arguments; None if they are not kept.
        earlier: calls without an update before it.
    """

    updates: Sequence[_PendingUpdate]
    bundled: BundledCall | None
    earlier: Sequence[BundledCall] = ()


@dataclass(frozen=True)
class _PendingRings:
    """A call that has written to rings which are not read yet.

    Attributes:
        rings: these, each with its model.
        bundled: its arguments; None if they are not kept.
        earlier: calls without an update before it.
    """

    rings: Sequence[tuple[_Model, RingReader]]
    bundled: BundledCall | None
    earlier: Sequence[BundledCall]


class _CallWeights(threading.local):
    """Weights that were measured before the call that a thread is about to make, by the id of their model."""

    def __init__(self) -> None:
        self.by_model: dict[int, PremeasuredWeights] = {}


_ModelKey = tuple[Any, ...]


class UpdateReader:
    """Reads the extra outputs of compiled steps, and passes them to the recorder. Used on the training thread."""

    def __init__(
        self,
        session: Session,
        on_nonfinite: OnNonfinite,
        bundles: StepBundles,
        ranks: int = 1,
        redo: CallRedo | None = None,
    ) -> None:
        """Start without updates.

        Args:
            session: the recording.
            on_nonfinite: the gate policy.
            bundles: writes bundles of steps.
            ranks: number of ranks of the run.
            redo: computes the step that stops the training again; None if it is not.
        """
        self._ranks = ranks
        self._redo = redo
        self._bundles = bundles
        self._session = session
        self._on_nonfinite = on_nonfinite
        self._models: dict[_ModelKey, _Model] = {}
        self._earlier: set[_ModelKey] = set()
        self._functions: weakref.WeakSet[CompiledStep] = weakref.WeakSet()
        self._weights = _CallWeights()
        self._pending: list[_PendingCall] = []
        self._dispatches: deque[_PendingRings] = deque()
        self._reading = threading.RLock()  # a signal's handler may close the hook
        self._counting: _Model | None = None
        self._others = 0
        self._calls = 0
        self._by_hand = False
        self._activations: ActivationReader | None = None
        self._closed = False
        self._process = os.getpid()

    def observe_activations(self) -> None:
        """Record what modules write."""
        self._activations = ActivationReader(self._session)

    def about_to_dispatch(self, function: CompiledStep, arguments: Any) -> None:
        """Record the updates of the last call, and measure weights that are due before they are donated."""
        if self._closed:
            return
        self._calls += 1
        self._wait(self._rings())
        own_work.enter()
        try:
            self._bundles.about_to_call(arguments)
            self._settle()
            self._read_rings()
            if function.has_inner_updates:
                self._prepare_rings(function)
            if not function.has_inner_updates:
                self._session.recorder.begin()  # what the program logs from now on belongs to the next step
            if self._activations is not None and function.observed.has_rows:
                step = self._session.recorder.last_finished + 1
                self._activations.about_to_dispatch(step, has_inner_updates=function.has_inner_updates)
            self._measure_weights(function, arguments)
            if not function.has_inner_updates or self._bundles.keeps_all:
                self._bundles.keep_donated(function)
            if not function.has_inner_updates:  # else a call has several steps
                self._bundles.write_requested(self._session.recorder.step, function, arguments)
        except StopTraining:
            raise
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._session.health.fault("jax", error)
        finally:
            own_work.leave()

    def _read_rings(self, *, at_end: bool = False) -> None:
        """Record what rings have recorded and has arrived, in the order of the dispatches, unless another thread does."""
        if not self._reading.acquire(blocking=at_end):
            return
        try:
            self._read_dispatches(at_end=at_end)
        finally:
            self._reading.release()

    def _read_dispatches(self, *, at_end: bool) -> None:
        while self._dispatches and (at_end or all(ring.is_due for _, ring in self._dispatches[0].rings)):
            with dispatching:
                dispatch = self._dispatches.popleft()
                for model, ring in dispatch.rings:
                    model.held += ring.take()
                    self._explain_updates_of(model, dispatch.bundled, dispatch.earlier)
                # Large rows arrive a dispatch later. The updates of other models are of the same steps, and wait for them.
                if len(dispatch.rings) == 1 or all(ring.is_complete for _, ring in dispatch.rings):
                    self._record_held()
        if not at_end:
            return
        rings = [(model, model.ring) for model in self._models.values() if model.ring is not None]
        try:
            with dispatching:
                for model, ring in rings:
                    model.held += ring.take_rest()
                self._record_held()
        finally:
            for _, ring in rings:
                ring.release()

    def _record_held(self) -> None:
        """Record the updates that were taken from rings.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        updates = [(model, model.held) for model in self._models.values()]
        for model, _ in updates:
            model.held = []
        self._record_rings(updates)

    def _record_rings(self, updates: Sequence[tuple[_Model, Sequence[RingStep]]]) -> None:
        """Record the updates of a dispatch. Those of several models alternate, as they do in the body of a scan.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        made = [(model, steps) for model, steps in updates if steps]
        if not made:
            return
        self._count_steps([model for model, _ in made])
        for model, _ in made:
            model.recorder.bundle_bad_step = None
            self._read_activations_of(model)
        # The update of the model that counts steps ends a step, to which the others belong.
        places = sorted(
            ((number + 0.5) / len(steps), model is self._counting, order, number)
            for order, (model, steps) in enumerate(made)
            for number in range(len(steps))
        )
        stop: StopTraining | None = None
        for _, _, order, number in places:
            model, steps = made[order]
            assert model.ring is not None
            try:
                model.ring.record(steps[number], self._loss_name(model))
            except StopTraining as error:
                stop = stop or error  # the program has made this update and the later ones
                model.recorder.end_step()
        if stop is not None:
            self._session.recorder.stopped = stop.request
            raise stop

    def _explain_updates_of(
        self, model: _Model, call: BundledCall | None, earlier: Sequence[BundledCall], **given: Any
    ) -> None:
        """Let the next bad update of a model that stops the training be computed again from its call, if that is requested."""
        if self._redo is not None:
            given = {"parameters": (), "unmoved": None, **given}
            model.recorder.explain_bad_step = functools.partial(self._redo.explain, call, earlier, **given)

    def _read_activations_of(self, model: _Model) -> None:
        """Let the ring of the first optimizer record the activations of its updates."""
        model.recorder.record_activations = None
        if self._activations is not None and model is next(iter(self._models.values())):
            self._activations.begin_ring(self._session.recorder.last_finished + 1)
            model.recorder.record_activations = self._activations.record_inner

    def _prepare_rings(self, function: CompiledStep) -> None:
        """Make the rings of a function usable, those of an earlier recording of this process included."""
        for layout in function.inner_layouts:
            model = self._model_of(layout, rank=layout.rank)
            if model is None or not has_rings():
                continue
            if model.ring is None:
                model.ring = RingReader(self._session, model.recorder, (*layout.structure, layout.rank))
            with dispatching:
                is_usable = model.ring.check()
            if not is_usable:
                function.disable()
                warn_of_unobserved(
                    self._session.health, "a step is not observed any more after a call of it failed"
                )

    def _wait(self, rings: Sequence[RingReader]) -> None:
        """Wait for the last call. The next one depends on it: waiting is the program's time, not the recorder's."""
        try:
            jax.block_until_ready([update.outputs for call in self._pending for update in call.updates])
            for ring in rings:
                ring.wait()
        except Exception as error:  # noqa: BLE001 - it is the program's own, and raised where that reads its results
            self._pending = []
            self._session.health.fault("jax", error)

    def dispatched(self, function: CompiledStep, updates: StepOutputs, arguments: Any, result: Any) -> None:
        """Keep the extra outputs of a call until the next one."""
        if self._closed:
            return
        try:
            outputs = [update for update in updates if isinstance(update, UpdateOutputs)]
            call: list[_PendingUpdate] = []
            rings: dict[int, tuple[_Model, RingReader]] = {}
            activations = None
            if self._activations is not None and function.observed.has_rows:
                activations = self._activations.dispatched(has_inner_updates=function.has_inner_updates)
            weights, self._weights.by_model = self._weights.by_model, {}
            for update, rank in zip(outputs, ranks_of([update.layout for update in outputs]), strict=True):
                model = self._model_of(update.layout, stacked_of(update.layout), rank)
                if model is not None:
                    call.append(_PendingUpdate(model, update, weights.pop(id(model), None), activations))
            layouts = [update.layout for update in outputs]
            bundled = self._bundles.called(function, layouts, arguments, result)
            earlier = () if self._redo is None else self._redo.take_recent()
            if call:
                self._pending.append(_PendingCall(call, bundled, earlier))
            for layout in function.inner_layouts:
                ring_model = self._models.get((*layout.structure, layout.rank))
                if ring_model is not None and ring_model.ring is not None:
                    rings[id(ring_model)] = ring_model, ring_model.ring
            if copied := [(ring_model, ring) for ring_model, ring in rings.values() if ring.dispatched()]:
                self._dispatches.append(_PendingRings(copied, bundled, earlier))
        except Exception as error:  # noqa: BLE001 - as above
            self._session.health.fault("jax", error)

    def dispatch_failed(self, function: CompiledStep) -> None:
        """Repair what a call that raised has left of rings. Never raises."""
        for ring in self._rings():
            if not ring.repair():
                function.disable()

    def eager(self, update: TracedUpdate, loss: Any) -> None:
        """Record an update that the program makes without a compiled step.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        if self._pending:  # of a compiled step before this update
            self._wait(())
            self._settle()
        outputs = traced_updates.outputs_of(update, loss, {})
        model = None if self._closed else self._model_of(outputs.layout)
        if model is None:
            return
        leaves = jax.tree_util.tree_leaves(update.parameters)
        weights = JaxArrays(tuple(leaves)) if len(leaves) == len(outputs.gradients) else None
        self._count_steps([model])
        model.recorder.bundle_bad_step = model.recorder.record_activations = None
        earlier = () if self._redo is None else self._redo.take_recent()
        self._explain_updates_of(model, None, earlier, parameters=leaves)
        self._record(model, outputs, weights, () if weights is None else weights.places())

    def trace(self, update: TracedUpdate, loss: Any) -> None:
        """Let a program that is being traced record an update in device memory. Never raises."""
        try:
            outputs = traced_updates.outputs_of(update, loss, {})
            layout = outputs.layout
            model = None if self._closed else self._model_of(layout, rank=layout.rank)
            if model is None:
                return
            if model.ring is None:
                if not has_rings():
                    return  # health has it
                model.ring = RingReader(self._session, model.recorder, (*layout.structure, layout.rank))
            model.ring.trace(update, outputs)
            shardings = traced_updates.shardings_of(layout) or ()
            self._check_ranks(is_divided=any(not place.is_fully_addressable for place in shardings))
            self._trace_activations(model, update)
        except Exception as error:  # noqa: BLE001 - as above
            self._session.health.fault("jax", error)

    def _trace_activations(self, model: _Model, update: TracedUpdate) -> None:
        """Let a program that is being traced count the updates of the first optimizer, which are those of activations."""
        if self._activations is None:
            return  # the ring is of an earlier recording of this process
        obstacle, _ = surroundings()
        if obstacle is None and activation_ring.is_traced and model is next(iter(self._models.values())):
            try:
                activation_ring.count_inner(update.emitted)
            except ValueError as reason:
                self._session.health.note("activations", str(reason))

    def _rings(self) -> list[RingReader]:
        return [model.ring for model in self._models.values() if model.ring is not None]

    def close(self) -> None:
        """Record the last updates. A stop that is due is not raised: the program has ended."""
        if self._closed:
            return
        self._closed = True
        if self._redo is not None:
            self._redo.program_ends()
        try:
            # In a forked child the runtime of JAX has no threads, and would be waited for forever.
            if os.getpid() == self._process:
                self._settle()
                self._read_rings(at_end=True)
        except StopTraining:
            pass
        except Exception as error:  # noqa: BLE001 - as above
            self._session.health.fault("jax", error)
        if self._activations is not None:
            self._activations.close()
        self._models.clear()
        self._pending = []
        self._dispatches.clear()
        self._bundles.forget()
        if self._redo is not None:
            self._redo.close()

    def count_by_hand(self) -> None:
        """Record the updates so far, whose step `Hook.step` ends, and count steps by it from now on.

        Raises:
            StopTraining: a guard or the gate policy requests it.
        """
        self._by_hand = True
        self._catch_up()

    def restart(self) -> None:
        """Record the updates so far, and let the model of the next update count steps, because another training begins.

        Raises:
            StopTraining: a guard or the gate policy requests it.
        """
        if not self._closed:
            self._catch_up()
            self._counting, self._others = None, 0
            self._earlier = set(self._models)

    def _catch_up(self) -> None:
        self._wait(self._rings())
        self._settle()
        self._read_rings()

    def _model_of(
        self, layout: UpdateLayout, stacked: Sequence[bool] | None = None, rank: int = 0
    ) -> _Model | None:
        key = (*layout.structure, rank)
        model = self._models.get(key)
        self._earlier.discard(key)
        if model is None:
            if len(self._models) >= _MAX_RECORDERS:
                self._make_room()
            if len(self._models) >= _MAX_RECORDERS:
                self._session.health.count("unobserved_optimizers")
                warn_of_unobserved(
                    self._session.health,
                    f"updates of more than {_MAX_RECORDERS} models within {_CALLS_UNTIL_OVER} calls are not observed",
                )
                return None
            infos = describe(layout.paths, layout.shapes, layout.dtypes)
            infos, layers = layer_descriptions(infos, stacked or (False,) * len(infos))
            names = {info.name for other in self._models.values() for info in other.recorder.parameters}
            distinct, number = infos, len(self._models)
            while names & {info.name for info in distinct}:
                number += 1
                distinct = prefixed(infos, f"model_{number}")
            recorder = UpdateRecorder(
                self._session,
                distinct,
                on_nonfinite=self._on_nonfinite,
                counts_steps=False,
                withholds=True,
            )
            model = self._models[key] = _Model(
                recorder, HostLayout.of(layout.shapes, layout.dtypes, layers), layers
            )
        model.called = self._calls
        return model

    def _make_room(self) -> None:
        """Forget a model of an earlier training, or the one without a ring whose updates ended longest ago."""
        if self._earlier:
            first = next(other for other in self._models if other in self._earlier)
            self._earlier.remove(first)
        else:
            without_ring = [key for key, model in self._models.items() if model.ring is None]
            if not without_ring:
                return
            first = min(without_ring, key=lambda key: self._models[key].called)
            if self._calls - self._models[first].called < _CALLS_UNTIL_OVER:
                return
        del self._models[first]

    def _count_steps(self, models: Sequence[_Model]) -> None:
        """Choose the model whose updates are steps: the first one, until it makes none in many calls."""
        if self._counting is None:
            self._counting = models[0]
        if any(model is self._counting for model in models):
            self._others = 0
        else:
            self._others += 1
            if self._others > _CALLS_UNTIL_OTHER:
                self._counting, self._others = models[0], 0
        for model in self._models.values():
            model.recorder.counts_steps = model is self._counting and not self._by_hand

    def _loss_name(self, model: _Model) -> str:
        """Return the name of a model's losses, which has a number if another one counts steps."""
        if model is self._counting:
            return "loss"
        return f"loss_{1 + list(self._models.values()).index(model)}"

    def _measure_weights(self, function: CompiledStep, arguments: Any) -> None:
        """Measure the weights among a step's arguments, if they are due."""
        weights = self._weights.by_model = {}
        if function in self._functions and not any(
            "weight" in model.recorder.due() for model in self._models.values()
        ):
            return
        self._functions.add(function)
        called = function.layouts_of(*arguments)
        leaves = jax.tree_util.tree_leaves(arguments)
        for update, rank in zip(called, ranks_of([update.layout for update in called]), strict=True):
            model = self._model_of(update.layout, update.stacked, rank)
            places = [place for place in update.layout.inputs if place is not None]
            if model is None or len(places) < len(update.layout.inputs) or id(model) in weights:
                continue
            chosen = tuple(leaves[place] for place in places if place < len(leaves))
            if "weight" in model.recorder.due() and len(chosen) == len(places):
                measured = self._premeasured(model, chosen)
                if measured is not None:
                    weights[id(model)] = measured

    def _premeasured(self, model: _Model, arrays: tuple[Any, ...]) -> PremeasuredWeights | None:
        if not all(isinstance(array, jax.Array) and is_on_host(array) for array in arrays):
            return None
        jax.block_until_ready(arrays)
        shapes, dtypes = [array.shape for array in arrays], [array.dtype.name for array in arrays]
        values = JaxArrays(arrays, HostLayout.of(shapes, dtypes, model.layers), model.layers)
        rows, measurement = values.measure(range(sum(model.layers)))
        saves = self._session.full_tensors.active and self._session.full_tensors.any_due(model.recorder.step)
        copies = {row: values.array(row) for row in rows} if saves else {}
        return PremeasuredWeights(tuple(rows), measurement, values.places(), copies)

    def _settle(self) -> None:
        """Record the updates of the calls so far. Those that are no steps come first, and belong to the step that the others end."""
        pending, self._pending = self._pending, []
        for call in pending:
            updates = call.updates
            self._count_steps([update.model for update in updates])
            first = updates[0]
            first.model.recorder.bundle_bad_step = (
                None
                if call.bundled is None or not call.bundled.has_one_update
                else functools.partial(self._bundles.write_bad, call.bundled, first.outputs.unmoved)
            )
            for update in updates:
                unmoved = update.outputs.unmoved
                self._explain_updates_of(update.model, call.bundled, call.earlier, unmoved=unmoved)
            try:
                self._record_call(updates)
            finally:
                first.model.recorder.bundle_bad_step = None  # it refers to the arguments
                for update in updates:
                    update.model.recorder.explain_bad_step = None

    def _record_call(self, updates: Sequence[_PendingUpdate]) -> None:
        ordered = sorted(updates, key=lambda update: update.model.recorder.counts_steps)
        for update in ordered:
            update.model.recorder.record_activations = None
            if self._activations is not None and update is ordered[-1]:
                self._activations.of_call(update.activations)
                update.model.recorder.record_activations = self._activations.record_call
            places = () if update.weights is None else update.weights.places
            self._record(update.model, update.outputs, update.weights, places)

    def _record(
        self,
        model: _Model,
        outputs: UpdateOutputs,
        weights: TensorValues | None,
        weight_places: Sequence[Placement],
    ) -> None:
        losses = {}
        if outputs.loss is not None:
            losses[self._loss_name(model)] = float(np.asarray(outputs.loss))
        is_skipped = outputs.skipped is not None and bool(outputs.skipped)
        if outputs.emitted is not None and not bool(outputs.emitted):
            if not is_skipped:  # else no update has this micro-batch
                model.recorder.add_losses(losses)
            return
        hyperparameters = {
            name: float(np.asarray(value))
            for name, value in zip(outputs.layout.hyperparameters, outputs.hyperparameters, strict=True)
        }
        scale = hyperparameters.pop(SCALE, None)
        withheld = None if outputs.withheld is None else bool(outputs.withheld)
        gradients = JaxArrays(outputs.gradients, model.layout, model.layers)
        gradient_places = gradients.places("reduced")
        self._check_ranks(is_divided=bool(gradient_places))
        model.recorder.record(
            Update(
                gradients=gradients,
                weights=weights,
                losses=losses,
                metrics=scaler_metrics(scale, is_skipped=is_skipped),
                hyperparameters=hyperparameters,
                is_skipped=is_skipped,
                is_withheld=bool(withheld),
                # The step has checked all gradients, if it withholds updates.
                is_bad=None if is_skipped else withheld,
                places={"weight": weight_places, "gradient": gradient_places},
            )
        )

    def _check_ranks(self, *, is_divided: bool) -> None:
        """Note in health if the processes that arrays are divided among are not the ranks of the run."""
        processes, ranks = jax.process_count(), self._ranks
        if is_divided and ranks != processes:
            self._session.health.note(
                "jax",
                f"arrays are divided among {processes} processes, and the run has {ranks} ranks: set RANK and WORLD_SIZE",
            )


_readers: weakref.WeakKeyDictionary[Hook, UpdateReader] = weakref.WeakKeyDictionary()


class Recording:
    """Records a JAX program with a hook. Another one with the same hook is the same recording.

    Example::

        import watchstep
        from watchstep.jax import Recording

        hook = watchstep.Hook("s3://bucket/runs")
        Recording(hook)                     # before the optimizer and the compiled step are created
        optimizer = optax.adamw(1e-3)
        step = jax.jit(train_step)
        ...
        hook.close()
    """

    def __init__(
        self, hook: Hook, *, figures: Literal["host", "device"] | None = None, activations: bool = False
    ) -> None:
        """Record with a hook.

        Args:
            hook: an open hook. The recording ends when it is closed.
            figures: where gradients are measured. ``"host"``: they are outputs of the compiled step, and measured in host memory.
                ``"device"``: the step measures them itself. Default: in host memory if JAX computes there.
            activations: whether outputs of modules of Flax NNX, Flax linen and Equinox are recorded, in steps that are traced afterwards.
                The hook's configuration has the collection ``activations`` unless it is left out.
        """
        self._reader: UpdateReader | None = None
        jax_names.report_to(health_of(hook))
        with contained(hook, "JAX"):
            self._reader = _readers.get(hook)
            if self._reader is None:
                self._start(hook, figures, activations=activations)

    def _start(self, hook: Hook, figures: Literal["host", "device"] | None, *, activations: bool) -> None:
        policy = hook._on_nonfinite  # noqa: SLF001 - part of the hook's own package
        install()
        measures = None if figures is None else figures == "device"
        request_settings(self, StepSettings(policy.action != "record", measures))
        session, identity = hook._session, hook._identity  # noqa: SLF001 - as above
        bundles = StepBundles(
            session,
            identity,
            hook.run_url,
            withholds=policy.action != "record",
            keeps_all=hook._explains,  # noqa: SLF001 - as above
        )
        redo = CallRedo(session, identity.worker, bundles) if hook._explains else None  # noqa: SLF001 - as above
        reader = UpdateReader(session, policy, bundles, identity.world_size, redo)
        self._health = session.health
        observes = activations and tensors.ACTIVATIONS in session.config.chosen
        modules.observe_modules(observes)
        if observes:
            reader.observe_activations()
        self._reader = _readers[hook] = reader
        hook.attach_updates(reader.count_by_hand, self.close, explains=True)
        compiled_steps.observe(reader)
        traced_updates.observers_of_inner.append(self.inner_update)
        traced_updates.faults.append(session.health.fault)
        traced_updates.not_observed.append(self.not_observed)
        traced_updates.activations_not_observed.append(self.activations_not_observed)

    def not_observed(self, what: str) -> None:
        """State that updates are not observed."""
        warn_of_unobserved(self._health, what)

    def activations_not_observed(self, what: str) -> None:
        """State in health that activations are not observed."""
        self._health.note("activations", what)

    def about_to_dispatch(self, function: CompiledStep, arguments: Any) -> None:
        """Measure the weights before the first update of a program."""
        if self._reader is not None:
            self._reader.about_to_dispatch(function, arguments)

    def inner_update(self, update: TracedUpdate, loss: Any) -> None:
        """Record an update that is not an output of a compiled function."""
        if self._reader is None:
            return
        if is_top_level():
            self._reader.eager(update, loss)
        else:
            self._reader.trace(update, loss)

    def restart(self) -> None:
        """Let the model of the next update count steps, because another training begins.

        Raises:
            StopTraining: a guard or the gate policy requests it.
        """
        if self._reader is not None:
            self._reader.restart()

    def close(self) -> None:
        """Record the last update, and stop observing."""
        if self._reader is None:
            return
        self._reader.close()
        compiled_steps.forget(self._reader)
        withdraw_settings(self)
        modules.observe_modules(False)
        if self.inner_update in traced_updates.observers_of_inner:
            traced_updates.observers_of_inner.remove(self.inner_update)
            traced_updates.not_observed.remove(self.not_observed)
            traced_updates.activations_not_observed.remove(self.activations_not_observed)
            traced_updates.faults.remove(self._health.fault)


@functools.cache
def install() -> None:
    """Observe optimizers and compiled functions that are created from now on, in this process."""
    optimizers.install()
    compiled_steps.install()
