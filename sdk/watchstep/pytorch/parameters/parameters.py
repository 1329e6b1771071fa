"""Measurements of weights, gradients, updates and optimizer state, when they are due.

A step may have several updates: a critic steps five times per step of its generator, and an optimizer may step inside
another one's step, as in Lookahead and SAM. Then weights and gradients of the first update are recorded, because rows of one tensor
and step are merged, and would describe a tensor five times as large.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from watchstep.capture.config import ADAPTIVE
from watchstep.capture.steps.record import Condition, Group, Probe
from watchstep.capture.steps.session import Session
from watchstep.format.tensors import Placement, TensorInfo
from watchstep.kernels.measurement import Cached, Kernel, Measurement
from watchstep.pytorch.kernel import Checksums, measure_figures
from watchstep.pytorch.names import NamedParameter, Names
from watchstep.pytorch.optimizer_map import OptimizerMap
from watchstep.pytorch.parameters.amp import PLAIN, Scaling, measure_unscaled, unscaled
from watchstep.pytorch.probes.staging import ElementSamples, elements_of_each, has_all_memory, views
from watchstep.pytorch.probes.weights import (
    GradientCosine,
    PercentileRange,
    Unchanged,
    UnitSpread,
    UpdateRatio,
    WeightChange,
)
from watchstep.pytorch.tensors import full_tensors

Kind = tuple[str, Hashable]


class FirstOfStep:
    """Ids of the parameters that have been measured in the current step, by kind."""

    def __init__(self) -> None:
        self._step = -1
        self._measured: dict[Kind, set[int] | Collection[int]] = {}

    def left(self, kind: Kind, ids: Collection[int], step: int) -> Collection[int]:
        """Return the ids that have not been measured in this step, and mark them as measured.

        Args:
            kind: Kind of measurement.
            ids: Ids of the parameters. The collection of the first update is kept without a copy, so it should be the same object
                at each step, or short.
            step: Step of the run.
        """
        if step != self._step:
            self.forget()
            self._step = step
        measured = self._measured.get(kind)
        if measured is None:
            self._measured[kind] = ids
            return ids
        if not isinstance(measured, set):
            measured = self._measured[kind] = set(measured)
        remaining = [identity for identity in ids if identity not in measured]
        measured.update(remaining)
        return remaining

    def forget(self) -> None:
        """Forget what has been measured, so that all is measured again: the first update did not show a fault."""
        self._measured.clear()


_MAX_CLIPPED_SETS = 64  # cached sets of parameters that are clipped together

Collections = tuple[str, ...]


@dataclass(frozen=True)
class _Part:
    """Tensors of the same collections, which are due together."""

    collections: Collections
    members: list[NamedParameter]

    @functools.cached_property
    def ids(self) -> tuple[int, ...]:
        """Ids of the parameters."""
        return tuple(id(named.parameter) for named in self.members)

    def only(self, ids: Collection[int]) -> _Part:
        """Return the members with some ids, all of which are in this part."""
        if len(ids) == len(self.members):
            return self
        chosen = set(ids)
        return _Part(self.collections, [named for named in self.members if id(named.parameter) in chosen])


@dataclass(frozen=True)
class _Kept:
    """Tensors of any collections that are measured together without being due."""

    members: list[NamedParameter]
    group: Group

    @classmethod
    def of(cls, members: list[NamedParameter], describe: Describe) -> _Kept:
        described = [describe(named) for named in members]
        infos, places = tuple(info for info, _ in described), tuple(place for _, place in described)
        return cls(members, Group(infos, places))

    def without(self, ids: Collection[int], describe: Describe) -> _Kept:
        """Return the tensors of other parameters than those with some ids."""
        if not ids:
            return self
        return _Kept.of([named for named in self.members if id(named.parameter) not in ids], describe)


@dataclass(frozen=True)
class Updated:
    """The watched parameters that one optimizer updates.

    Attributes:
        ids: Ids of all parameters of the optimizer in its order. If they change, this object is recreated.
        parameters: The watched parameters.
        weights, gradients, updates: Those that this worker records, by collections.
        checksums: Those that other workers also have.
        is_recorded: Whether this worker records any of them: only one of several replicas does.
        kept_weights, kept_gradients: Those that are recorded as often as the budget allows, in one group each.
    """

    ids: list[int]
    parameters: list[NamedParameter]
    weights: list[_Part]
    gradients: list[_Part]
    updates: list[_Part]
    checksums: list[_Part]
    is_recorded: bool
    kept_weights: _Kept
    kept_gradients: _Kept


@dataclass(frozen=True)
class MeasuredGradients:
    """Measured gradients that are not recorded yet.

    Attributes:
        group: Their descriptions.
        measurement: Their statistics.
        probes: Additional figures.
        is_kept: Whether they are not due, and are only kept in memory.
    """

    group: Group
    measurement: Measurement
    probes: tuple[Probe, ...]
    is_kept: bool = False


@dataclass
class _Before:
    """Samples of weights before an update."""

    charged: str
    part: _Part
    condition: Condition | None
    samples: ElementSamples


class Parameters:
    """Measures inputs and effects of the optimizers of one model. Runs on the training thread."""

    def __init__(self, session: Session, names: Names, kernel: Kernel) -> None:
        self._config = session.config
        self._keeps_state = session.config.keeps_state
        self._recorder = session.recorder
        self._schedule = session.schedule
        self._capture = session.full_tensors
        self._names = names
        self._kernel = kernel
        self._adaptive = frozenset(
            name for name, chosen in session.config.chosen.items() if chosen.cadence == ADAPTIVE
        )
        self._named = names.parameters()
        self._updated: OptimizerMap[Updated] = OptimizerMap()
        self._before: OptimizerMap[list[_Before]] = OptimizerMap()
        self._groups: dict[tuple[str, Collections], Group] = {}
        self._states: dict[tuple[int, str], TensorInfo] = {}
        self._clipped: dict[tuple[int, ...], Updated] = {}
        self._first = FirstOfStep()
        self._cosine = GradientCosine() if "gradient_cosine" in session.config.probes else None
        self._spread = UnitSpread() if "unit_spread" in session.config.probes else None
        self._unchanged_weights = Unchanged(session.config.probes)
        self._unchanged_gradients = Unchanged(session.config.probes)
        self._change = WeightChange(session.config.probes)
        self._range = PercentileRange(session.config.probes)

    def of(self, optimizer: Optimizer) -> Updated:
        """Return the optimizer's watched parameters. They are looked up again if its parameters have changed."""
        ids: list[int] = []
        for group in optimizer.param_groups:
            ids.extend(map(id, group["params"]))
        cached = self._updated.get(optimizer)
        if cached is not None and cached.ids == ids:
            return cached
        # An optimizer of another model is no reason: a program may make one for each step.
        has_others = any(i not in self._named for i in ids) and not self._names.has_all(self._named)
        if cached is not None or has_others:
            self._reload()  # parameters have been added or removed
        updated = self._updated[optimizer] = _updated_of(
            ids, [self._named[i] for i in ids if i in self._named], self._adaptive
        )
        return updated

    def _reload(self) -> None:
        self._named = self._names.parameters()
        self._states.clear()
        self._clipped.clear()
        for probe in (
            self._cosine,
            self._spread,
            self._unchanged_weights,
            self._unchanged_gradients,
            self._change,
        ):
            if probe is not None:
                probe.forget()

    @property
    def named(self) -> Iterable[NamedParameter]:
        """All parameters of the model, in an optimizer or not."""
        return self._named.values()

    def optimizers(self) -> list[Optimizer]:
        """Return the existing optimizers that have stepped, or are about to, and update the model."""
        return [optimizer for optimizer, updated in self._updated.items() if updated.parameters]

    def optimized(self) -> frozenset[int]:
        """Return the ids of the parameters of all existing optimizers that have stepped."""
        return frozenset(i for updated in self._updated.values() for i in updated.ids)

    def measure_again(self) -> None:
        """Measure due tensors again although an earlier update of this step has been measured, because of a fault."""
        self._first.forget()

    def keep(self, updated: Updated, step: int, scaling: Scaling, but: Collection[int]) -> None:
        """Keep the figures of current weights and gradients that are not due, if that is cheap enough.

        Args:
            updated: Parameters of the optimizer.
            step: Step of the run.
            scaling: Scaling by a gradient scaler. Scaled gradients are not kept.
            but: Ids of parameters with gradients that have already been measured.
        """
        recent = self._recorder.recent
        if recent is None or not recent.wants(step):
            return
        since = self._schedule.now()
        left = self._first.left(("kept", ""), updated.ids, step)
        if left:
            others = () if left is updated.ids else set(updated.ids).difference(left)
            if not self._is_due(updated.weights, step):
                weights = updated.kept_weights.without(others, _weight)
                figures = measure_figures([named.parameter for named in weights.members])
                if figures is not None:
                    self._recorder.keep(weights.group, figures)
            if scaling.scale is None and not self._is_due(updated.gradients, step):
                kept = self._kept_gradients(updated, {*but, *others})
                if kept is not None:
                    self._recorder.keep(kept.group, kept.measurement, scaling.updates)
        recent.spent(step, self._schedule.now() - since)
        self._schedule.report_extra(since)

    def _is_due(self, parts: Iterable[_Part], step: int) -> bool:
        return any(self._schedule.due(part.collections, step) is not None for part in parts)

    def _kept_gradients(self, updated: Updated, but: Collection[int] = ()) -> MeasuredGradients | None:
        missing = {id(n.parameter) for n in updated.kept_gradients.members if n.parameter.grad is None}
        kept = updated.kept_gradients.without(missing.union(but), _gradient)
        figures = measure_figures([n.parameter.grad for n in kept.members if n.parameter.grad is not None])
        return None if figures is None else MeasuredGradients(kept.group, figures, (), is_kept=True)

    def measure_weights(self, updated: Updated, step: int) -> None:
        """Measure weights and biases that are due."""
        for charged, part in self._due(updated.weights, step, "weight"):
            since = self._schedule.now()
            weights: list[Tensor] = [named.parameter for named in part.members]
            probes = self._probes_of_weights(part, weights, step)
            self._record("weight", part.collections, _described(part, _weight), weights, probes)
            self._schedule.spent(charged, since)

    def _probes_of_weights(self, part: _Part, weights: list[Tensor], step: int) -> tuple[Probe, ...]:
        among = len(self._named)
        if not all(map(has_all_memory, weights)):
            return ()  # the program has freed the storage of a weight
        probes = (
            None if self._spread is None else self._spread.measure(weights),
            self._unchanged_weights.measure(part.ids, weights, among)
            if self._unchanged_weights.applies
            else None,
            self._change.measure(part.ids, weights, among, step) if self._change.applies else None,
        )
        return tuple(probe for probe in probes if probe is not None)

    def measure_checksums(self, updated: Updated, step: int) -> None:
        """Measure due checksums of weights that several workers have. A rule compares them."""
        for charged, part in self._due(updated.checksums, step, "checksum"):
            since = self._schedule.now()
            group = self._group("checksum", part.collections, _described(part, _checksum))
            self._recorder.add(group, Checksums.of([named.parameter for named in part.members]))
            self._schedule.spent(charged, since)

    def measure_gradients(
        self, updated: Updated, step: int, scaling: Scaling = PLAIN, but: Collection[int] = ()
    ) -> None:
        """Measure current gradients that are due.

        Args:
            updated: Parameters of the optimizer.
            step: Step of the run.
            scaling: Scaling by a gradient scaler. Unscaled gradients are recorded.
            but: Ids of parameters with gradients that have already been measured.
        """
        groups = (
            [part.only([i for i in part.ids if i not in but]) for part in updated.gradients] if but else None
        )
        for measured in self._gradients(
            updated.gradients if groups is None else groups, step, scaling, "gradient"
        ):
            self.record(measured, step, scaling.updates)

    def record(self, measured: MeasuredGradients, step: int, condition: Condition | None) -> None:
        """Record measured gradients, or keep them in memory if they are not due.

        Args:
            measured: The gradients.
            step: Step of the run.
            condition: Condition that the update is made, if this is not known yet.
        """
        collections = [info.collections for info in measured.group.tensors] if measured.is_kept else []
        if collections and all(self._schedule.due(names, step) is None for names in set(collections)):
            self._recorder.keep(measured.group, measured.measurement, condition)
        else:
            self._recorder.add(
                measured.group, measured.measurement, probes=measured.probes, condition=condition
            )

    def save(self, updated: Updated, step: int, scaling: Scaling = PLAIN) -> None:
        """Save the full weights, biases and unscaled gradients that are due, as they are before the update."""
        capture, scale = self._capture, scaling.scale
        unscale = None if scale is None else functools.partial(unscaled, scale=scale)
        for kind, parts in (("weight", updated.weights), ("gradient", updated.gradients)):
            for part in parts:
                collection = capture.due(part.collections, step)
                if collection is None:
                    continue
                since = self._schedule.now()
                for named in part.members:
                    tensor = named.parameter if kind == "weight" else named.parameter.grad
                    if tensor is not None:
                        info = named.weight if kind == "weight" else named.gradient
                        change = unscale if kind == "gradient" else None
                        full_tensors.save_one(capture, collection, step, "train", info, tensor, change=change)
                self._schedule.report_extra(since)

    def _save_state(self, optimizer: Optimizer, updated: Updated, step: int) -> None:
        """Save the full optimizer state that is due, as it is after the update."""
        since = self._schedule.now()
        for named in updated.parameters:
            if not named.placement.records:
                continue
            for key, state in optimizer.state.get(named.parameter, {}).items():
                if isinstance(state, Tensor) and state.dim() > 0:
                    info = self._state(named, str(key), state)
                    full_tensors.save(self._capture, info.collections, step, "train", [(info, state)])
        self._schedule.report_extra(since)

    def watched(self, parameters: Iterable[Tensor]) -> frozenset[int]:
        """Return the ids of the parameters that belong to this model."""
        return frozenset(id(parameter) for parameter in parameters if id(parameter) in self._named)

    def gradients_of(self, parameters: Sequence[Tensor], step: int) -> list[MeasuredGradients]:
        """Measure current gradients of some watched parameters that are due, or kept in memory, without recording them."""
        ids = tuple(map(id, parameters))
        updated = self._clipped.get(ids)
        if updated is None:
            if len(self._clipped) >= _MAX_CLIPPED_SETS:
                self._clipped.clear()
            updated = self._clipped[ids] = _updated_of(
                list(ids), [self._named[i] for i in ids], self._adaptive
            )
        recent = self._recorder.recent
        if recent is not None and recent.wants(step) and not self._is_due(updated.gradients, step):
            since = self._schedule.now()
            kept = self._kept_gradients(updated)
            recent.spent(step, self._schedule.now() - since)
            self._schedule.report_extra(since)
            return [] if kept is None else [kept]
        return list(self._gradients(updated.gradients, step))

    def _gradients(
        self, parts: list[_Part], step: int, scaling: Scaling = PLAIN, kind: str = ""
    ) -> Iterator[MeasuredGradients]:
        for charged, part in self._due(parts, step, kind):
            since = self._schedule.now()
            members = [named for named in part.members if named.parameter.grad is not None]
            gradients = [n.parameter.grad for n in members if n.parameter.grad is not None]
            if gradients:
                probes = self._probes_of_gradients(members, gradients, step, scaling)
                described = _described(_Part(part.collections, members), _gradient)
                yield MeasuredGradients(
                    self._group("gradient", part.collections, described),
                    self._measure_gradients(gradients, scaling),
                    probes,
                )
            self._schedule.spent(charged, since)

    def _probes_of_gradients(
        self, members: list[NamedParameter], gradients: list[Tensor], step: int, scaling: Scaling
    ) -> tuple[Probe, ...]:
        owners, among = [named.parameter for named in members], len(self._named)
        probes: list[Probe | None] = []
        if self._cosine is not None:
            probes.append(self._cosine.measure(owners, gradients, among))
        if scaling.scale is None:  # else the elements are scaled, unlike the recorded ones
            ids = list(map(id, owners))
            if self._unchanged_gradients.applies:
                probes.append(self._unchanged_gradients.measure(ids, gradients, among))
            if self._range.applies:
                probes.append(self._range.measure(ids, gradients, among, step))
        return tuple(probe for probe in probes if probe is not None)

    def _measure_gradients(self, gradients: list[Tensor], scaling: Scaling) -> Measurement:
        if scaling.scale is None:
            return self._kernel.measure(gradients)
        return measure_unscaled(self._kernel, gradients, scaling.scale, powers_of_two=scaling.powers_of_two)

    def before_update(
        self, optimizer: Optimizer, updated: Updated, step: int, condition: Condition | None = None
    ) -> None:
        """Keep samples of weights with a due update, which is recorded if a condition is met later.

        Parameters that do not require a gradient are frozen on purpose, so they have no update.
        """
        samples_before = []
        most = elements_of_each(len(self._named))
        for charged, whole in self._due(updated.updates, step, "update"):
            since = self._schedule.now()
            part = _Part(whole.collections, [n for n in whole.members if n.parameter.requires_grad])
            if part.members:
                with torch.no_grad():
                    samples = ElementSamples.of(views([n.parameter for n in part.members], most))
                samples_before.append(_Before(charged, part, condition, samples))
            self._schedule.spent(charged, since)
        self._before[optimizer] = samples_before

    def forget_before(self, optimizer: Optimizer) -> None:
        """Drop the samples of weights of an update that was not made."""
        self._before.pop(optimizer)

    def after_update(self, optimizer: Optimizer, updated: Updated, step: int) -> None:
        """Measure the changes by the update, and the optimizer state."""
        most = elements_of_each(len(self._named))
        for before in self._before.pop(optimizer, []):
            since = self._schedule.now()
            part = before.part
            with torch.no_grad():
                after = ElementSamples.of(views([named.parameter for named in part.members], most))
                changes = after.minus(before.samples).each()
            update = Cached(self._kernel.measure(changes))
            probes: tuple[Probe, ...] = ()
            if "update_ratio" in self._config.probes:
                probes = (UpdateRatio(update, self._kernel.measure(before.samples.each())),)
            group = self._group("update", part.collections, _described(part, _update))
            self._recorder.add(group, update, probes=probes, condition=before.condition)
            self._schedule.spent(before.charged, since)
        if self._keeps_state:
            self._measure_state(optimizer, updated, step)
            if self._capture.any_due(step):
                self._save_state(optimizer, updated, step)

    def _measure_state(self, optimizer: Optimizer, updated: Updated, step: int) -> None:
        by_collections: dict[Collections, list[tuple[TensorInfo, Placement, Tensor]]] = {}
        for named in updated.parameters:
            if named.placement.records:
                for key, state in optimizer.state.get(named.parameter, {}).items():
                    if isinstance(state, Tensor) and state.dim() > 0 and self._is_first(key, named, step):
                        info = self._state(named, str(key), state)
                        by_collections.setdefault(info.collections, []).append(
                            (info, named.placement.weight, state)
                        )
        for collections, entries in by_collections.items():
            charged = self._schedule.due(collections, step)
            if charged is not None:
                since = self._schedule.now()
                described = [(info, place) for info, place, _ in entries]
                self._record("state", collections, described, [entry for _, _, entry in entries])
                self._schedule.spent(charged, since)

    def _state(self, named: NamedParameter, key: str, state: Tensor) -> TensorInfo:
        place = (id(named.parameter), key)
        if place not in self._states:
            self._states[place] = self._names.state(named, key, state)
        return self._states[place]

    def _is_first(self, key: object, named: NamedParameter, step: int) -> bool:
        return bool(self._first.left(("state", str(key)), (id(named.parameter),), step))

    def _due(self, parts: list[_Part], step: int, kind: str) -> Iterator[tuple[str, _Part]]:
        """Yield due parts that have not been measured in this step. For an empty kind, earlier measurements are ignored."""
        for part in parts:
            charged = self._schedule.due(part.collections, step)
            if charged is not None:
                remaining = (
                    part.only(self._first.left((kind, part.collections), part.ids, step)) if kind else part
                )
                if remaining.members:
                    yield charged, remaining

    def _record(
        self,
        kind: str,
        collections: Collections,
        described: list[tuple[TensorInfo, Placement]],
        tensors: list[Tensor],
        probes: tuple[Probe, ...] = (),
    ) -> None:
        if described:
            group = self._group(kind, collections, described)
            self._recorder.add(group, self._kernel.measure(tensors), probes=probes)

    def _group(
        self, kind: str, collections: Collections, described: list[tuple[TensorInfo, Placement]]
    ) -> Group:
        infos, places = tuple(info for info, _ in described), tuple(place for _, place in described)
        group = self._groups.get((kind, collections))
        if group is None or group.tensors != infos or group.places != places:
            group = self._groups[kind, collections] = Group(infos, places)
        return group


