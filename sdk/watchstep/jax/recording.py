"""Recording of JAX programs with optax: gradients, weights, losses and hyperparameters of each update.

``watchstep.jax.Recording(hook)`` records the compiled steps that are created afterwards. A step's extra outputs are read when the
program calls the next one, so that the program never waits for more than the update that it depends on anyway.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from watchstep.capture.steps.own_work import own_work
from watchstep.capture.steps.session import Session
from watchstep.hook import Hook
from watchstep.jax import compiled_steps, optimizers, traced_updates
from watchstep.jax.compiled_steps import CompiledStep
from watchstep.jax.host_values import HostLayout, JaxArrays, is_on_host
from watchstep.jax.names import describe, layer_descriptions
from watchstep.jax.ring_reader import RingReader
from watchstep.jax.step_bundles import StepBundles
from watchstep.jax.step_ring import is_available
from watchstep.jax.traced_updates import (
    InnerUpdates,
    StepOutputs,
    TracedUpdate,
    UpdateLayout,
    UpdateOutputs,
)
from watchstep.kernels.measurement import Measurement
from watchstep.stopping import OnNonfinite, StopTraining
from watchstep.updates.program_updates import SCALE, scaler_metrics
from watchstep.updates.tensor_values import TensorValues
from watchstep.updates.update_recorder import Update, UpdateRecorder

_MAX_RECORDERS = 8


@dataclass(frozen=True)
class _Premeasured:
    """Weights that were measured before the step that donates them.

    Attributes:
        rows: indices of the measured parameters.
        measurement: their statistics.
        arrays: copies of those that are saved in full.
    """

    rows: tuple[int, ...]
    measurement: Measurement
    arrays: dict[int, Any] = field(default_factory=dict)
    is_measured: ClassVar[bool] = False

    def measure(self, rows: Any) -> tuple[list[int], Measurement]:
        if tuple(rows) == self.rows:
            return list(self.rows), self.measurement
        places = {row: place for place, row in enumerate(self.rows)}
        chosen = [row for row in rows if row in places]
        return chosen, _Chosen(self.measurement, tuple(places[row] for row in chosen))

    def has_nonfinite(self, turn: int, slices: int) -> bool:  # noqa: ARG002 - weights are not checked
        return False

    def array(self, row: int) -> Any:
        return self.arrays.get(row)


@dataclass(frozen=True)
class _Chosen:
    """Some rows of a measurement."""

    measurement: Measurement
    places: tuple[int, ...]

    @property
    def nonfinite(self) -> bool | None:
        return self.measurement.nonfinite

    def collect(self) -> Any:
        return self.measurement.collect().take(np.array(self.places, np.intp))


@dataclass
class _Model:
    """The parameters of one optimizer.

    Attributes:
        recorder: records its updates.
        layout: sizes and kinds of the parameters.
        layers: number of layers of each parameter; 1 for one that is not a stack.
        pending: extra outputs of its last update, which are not read yet.
        weights: weights before that update, if they were due.
        ring: reads its updates inside of scans; None if there are none.
    """

    recorder: UpdateRecorder
    layout: HostLayout | None
    layers: tuple[int, ...]
    pending: UpdateOutputs | None = None
    weights: _Premeasured | None = None
    ring: RingReader | None = None


class UpdateReader:
    """Reads the extra outputs of compiled steps, and passes them to the recorder. Used on the training thread."""

    def __init__(self, session: Session, on_nonfinite: OnNonfinite, bundles: StepBundles) -> None:
        """Start without updates.

        Args:
            session: the recording.
            on_nonfinite: the gate policy.
            bundles: writes bundles of steps.
        """
        self._bundles = bundles
        self._session = session
        self._on_nonfinite = on_nonfinite
        self._models: dict[tuple[Any, ...], _Model] = {}
        self._closed = False
        self._process = os.getpid()

    def about_to_dispatch(self, function: CompiledStep, arguments: Any) -> None:
        """Record the last update of a function's models, and measure weights that are due before they are donated."""
        if self._closed:
            return
        models = [model for layout in function.layouts if (model := self._models.get(_key(layout)))]
        rings = self._rings()
        # The next step depends on these outputs. Waiting for them is the program's time, not the recorder's.
        jax.block_until_ready([model.pending for model in models])
        for ring in rings:
            ring.wait()
        own_work.enter()
        try:
            self._bundles.about_to_call(arguments)
            for model in models:
                self._settle(model)
            for ring in rings:
                ring.read()
            if function.layouts:
                self._session.recorder.begin()  # what the program logs from now on belongs to the next step
            for layout in function.layouts:
                self._measure_weights(function, layout, arguments)
            self._bundles.write_requested(self._session.recorder.step, function, arguments)
        except StopTraining:
            raise
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._session.health.fault("jax", error)
        finally:
            own_work.leave()

    def dispatched(self, function: CompiledStep, updates: StepOutputs, arguments: Any, result: Any) -> None:
        """Keep the extra outputs of a call until the next one."""
        if self._closed:
            return
        try:
            for update in updates:
                if isinstance(update, InnerUpdates):
                    for ring in self._rings():
                        ring.dispatched()
                elif (
                    model := self._model_of(update.layout, function.stacked.get(update.layout))
                ) is not None:
                    model.pending = update
            self._bundles.called(function, arguments, result)
        except Exception as error:  # noqa: BLE001 - as above
            self._session.health.fault("jax", error)

    def eager(self, update: TracedUpdate, loss: Any) -> None:
        """Record an update that the program makes without a compiled step.

        Raises:
            StopTraining: a stop is due and the program opted in.
        """
        outputs = traced_updates.outputs_of(update, loss, {})
        model = None if self._closed else self._model_of(outputs.layout)
        if model is None:
            return
        leaves = jax.tree_util.tree_leaves(update.parameters)
        weights = JaxArrays(tuple(leaves)) if len(leaves) == len(outputs.gradients) else None
        self._record(model, outputs, weights)

    def trace(self, update: TracedUpdate, loss: Any) -> None:
        """Let a program that is being traced record an update in device memory. Never raises."""
        try:
            outputs = traced_updates.outputs_of(update, loss, {})
            model = None if self._closed else self._model_of(outputs.layout)
            if model is None:
                return
            if model.ring is None:
                if not is_available():
                    self._session.health.note(
                        "jax",
                        f"jax {jax.__version__} has no jax.new_ref: updates inside of a scan are not observed",
                    )
                    return
                model.ring = RingReader(self._session, model.recorder)
            model.ring.trace(update, outputs)
        except Exception as error:  # noqa: BLE001 - as above
            self._session.health.fault("jax", error)

    def _rings(self) -> list[RingReader]:
        return [model.ring for model in self._models.values() if model.ring is not None]

    def close(self) -> None:
        """Record the last update. A stop that is due is not raised: the program has ended."""
        if self._closed:
            return
        self._closed = True
        try:
            # In a forked child the runtime of JAX has no threads, and would be waited for forever.
            for model in self._models.values() if os.getpid() == self._process else ():
                self._settle(model)
                if model.ring is not None:
                    model.ring.read(at_end=True)
        except StopTraining:
            pass
        except Exception as error:  # noqa: BLE001 - as above
            self._session.health.fault("jax", error)
        self._models.clear()

    def count_by_hand(self) -> None:
        """Count steps by `Hook.step` from now on."""
        for model in self._models.values():
            model.recorder.counts_steps = False

    def _model_of(self, layout: UpdateLayout, stacked: Sequence[bool] | None = None) -> _Model | None:
        key = _key(layout)
        model = self._models.get(key)
        if model is None:
            if len(self._models) >= _MAX_RECORDERS:
                self._session.health.count("unobserved_optimizers")
                return None
            infos = describe(layout.paths, layout.shapes, layout.dtypes)
            infos, layers = layer_descriptions(infos, stacked or (False,) * len(infos))
            recorder = UpdateRecorder(
                self._session,
                infos,
                on_nonfinite=self._on_nonfinite,
                counts_steps=not self._models,
                withholds=True,
            )
            if self._bundles.can_bundle_bad_steps and not self._models:
                recorder.bundle_bad_step = self._bundles.write_bad
            model = self._models[key] = _Model(
                recorder, HostLayout.of(layout.shapes, layout.dtypes, layers), layers
            )
        return model

    def _measure_weights(self, function: CompiledStep, layout: UpdateLayout, arguments: Any) -> None:
        """Measure the weights among a step's arguments, if they are due."""
        model = self._model_of(layout, function.stacked.get(layout))
        if model is None:
            return
        model.weights = None
        if None in layout.inputs or "weight" not in model.recorder.due():
            return
        leaves = jax.tree_util.tree_leaves(arguments)
        chosen = tuple(leaves[place] for place in layout.inputs if place is not None)
        if not all(isinstance(leaf, jax.Array) and is_on_host(leaf) for leaf in chosen):
            return
        jax.block_until_ready(chosen)
        values = JaxArrays(chosen, model.layout, model.layers)
        rows, measurement = values.measure(range(sum(model.layers)))
        saves = self._session.full_tensors.active and self._session.full_tensors.any_due(model.recorder.step)
        arrays = {row: values.array(row) for row in rows} if saves else {}
        model.weights = _Premeasured(tuple(rows), measurement, arrays)

    def _settle(self, model: _Model) -> None:
        """Wait for the last update of a model, and record it."""
        outputs, model.pending = model.pending, None
        if outputs is not None:
            weights, model.weights = model.weights, None
            self._record(model, outputs, weights)

    def _record(self, model: _Model, outputs: UpdateOutputs, weights: TensorValues | None) -> None:
        losses = {"loss": float(np.asarray(outputs.loss))} if outputs.loss is not None else {}
        if outputs.emitted is not None and not bool(outputs.emitted):
            model.recorder.add_losses(losses)
            return
        hyperparameters = {
            name: float(np.asarray(value))
            for name, value in zip(outputs.layout.hyperparameters, outputs.hyperparameters, strict=True)
        }
        scale = hyperparameters.pop(SCALE, None)
        is_skipped = outputs.skipped is not None and bool(outputs.skipped)
        model.recorder.record(
            Update(
                gradients=JaxArrays(outputs.gradients, model.layout, model.layers),
                weights=weights,
                losses=losses,
                metrics=scaler_metrics(scale, is_skipped=is_skipped),
                hyperparameters=hyperparameters,
                is_skipped=is_skipped,
                is_withheld=outputs.withheld is not None and bool(outputs.withheld),
            )
        )


