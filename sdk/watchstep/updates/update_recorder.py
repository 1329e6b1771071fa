"""Recording of updates: the gate, statistics of weights and gradients, losses and hyperparameters of each step.

An adapter of a framework observes an update, often after the program has dispatched the next one, and passes it on here, on the training
thread. A step of the run is one update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from watchstep.capture.config import placed
from watchstep.capture.given.arrays import save_array
from watchstep.capture.steps.metric_names import NONFINITE_APPLIED, WITHHELD
from watchstep.capture.steps.own_work import own_work
from watchstep.capture.steps.record import Group
from watchstep.capture.steps.session import Session
from watchstep.errors import ConfigError
from watchstep.format import tensors
from watchstep.format.tensors import Placement, TensorInfo
from watchstep.stopping import NOT_AGAIN, OnNonfinite
from watchstep.updates.tensor_values import PartialValues, TensorValues

_SLICES = 8
_REPEAT_INTERVAL = 1000
"""Number of steps after which an unchanged hyperparameter is recorded again, for readers of a window of steps."""

_MAX_HYPERPARAMETERS = 64
_STEPS_UNTIL_REPORT = 3

Role = Literal["weight", "gradient"]


@dataclass(frozen=True)
class Update:
    """One update, as the adapter has observed it.

    Attributes:
        gradients: gradients as the optimizer received them, unscaled; None if they were not observed.
        weights: weights before the update; None if they were not observed.
        losses: losses of the update by name, in mode train.
        metrics: numbers by name, such as the scale of the loss.
        hyperparameters: numbers by name, such as ``learning_rate``. They are recorded when they change.
        is_skipped: whether the framework left the update out because its gradients overflowed.
        is_withheld: whether the program left the update out as the gate policy requests.
        is_bad: whether the device has found NaN or infinity in the gradients; None if that was not checked there.
        places: for each role, which part of each parameter's tensor was measured; those of the recorder for a role that is missing or empty.
        rows: index of the parameter of each tensor; None for tensors of all parameters, in their order.
    """

    gradients: TensorValues | None = None
    weights: TensorValues | None = None
    losses: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    is_skipped: bool = False
    is_withheld: bool = False
    is_bad: bool | None = None
    places: Mapping[Role, Sequence[Placement]] = field(default_factory=dict)
    rows: Sequence[int] | None = None


@dataclass(frozen=True)
class _Part:
    """Tensors of one role with the same collections, which are due together.

    Attributes:
        collections: names of the collections.
        rows: indices of the parameters.
    """

    collections: tuple[str, ...]
    rows: tuple[int, ...]


@dataclass
class _Described:
    """The tensors of one role.

    Attributes:
        infos: description of each parameter's tensor.
        parts: those with collections.
        groups: groups of measured tensors, by their indices and places.
    """

    infos: tuple[TensorInfo, ...]
    parts: tuple[_Part, ...]
    groups: dict[tuple[tuple[int, ...], tuple[Placement, ...]], Group] = field(default_factory=dict)


class UpdateRecorder:
    """Records the updates of one set of parameters. Used on the training thread."""

    def __init__(
        self,
        session: Session,
        parameters: Sequence[TensorInfo],
        *,
        places: Sequence[Placement] = (),
        on_nonfinite: OnNonfinite | None = None,
        counts_steps: bool = True,
        withholds: bool = False,
    ) -> None:
        """Start without updates.

        Args:
            session: the recording.
            parameters: description of each parameter, with the role ``weight`` or ``bias``. Collections are assigned here.
            places: which part of a sharded parameter each one is; by default whole.
            on_nonfinite: the gate policy; by default updates are only recorded.
            counts_steps: whether each update is a step of the run. Set it to False once the program calls `Hook.step`.
            withholds: whether the adapter makes the program leave out updates by non-finite gradients.

        Raises:
            ConfigError: the gate policy leaves updates out, and the adapter cannot make the program do so.
        """
        policy = on_nonfinite or OnNonfinite()
        if policy.action == "skip" and not withholds:
            raise ConfigError(
                f"on_nonfinite={str(policy)!r} for a compiled step",
                'use on_nonfinite="stop", or let the program select its previous state (see the guide of the framework)',
            )
        self.counts_steps = counts_steps
        self.number = 1
        """Number of the optimizer in its program. From 2 on it is part of the names of its losses and metrics: ``loss_2``, ``optimizer_2:…``."""
        self.parameters = tuple(parameters)
        self._session = session
        self._recorder = session.recorder
        self._schedule = session.schedule
        self._policy = policy
        self._places = tuple(places) or (Placement(),) * len(parameters)
        self._described = self._describe_roles()
        self.bundle_bad_step: Callable[[int, Update], None] | None = None
        """Bundles the step with NaN or infinity whose update is being recorded; None if its inputs are gone."""
        self.explain_bad_step: Callable[[int, Update], str] | None = None
        """Computes the step that is about to stop the training again, and returns what it has shown; None if such steps are not computed again."""
        self.record_activations: Callable[[int], None] | None = None
        """Records the activations of the update that is being recorded, at its step."""
        self.updates_in_step = 0
        """Number of its updates in the step of its last one."""
        self._turn = 0
        self._steps = 0
        self._updated_step = -1
        self._applied_nonfinite = False
        self._in_a_row = 0
        self._hyperparameters: dict[str, tuple[int, float]] = {}
        self._records_metrics = tensors.METRICS in session.config.chosen
        self._schedule.measure_floor(own_work)

    def extend(self, parameters: Sequence[TensorInfo]) -> None:
        """Add whole parameters, of which earlier updates had none."""
        self.parameters += tuple(parameters)
        self._places += (Placement(),) * len(parameters)
        self._described = self._describe_roles()

    def _describe_roles(self) -> dict[Role, _Described]:
        gradients = [replace(info, name=f"{info.name}:gradient", role="gradient") for info in self.parameters]
        return {"weight": self._describe(self.parameters), "gradient": self._describe(gradients)}

    def _describe(self, infos: Sequence[TensorInfo]) -> _Described:
        session = self._session
        described: list[TensorInfo] = []
        parts: dict[tuple[str, ...], list[int]] = {}
        for row, info in enumerate(infos):
            built_in = {"weight": tensors.WEIGHTS, "bias": tensors.BIASES}.get(info.role, tensors.GRADIENTS)
            chosen = placed(info, (built_in,), session.config.chosen, (info.module_type,))
            session.used_collections.update(chosen.collections)
            described.append(chosen)
            if chosen.collections:
                parts.setdefault(chosen.collections, []).append(row)
        return _Described(tuple(described), tuple(_Part(names, tuple(rows)) for names, rows in parts.items()))

    def skip(self, count: int) -> None:
        """Let steps pass of which nothing is known.

        Raises:
            StopTraining: a guard requests it, after evaluating the last step.
        """
        if self.counts_steps and count > 0:
            self._recorder.begin()
            self._recorder.step += count

    def end_step(self) -> None:
        """End the step of an update that the program has made, although recording it raised `StopTraining`."""
        if self.counts_steps and not self._recorder.finished:
            self._recorder.finish()

    @property
    def step(self) -> int:
        """The step that the next recorded update belongs to."""
        return self._recorder.last_finished + 1

    def due(self) -> frozenset[Role]:
        """Return the roles with tensors that are due at the next update, as statistics or in full.

        An adapter may leave out the transfer of the others. NaN and infinity are found in gradients that it passes, due or not.
        """
        step, schedule, capture = self.step, self._schedule, self._session.full_tensors
        saves = capture.active and capture.any_due(step)
        if not saves and not schedule.any_due(self._session.used_collections, step):
            return frozenset()
        return frozenset(
            role
            for role, described in self._described.items()
            if any(
                schedule.due(part.collections, step) is not None
                or (saves and capture.due(part.collections, step) is not None)
                for part in described.parts
            )
        )

    def add_losses(self, losses: Mapping[str, float]) -> None:
        """Record losses of the current step, such as those of a micro-batch. The next update is of the same step."""
        self._recorder.begin()
        for name, value in losses.items():
            self._recorder.scalar(self._numbered(name), value, derived=True)

    def record(self, update: Update) -> None:
        """Record an update, and end its step.

        Raises:
            StopTraining: a stop is due and the program opted in, by the service, a guard, or the gate policy.
        """
        own_work.enter()
        try:
            self._record(update)
        finally:
            own_work.leave()

    def _record(self, update: Update) -> None:
        self._recorder.begin()
        self._recorder.updates += 1
        is_same = self._recorder.step == self._updated_step
        self._updated_step, self.updates_in_step = (
            self._recorder.step,
            self.updates_in_step + 1 if is_same else 1,
        )
        is_nonfinite = False
        try:
            is_nonfinite = self._measure(update)
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._session.health.fault("update", error)
        self._apply_policy(update, is_nonfinite=is_nonfinite)
        self._recorder.about_to_update()
        if self.counts_steps:
            self._recorder.finish()
            self._report_empty_collections()

    def _apply_policy(self, update: Update, *, is_nonfinite: bool) -> None:
        """Count an update that was left out, and stop if the policy requests it.

        Those that the framework leaves out itself are its own, unless their loss is not finite either and the step is to be computed again.
        """
        is_explained = self.explain_bad_step is not None and not all(
            map(math.isfinite, update.losses.values())
        )
        if not is_nonfinite or (update.is_skipped and not is_explained):
            if self._in_a_row and self._policy.action == "skip" and self._records_metrics:
                self._recorder.scalar(WITHHELD, 0.0)
            self._in_a_row = 0
            return
        self._in_a_row += 1
        step = self._recorder.step
        if update.is_withheld and self._policy.action == "skip":
            self._session.health.count("skipped_updates")
            if self._records_metrics:
                self._recorder.scalar(WITHHELD, 1.0)
        if self._policy.stops_at(self._in_a_row):
            explanation = self._explanation(step, update)
            self._recorder.stop(self._policy.reason(step, self._in_a_row, explanation), "gate policy")

    def _explanation(self, step: int, update: Update) -> str:
        """Return what the bad step shows when it is computed again; empty if it is not."""
        if self.explain_bad_step is None:
            return ""
        try:
            return self.explain_bad_step(step, update)
        except Exception as error:  # noqa: BLE001 - the training stops nevertheless
            self._session.health.fault("explain", error)
            return f"{NOT_AGAIN}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]

    def _measure(self, update: Update) -> bool:
        """Measure what is due. Returns whether the gradients contain NaN or infinity."""
        step = self._recorder.step
        is_nonfinite = self._gate(update, step)  # first, because it demands a record of a bad step
        self._record_numbers(update, step)
        if self.record_activations is not None:
            self.record_activations(step)
        self._schedule.check_floor()
        is_any_due = self._schedule.any_due(self._session.used_collections, step)
        for role, values in _values_of(update):
            if values.is_measured:
                self._add_measured(role, values, update)
            elif is_any_due:
                self._measure_role(role, values, update)
        if self._session.full_tensors.active and self._session.full_tensors.any_due(step):
            for role, values in _values_of(update):
                self._save(role, values, step)
        return is_nonfinite

    def _gate(self, update: Update, step: int) -> bool:
        """Check losses and gradients. Returns whether the gradients contain NaN or infinity."""
        if not self._session.config.gate:
            return False
        is_nonfinite = bool(update.is_bad)
        if update.gradients is not None and update.is_bad is None:
            slices = 1 if self._policy.action == "stop" or self._recorder.guarding is not None else _SLICES
            self._turn = (self._turn + 1) % slices
            is_nonfinite = update.gradients.has_nonfinite(self._turn, slices)
        has_bad_loss = not all(map(math.isfinite, update.losses.values()))
        if (is_nonfinite and not update.is_skipped) or has_bad_loss:
            self._schedule.demand(step)
            self._session.bundles.bad(step, is_late=self.bundle_bad_step is None)
            self._bundle(update, step)
            if self._session.snapshots.bad(step):
                self._session.full_tensors.protect(step)
        applies = is_nonfinite and not update.is_skipped and not update.is_withheld
        if (is_nonfinite or self._applied_nonfinite) and self._records_metrics:
            self._recorder.scalar(NONFINITE_APPLIED, float(applies))
        if self._applied_nonfinite and not applies:
            self._schedule.demand(step)  # so that recorded gradients show that they are finite again
        self._applied_nonfinite = applies
        return is_nonfinite

    def _bundle(self, update: Update, step: int) -> None:
        """Bundle a bad step if that is possible. A fault of it ends neither the check nor the stop."""
        if self.bundle_bad_step is None or not self._session.bundles.is_pending:
            return
        try:
            self.bundle_bad_step(step, update)
        except Exception as error:  # noqa: BLE001 - the recorder's faults never reach training
            self._session.health.fault("bundle", error)
            self._session.health.count("dropped_bundles")

    def _record_numbers(self, update: Update, step: int) -> None:
        if self._schedule.due((tensors.LOSSES,), step) is not None:
            for name, value in update.losses.items():
                self._recorder.scalar(self._numbered(name), value, derived=True)
        if not self._records_metrics:
            return
        for name, value in update.metrics.items():
            self._recorder.scalar(self._numbered(name), value)
        for hyperparameter, value in update.hyperparameters.items():
            name = self._numbered(f"optimizer:{hyperparameter}/0")
            since, last = self._hyperparameters.get(name, (-_REPEAT_INTERVAL, math.nan))
            if (value != last or step >= since + _REPEAT_INTERVAL) and (
                name in self._hyperparameters or len(self._hyperparameters) < _MAX_HYPERPARAMETERS
            ):
                self._hyperparameters[name] = (step, value)
                self._recorder.scalar(name, value)

    def _numbered(self, name: str) -> str:
        """Return the name of a row of this optimizer."""
        if self.number == 1:
            return name
        prefix, colon, rest = name.partition(":")
        return f"{prefix}_{self.number}{colon}{rest}"

    def _measure_role(self, role: Role, values: TensorValues, update: Update) -> None:
        described = self._described[role]
        for part in described.parts:
            charged = self._schedule.due(part.collections, self._recorder.step)
            if charged is None:
                continue
            since = self._schedule.now()
            rows, measurement = values.measure(part.rows)
            if rows:
                self._recorder.add(self._group(role, tuple(rows), update), measurement)
            self._schedule.spent(charged, since)

    def _add_measured(self, role: Role, values: TensorValues, update: Update) -> None:
        """Add what a device has measured, of the collections that are recorded at all."""
        described = self._described[role]
        for part in described.parts:
            if any(self._schedule.records(name, "train") for name in part.collections):
                rows, measurement = values.measure(part.rows)
                if rows:
                    self._recorder.add(self._group(role, tuple(rows), update), measurement)

    def _group(self, role: Role, rows: tuple[int, ...], update: Update) -> Group:
        described, of_update = self._described[role], update.places.get(role)
        places = tuple(of_update[row] for row in rows) if of_update else ()
        group = described.groups.get((rows, places))
        if group is None:
            group = Group(
                tuple(described.infos[row] for row in rows),
                places or tuple(self._places[row] for row in rows),
            )
            if len(described.groups) < len(described.parts) + _SLICES:
                described.groups[rows, places] = group
        return group

    def _save(self, role: Role, values: TensorValues, step: int) -> None:
        """Save the full tensors that are due. Those of which only figures exist are left out, and named in health."""
        described, capture = self._described[role], self._session.full_tensors
        since = self._schedule.now()
        for part in described.parts:
            collection = capture.due(part.collections, step)
            if collection is None:
                continue
            for row in part.rows:
                array = values.array(row)
                if array is not None:
                    save_array(capture, collection, step, "train", described.infos[row], array)
                else:
                    capture.unsupported(collection, described.infos[row].name, "are not in host memory")
        self._schedule.report_extra(since)

    def _report_empty_collections(self) -> None:
        self._steps += 1
        if self._steps == _STEPS_UNTIL_REPORT and (empty := self._session.empty_collections()):
            self._session.health.note(
                "collections", f"nothing belongs to: {', '.join(empty)}; see their selectors"
            )


def _values_of(update: Update) -> list[tuple[Role, TensorValues]]:
    roles: list[tuple[Role, TensorValues | None]] = [
        ("weight", update.weights),
        ("gradient", update.gradients),
    ]
    return [
        (role, values if update.rows is None else PartialValues(values, update.rows))
        for role, values in roles
        if values is not None
    ]