def _weight(named: NamedParameter) -> tuple[TensorInfo, Placement]:
    return named.weight, named.placement.weight


def _gradient(named: NamedParameter) -> tuple[TensorInfo, Placement]:
    return named.gradient, named.placement.gradient


def _update(named: NamedParameter) -> tuple[TensorInfo, Placement]:
    return named.update, named.placement.weight


def _checksum(named: NamedParameter) -> tuple[TensorInfo, Placement]:
    return named.checksum, Placement(replica=named.placement.weight.replica)


Describe = Callable[[NamedParameter], tuple[TensorInfo, Placement]]


def _described(part: _Part, describe: Describe) -> list[tuple[TensorInfo, Placement]]:
    return [describe(named) for named in part.members]


def _updated_of(ids: list[int], parameters: list[NamedParameter], adaptive: frozenset[str]) -> Updated:
    recorded = [named for named in parameters if named.placement.records]
    return Updated(
        ids,
        parameters,
        weights=_parts(recorded, _weight),
        gradients=_parts(recorded, _gradient),
        updates=_parts(recorded, _update),
        checksums=_parts([named for named in parameters if named.placement.replicas > 1], _checksum),
        is_recorded=bool(recorded),
        kept_weights=_kept(recorded, _weight, adaptive),
        kept_gradients=_kept(recorded, _gradient, adaptive),
    )


def _kept(parameters: list[NamedParameter], describe: Describe, adaptive: frozenset[str]) -> _Kept:
    return _Kept.of(
        [named for named in parameters if not adaptive.isdisjoint(describe(named)[0].collections)], describe
    )


def _parts(parameters: list[NamedParameter], describe: Describe) -> list[_Part]:
    groups: dict[Collections, list[NamedParameter]] = {}
    for named in parameters:
        collections = describe(named)[0].collections
        if collections:
            groups.setdefault(collections, []).append(named)
    return [_Part(collections, members) for collections, members in groups.items()]
