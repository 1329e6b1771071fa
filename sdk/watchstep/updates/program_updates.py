"""The updates of all optimizers of a program: one recorder for each, of which one counts the steps of the run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from watchstep.capture.steps.metric_names import SCALE, SKIPPED
from watchstep.capture.steps.session import Session
from watchstep.errors import ConfigError
from watchstep.format.tensors import TensorInfo
from watchstep.stopping import OnNonfinite
from watchstep.updates.parameter_names import prefixed
from watchstep.updates.update_recorder import UpdateRecorder

_MAX_RECORDERS = 8


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
    """One optimizer with the variables of some of its updates.

    Attributes:
        source: weak reference to the object that identifies it.
        recorder: records its updates.
        variables: ids of its variables.
        is_current: whether it has made an update since the training began.
    """

    source: weakref.ref[Any]
    recorder: UpdateRecorder
    variables: tuple[int, ...]
    is_current: bool = True


class ProgramUpdates:
    """The recorders of a program's optimizers. Used on the training thread.

    The first optimizer that makes an update counts steps. Updates of others belong to the step that is in progress. Once its object is
    gone, or `restart` is called, the next optimizer that makes an update counts steps.

    Losses and metrics of the others have a number in their names: ``loss_2``. Where two optimizers of one training have different variables
    of the same names, those of the second one begin with ``model_2``. An optimizer whose updates are of different variables, because some have no
    gradient, has a recorder for each set of them.
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
        self._recorded: dict[tuple[int, ...], _Recorded] = {}
        self._counting: int | None = None
        self._by_hand = False

    def recorder_of(
        self, source: Any, variables: Sequence[Any], describe: Callable[[], Sequence[TensorInfo]]
    ) -> UpdateRecorder | None:
        """Return the recorder of an optimizer.

        Args:
            source: identifies the optimizer; weakly referenced.
            variables: the variables that it updates.
            describe: returns the descriptions of its parameters. Called at its first update.

        Returns:
            The recorder; None for one optimizer more than the limit, which is counted in health.
        """
        identities = tuple(map(id, variables))
        key = (id(source), *identities)
        recorded = self._recorded.get(key)
        if recorded is None or recorded.source() is not source:
            self._forget_gone()
            if len(self._recorded) >= _MAX_RECORDERS:
                self.session.health.count("unobserved_optimizers")
                return None
            recorder = UpdateRecorder(
                self.session,
                self._known(source, self._distinct(describe(), identities), identities),
                on_nonfinite=self.on_nonfinite,
                counts_steps=False,
            )
            recorded = self._recorded[key] = _Recorded(weakref.ref(source), recorder, identities)
        recorded.is_current = True
        if self._counting is None:
            self._counting = id(source)
        recorder = recorded.recorder
        if self.counts(source):
            recorder.counts_steps, recorder.number = not self._by_hand, 1
        elif recorder.number == 1:
            recorder.number = self._number_of(source)
        return recorder

    def _number_of(self, source: Any) -> int:
        """Return the number of an optimizer that does not count steps."""
        all_recorded = list(self._recorded.values())
        own = max(recorded.recorder.number for recorded in all_recorded if recorded.source() is source)
        used = {recorded.recorder.number for recorded in all_recorded}
        return own if own > 1 else min(set(range(2, _MAX_RECORDERS + 2)) - used)

    def _distinct(self, infos: Sequence[TensorInfo], identities: Sequence[int]) -> Sequence[TensorInfo]:
        """Return descriptions with names that no other variables of this training have."""
        names = {
            info.name
            for other in self._recorded.values()
            if other.is_current and not set(other.variables) & set(identities)
            for info in other.recorder.parameters
        }
        chosen, number = infos, 1
        while names & {info.name for info in chosen}:
            number += 1
            chosen = prefixed(infos, f"model_{number}")
        return chosen

    def _known(
        self, source: Any, infos: Sequence[TensorInfo], identities: Sequence[int]
    ) -> Sequence[TensorInfo]:
        """Return descriptions in which variables of other updates of an optimizer have the names that they have there."""
        known = {
            identity: info
            for recorded in self._recorded.values()
            if recorded.source() is source
            for identity, info in zip(recorded.variables, recorded.recorder.parameters, strict=False)
        }
        used = {info.name for info in known.values()}
        chosen = []
        for identity, info in zip(identities, infos, strict=False):
            name, number = info.name, 1
            while identity not in known and name in used:
                number += 1
                name = f"{info.name}_{number}"
            chosen.append(known.get(identity, replace(info, name=name)))
        return chosen

    def counts(self, source: Any) -> bool:
        """Return whether an optimizer counts steps."""
        return self._counting == id(source)

    def restart(self) -> None:
        """Let the next optimizer that makes an update count steps, because another training begins."""
        self._counting = None
        for recorded in self._recorded.values():
            recorded.is_current = recorded.recorder.counts_steps = False

    def count_by_hand(self) -> None:
        """Count steps by `Hook.step` from now on."""
        self._by_hand = True
        for recorded in self._recorded.values():
            recorded.recorder.counts_steps = False

    def _forget_gone(self) -> None:
        for key in [key for key, recorded in self._recorded.items() if recorded.source() is None]:
            del self._recorded[key]
            if self._counting == key[0]:
                self._counting = None
