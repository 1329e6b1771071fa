"""One action as a worker holds it, and what a try of it can come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Result = Literal["done", "skipped", "failed", "advanced", "waiting", "error"]


@dataclass(frozen=True)
class DeliveryKey:
    """Whom an action tells: a receiver of a project, or an address that a rule config names."""

    project: str
    receiver: str


@dataclass(frozen=True)
class DueAction:
    """An action that a worker has claimed.

    Attributes:
        id: in the database.
        run_id: whose.
        event_id: what caused it.
        kind: stop, webhook or notify, among others.
        payload: what the kind needs.
        stage: how far it came.
        stage_since_ns: since when it is at that stage.
        tries: tries recorded so far.
        claims: the fence.
        now_ns: the database's clock at the claim.
        traceparent: of what caused it; empty for none.
        project: of the run.
        run: its name.
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
        """Whether it was claimed before, and nobody recorded what came of that: it may have been done."""
        return self.claims - 1 > self.tries


@dataclass(frozen=True)
class AttemptResult:
    """What a try came to.

    Attributes:
        result: ``done``; ``skipped``: nothing was to be done; ``failed``: given up; ``advanced``: the next stage
            is reached; ``waiting``: looked again, nothing to record; ``error``: try again later.
        detail: for people.
        stage: the stage after it.
        after_ns: when to go on; of an error, not before.
        facts: of a stop that is over: how, and at which step.
    """

    result: Result
    detail: str
    stage: int = 0
    after_ns: int = 0
    facts: dict[str, Any] | None = None