def _key(layout: UpdateLayout) -> tuple[Any, ...]:
    """Return what distinguishes the parameters of one optimizer from those of another."""
    return layout.paths, layout.shapes


class Recording:
    """Records a JAX program with a hook.

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

    def __init__(self, hook: Hook, *, figures: Literal["host", "device"] | None = None) -> None:
        """Record with a hook.

        Args:
            hook: an open hook. The recording ends when it is closed.
            figures: where gradients are measured. ``"host"``: they are outputs of the compiled step, and measured in host memory.
                ``"device"``: the step measures them itself. Default: in host memory if JAX computes there.
        """
        policy = hook._on_nonfinite  # noqa: SLF001 - part of the hook's own package
        install()
        traced_updates.withhold_nonfinite(policy.action != "record")
        traced_updates.measure_on_device(
            figures == "device" or (figures is None and jax.default_backend() != "cpu")
        )
        session = hook._session  # noqa: SLF001 - as above
        bundles = StepBundles(
            session,
            hook._identity,  # noqa: SLF001 - as above
            hook.run_url,
            withholds=policy.action != "record",
        )
        self._reader = UpdateReader(session, policy, bundles)
        self._health = session.health
        compiled_steps.observe(self._reader)
        traced_updates.observers_of_inner.append(self.inner_update)
        traced_updates.faults.append(session.health.fault)
        hook.attach_updates(self._reader.count_by_hand, self.close)

    def about_to_dispatch(self, function: CompiledStep, arguments: Any) -> None:
        """Measure the weights before the first update of a program."""
        self._reader.about_to_dispatch(function, arguments)

    def inner_update(self, update: TracedUpdate, loss: Any) -> None:
        """Record an update that is not an output of a compiled function."""
        if traced_updates.is_top_level():
            self._reader.eager(update, loss)
        else:
            self._reader.trace(update, loss)

    def close(self) -> None:
        """Record the last update, and stop observing."""
        self._reader.close()
        compiled_steps.forget(self._reader)
        if self.inner_update in traced_updates.observers_of_inner:
            traced_updates.observers_of_inner.remove(self.inner_update)
        if self._health.fault in traced_updates.faults:
            traced_updates.faults.remove(self._health.fault)


@functools.cache
def install() -> None:
    """Observe optimizers and compiled functions that are created from now on, in this process."""
    optimizers.install()
    compiled_steps.install()
