"""What is known of an alert: where it stands, what is kept of it between blocks, and how it changes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from watchstep_rules.engine.streaks import NONE, Streak
from watchstep_rules.rule import Finding


class Phase(str, Enum):
    """Where an alert stands."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


class FiringSpan(NamedTuple):
    """Steps at which an alert fired: from the first, until one that is not among them; None while it fires."""

    first: int
    until: int | None


class Quiet(NamedTuple):
    """Of an alert that fires and nobody is told of: which rule config inhibits it, and a step at which one does."""

    by: str
    step: int


class Mark(NamedTuple):
    """A step at which a series comes to be bad or clean, or has been so for long enough."""

    step: int
    series: str
    bad: bool
    enough: bool


class LikelyCause(NamedTuple):
    """What may have made an alert fire at the finding's step: the likeliest of those that could, and its streak."""

    finding: Finding
    since: Streak


class AlertMemory(BaseModel):
    """What is kept of an alert between blocks.

    A series is a tensor@worker/mode. Streaks are of rows as they came, up to the newest; what follows from them for the alert
    waits until their step is sealed.

    Attributes:
        phase: where it stands, as it was said; it may fire before the step is sealed at which it does.
        finding: that of the likeliest cause, among those that came up to the step at which it fired.
        fired_at: that step.
        since: the streak of findings that it is the last of.
        hits: of each series with a finding at its last judged step, the streak of findings.
        clean: of other series that matter, the streak without; of none where one that fires had a finding last.
        last: of each of these, its last judged step.
        waiting: changes of series at steps that are not sealed, by step.
        causes: of each of these steps at which it could fire, why.
        bad: series with findings as of the last sealed step.
        firing: those that make it fire as of then.
        settled: of these the ones that have been clean for long enough.
        reached: the last step at which one of these changed.
        closed: the last step of the episodes that are over; -1 for none.
        ahead: the last step that was gone through though it was not sealed, for too much waited; -1 for none.
        over: of each series whose late rows are of such an episode, the last step that was sealed when they came.
        fired: of one that inhibits others, when it fired, as far as it matters to steps that are not sealed yet.
        quiet: of one that fires and is inhibited, by what.
    """

    model_config = ConfigDict(frozen=True)

    phase: Phase = Phase.INACTIVE
    finding: Finding | None = None
    fired_at: int = -1
    since: Streak = NONE
    hits: dict[str, Streak] = Field(default_factory=dict)
    clean: dict[str, Streak] = Field(default_factory=dict)
    last: dict[str, int] = Field(default_factory=dict)
    waiting: tuple[Mark, ...] = ()
    causes: tuple[LikelyCause, ...] = ()
    bad: tuple[str, ...] = ()
    firing: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()
    reached: int = -1
    closed: int = -1
    ahead: int = -1
    over: dict[str, int] = Field(default_factory=dict)
    fired: tuple[FiringSpan, ...] = ()
    quiet: Quiet | None = None

    @property
    def follows(self) -> bool:
        """Whether there are series whose next rows matter, also without a finding."""
        return bool(self.hits or self.clean)

    @model_validator(mode="before")
    @classmethod
    def _of_before(cls, data: Any) -> Any:
        """Earlier versions did not wait for seals: all that they knew of a series counted at once."""
        if isinstance(data, dict) and "firing" not in data:
            return {**data, "bad": tuple(data.get("hits", ())), "firing": tuple(data.get("clean", ()))}
        return data


@dataclass(frozen=True)
class Transition:
    """A change of phase, or of what an alert that fires names as the cause.

    Attributes:
        phase: the new one.
        step: at which it came; of one that is revised, at which it fired, as far as is known now.
        finding: the likeliest cause of what made the alert fire; None before it did.
        since_step: the first step of the streak that made it fire; of one that has not fired, ``step``.
        since_ns: when that was, nanoseconds since the epoch, by the clock of the row; 0 where it has not fired.
        inhibited_by: the rule config that keeps it quiet; empty where somebody is told.
        revised: it fired before, and names a likelier cause now.
    """

    phase: Phase
    step: int
    finding: Finding | None
    since_step: int
    since_ns: int
    inhibited_by: str = ""
    revised: bool = False
