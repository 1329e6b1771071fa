"""A claimed action, and the possible results of a try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Result = Literal["done", "skipped", "failed", "advanced", "waiting", "error"]


@dataclass(frozen=True)
class DeliveryKey:
    """The recipient of a notification: a receiver of a project, or an address that a rule config names."""

    project: str
    receiver: str


@dataclass(frozen=True)
class DueAction:
    """An action that a worker has claimed.

    Attributes:
        id: id in the database.
        run_id: id of its run.
        event_id: id of the event that caused it.
        kind: stop, webhook or notify, among others.
        payload: data of the kind.
        stage: its stage.
        stage_since_ns: when it reached the stage.
        tries: tries recorded so far.
        claims: the fencing token.
        now_ns: the database's clock at the claim.
        traceparent: trace of its cause; empty for none.
        project: name of the run's project.
        run: name of the run.
    """

    id: int
    run_id: int
    event_id: str
    kind: str
    payload: dict[str, Any]
    stage: int
    stage_since_ns: int
    tries: int
    claims: int
    now_ns: int
    traceparent: str = ""
    project: str = ""
    run: str = ""

    @property
    def after_unknown(self) -> bool:
        """Whether an earlier claim has no recorded result, so that the action may have been done."""
        return self.claims - 1 > self.tries


@dataclass(frozen=True)
class AttemptResult:
    """The result of a try.

    Attributes:
        result: ``done``; ``skipped``: nothing to do; ``failed``: given up; ``advanced``: the next stage
            is reached; ``waiting``: polled, nothing to record; ``error``: to be tried again.
        detail: text for people.
        stage: the stage after the try.
        after_ns: when to continue; after an error, not before this time.
        facts: for a stop that is over: how it ended, and at which step.
    """

    result: Result
    detail: str
    stage: int = 0
    after_ns: int = 0
    facts: dict[str, Any] | None = None
