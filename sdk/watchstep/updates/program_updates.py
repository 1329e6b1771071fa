"""The updates of all optimizers of a program: one recorder for each, of which one counts the steps of the run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from watchstep.capture.steps.metric_names import SCALE, SKIPPED
from watchstep.capture.steps.session import Session
from watchstep.errors import ConfigError
from watchstep.format.tensors import TensorInfo
from watchstep.stopping import OnNonfinite
from watchstep.updates.parameter_names import prefixed
from watchstep.updates.update_recorder import UpdateRecorder

_MAX_RECORDERS = 8
_UPDATES_UNTIL_OTHER = 128
"""Number of updates of another optimizer in one step, after which each is a step, until the first optimizer makes one again. A critic is updated
up to a hundred times for each update of its generator."""


def scaler_metrics(scale: float | None, *, is_skipped: bool) -> Mapping[str, float]:
    """Return the metrics of an update under loss scaling, as those of PyTorch's gradient scaler; none without a scale."""
    if scale is None:
        return {}
    return {SCALE: scale, SKIPPED: 1.0} if is_skipped else {SCALE: scale}


def check_policy(on_nonfinite: OnNonfinite) -> None:
    """Check that the gate policy is possible with Keras and TensorFlow.

    Raises:
        ConfigError: the policy leaves updates out, which is not possible from outside of a compiled step.
    """
    if on_nonfinite.action == "skip":
        raise ConfigError(
            f"on_nonfinite={str(on_nonfinite)!r} with Keras or TensorFlow",
            'use on_nonfinite="stop", or keras.optimizers.LossScaleOptimizer, which leaves out updates that overflow',
        )


@dataclass
class _Recorded:
    """One optimizer.

    Attributes:
        source: weak reference to the object that identifies it.
        recorder: records its updates.
        rows: index of each variable among the recorder's parameters, by its id.
        is_current: whether it has made an update since the training began.
    """

    source: weakref.ref[Any]
    recorder: UpdateRecorder
    rows: dict[int, int] = field(default_factory=dict)
    is_current: bool = True


class ProgramUpdates:
    """The recorders of a program's optimizers. Used on the training thread.

    The first optimizer that makes an update counts steps. Updates of others belong to the step that is in progress, unless it makes none for
    long, as after a warm-up with an optimizer of its own. Once its object is gone, or `restart` is called, the next optimizer that makes an
    update counts steps.

    Losses and metrics of the others have a number in their names: ``loss_2``. Where two optimizers of one training have different variables
    of the same names, those of the second one begin with ``model_2``. The updates of an optimizer may be of different variables, because some have
    no gradient.
    """

    def __init__(self, session: Session, on_nonfinite: OnNonfinite) -> None:
        """Start without optimizers.

        Args:
            session: the recording.
            on_nonfinite: the gate policy.

        Raises:
            ConfigError: the policy leaves updates out, which is not possible from outside of a compiled step.
        """
        check_policy(on_nonfinite)
        self.session = session
        self.on_nonfinite = on_nonfinite
        self._recorded: dict[int, _Recorded] = {}
        self._counting: int | None = None
        self._substitute: int | None = None
        self._by_hand = False

    def recorder_of(
        self, source: Any, variables: Sequence[Any], describe: Callable[[], Sequence[TensorInfo]]
    ) -> tuple[UpdateRecorder, Sequence[int]] | None:
        """Return the recorder of an optimizer.

        Args:
            source: identifies the optimizer; weakly referenced.
            variables: the variables of an update.
            describe: returns the descriptions of these variables. Called at the first update of one of them.

        Returns:
            The recorder, and the index of each variable among its parameters. None for one optimizer more than the limit, which is counted in
            health.
        """
        recorded = self._recorded.get(id(source))
        if recorded is None or recorded.source() is not source:
            self._make_place()
            if len(self._recorded) >= _MAX_RECORDERS:
                self.session.health.count("unobserved_optimizers")
                self.session.health.note(
                    "trainings",
                    f"updates of more than {_MAX_RECORDERS} optimizers are not recorded, and no stop comes from them",
                )
                return None
            recorder = UpdateRecorder(self.session, (), on_nonfinite=self.on_nonfinite, counts_steps=False)
            recorded = self._recorded[id(source)] = _Recorded(weakref.ref(source), recorder)
        identities = list(map(id, variables))
        if not recorded.rows.keys() >= set(identities):
            self._extend(recorded, describe(), identities)
        recorded.is_current = True
        recorder = recorded.recorder
        if self._counting in (None, id(source)):
            self._counting, self._substitute = id(source), None
            recorder.number = 1
        elif recorder.updates_in_step >= _UPDATES_UNTIL_OTHER:
            self._substitute = id(source)
        recorder.counts_steps = self.counts(source) and not self._by_hand
        if self._counting != id(source) and recorder.number == 1:
            used = {other.recorder.number for other in self._recorded.values()}
            recorder.number = min(set(range(2, _MAX_RECORDERS + 2)) - used)
        return recorder, [recorded.rows[identity] for identity in identities]

    def _extend(self, recorded: _Recorded, infos: Sequence[TensorInfo], identities: Sequence[int]) -> None:
        """Add variables to those of an optimizer, with names that no others of this optimizer have."""
        used = {info.name for info in recorded.recorder.parameters}
        added = []
        for identity, info in zip(identities, self._distinct(recorded, infos, identities), strict=True):
            if identity in recorded.rows:
                continue
            name, number = info.name, 1
            while name in used:
                number += 1
                name = f"{info.name}_{number}"
            used.add(name)
            recorded.rows[identity] = len(recorded.rows)
            added.append(replace(info, name=name))
        recorded.recorder.extend(added)

    def _distinct(
        self, recorded: _Recorded, infos: Sequence[TensorInfo], identities: Sequence[int]
    ) -> Sequence[TensorInfo]:
        """Return descriptions with names that no other variables of other optimizers of this training have."""
        names = {
            info.name
            for other in self._recorded.values()
            if other is not recorded and other.is_current and not other.rows.keys() & set(identities)
            for info in other.recorder.parameters
        }
        chosen, number = infos, 1
        while names & {info.name for info in chosen}:
            number += 1
            chosen = prefixed(infos, f"model_{number}")
        return chosen

    def counts(self, source: Any) -> bool:
        """Return whether an optimizer counts steps."""
        return id(source) == (self._substitute or self._counting)

    def restart(self) -> None:
        """Let the next optimizer that makes an update count steps, because another training begins."""
        self._counting = self._substitute = None
        for recorded in self._recorded.values():
            recorded.is_current = recorded.recorder.counts_steps = False

    def count_by_hand(self) -> None:
        """Count steps by `Hook.step` from now on."""
        self._by_hand = True
        for recorded in self._recorded.values():
            recorded.recorder.counts_steps = False

    def _make_place(self) -> None:
        """Forget optimizers that are gone, and, at the limit, the first one that has made no update in this training."""
        recorded = self._recorded
        forgotten = [key for key, entry in recorded.items() if entry.source() is None]
        if len(recorded) - len(forgotten) >= _MAX_RECORDERS:
            earlier = [
                key for key, entry in recorded.items() if not entry.is_current and key not in forgotten
            ]
            forgotten += earlier[:1]
        for key in forgotten:
            del recorded[key]
            if self._counting == key:
                self._counting = None
            if self._substitute == key:
                self._substitute = None
