"""What the API takes and gives."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from watchstep_rules.engine.explanation import Explanation
from watchstep_rules.engine.incident import IncidentSummary
from watchstep_services.api.schemas.paging import PageOutput
from watchstep_services.core.events import CloudEvent

_HEALTH_BYTES = 64 * 1024
_NAME = "1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit."


class _Input(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class JobInput(_Input):
    """The job that an attempt is."""

    backend: str = Field(description="Kind of job, e.g. local.", max_length=32)
    id: str = Field(description="As people know it.", max_length=256)
    identity: dict[str, str | int] = Field(
        description="What tells it from a later job with the same id; of a local process: pid, start_ticks, boot, host."
    )


class RunInput(_Input):
    """A run to make known."""

    run: str = Field(description=_NAME)
    rules: list[dict[str, Any]] = Field(
        default_factory=list, max_length=200, description="Rule configs, as in a rule file."
    )
    allow_stop: str = Field(
        "",
        max_length=1000,
        description="Why these rules may stop jobs of the project from now on, where they say 'stop'; only of an operator.",
    )
    attempt: str = Field("", description="The attempt that begins; needed to bind a job. " + _NAME)
    job: JobInput | None = Field(None, description="Only an operator may bind one.")


class JobBinding(_Input):
    """A job to bind to an attempt."""

    attempt: str = Field("", description="Which attempt; the newest where empty.")
    job: JobInput


class StopInput(_Input):
    """A stop that an operator asks for."""

    reason: str = Field("stopped by an operator", max_length=1000)
    attempt: str = Field("", description="Which attempt; the newest where empty.")


class AnnouncementInput(_Input):
    """A segment that lies on the store. It is a hint: nothing but the store's content counts."""

    attempt: str = Field(description=_NAME)
    node: str = Field(description=_NAME)
    writer: str = Field(description=_NAME)
    seq: int = Field(ge=0, lt=10**10, description="Its place in the writer's sequence.")
    first: int = Field(ge=0, lt=10**18, description="Its first step.")
    last: int = Field(ge=0, lt=10**18, description="Its last step, which its writer has passed.")
    health: dict[str, Any] = Field(default_factory=dict, description="The recorder's counters.")
    urgent: bool = Field(
        False,
        description="Values have just become NaN or infinite: the run is to be evaluated before others, believed once a minute.",
    )

    @field_validator("health")
    @classmethod
    def _is_small(cls, value: dict[str, Any]) -> dict[str, Any]:
        # Written anew without NaN and infinity, which are no JSON and which PostgreSQL refuses.
        text = json.dumps(value)
        if len(text) > _HEALTH_BYTES:
            raise ValueError(f"{len(text)} bytes of health, over the limit of {_HEALTH_BYTES}")
        told: dict[str, Any] = json.loads(text, parse_constant=str)
        return told


class StopData(BaseModel):
    """A stop, as workers are asked for it."""

    attempt: str
    step: int
    reason: str
    event: str
    agreed: bool = Field(
        True,
        description="Whether all workers know of the step; until then each answers whether it can stop there.",
    )


class SnapshotData(BaseModel):
    """A snapshot, as workers are asked for it."""

    id: str
    step: int
    attempt: str = ""


class ControlData(BaseModel):
    """The control document: what is asked of the run's workers."""

    version: int
    stop: StopData | None
    snapshots: list[SnapshotData]
    cadence: list[tuple[str, int]]
    tombstone: str
    admitted: str = Field(
        "", description="The one attempt that may start in spite of the tombstone; empty for none."
    )


class AnnouncementResponse(BaseModel):
    """The answer to an announcement."""

    control: ControlData
    pause_seconds: float = Field(
        0.0,
        description="The service lags: leave so long between two announcements, unless something is urgent.",
    )


class OverriddenRule(BaseModel):
    """A rule config that does not judge, for another of its name stands for it."""

    origin: str = Field(description="recorder.")
    rule: str
    config: dict[str, Any]


class RuleState(BaseModel):
    """A rule config of a run and how it stands. Its health is apart from its alert."""

    name: str
    rule: str
    origin: str = Field(description="owner, project, operator or recorder.")
    granted_stop: bool = Field(description="Whether its alert stops the job, should it say 'stop'.")
    health: str = Field(description="ok, no_data or error; of the newest attempt.")
    problem: str
    warnings: list[str] = Field(description="What the service cannot do that the config asks for.")
    judged: int = Field(description="Rows judged.")
    findings: int = Field(description="Findings so far; the first thousand are kept.")
    phase: str = Field(description="inactive, pending, firing or resolved.")
    isolation: dict[str, Any] | None = Field(
        None, description="How far a Python rule's process was shut in when it was last judged."
    )
    overrides: list[OverriddenRule] = Field(
        default_factory=list,
        description="What a recorder asks for by the same name, which neither judges nor tells anybody.",
    )
    config: dict[str, Any]


class JobOutput(BaseModel):
    """The job of the newest attempt."""

    backend: str
    id: str
    identity: dict[str, Any]
    bound_by: str
    state: str
    exit_code: int | None


class AlertCounts(BaseModel):
    """Alerts of a run by phase."""

    pending: int = 0
    firing: int = 0
    resolved: int = 0
    notes: int = Field(0, description="How many of those that fire are of severity info.")


class RunSummary(BaseModel):
    """A run in a list."""

    project: str
    run: str
    url: str
    state: str = Field(description="created, running, completed, failed, stopped or lost.")
    attempt: str = Field(description="The newest; empty before the first.")
    last_step: int = Field(description="The largest step judged; -1 before the first.")
    created_ns: int
    ended_ns: int | None
    alerts: AlertCounts


class RunOutput(RunSummary):
    """A run."""

    control: ControlData
    job: JobOutput | None
    rules: list[RuleState]
    health: dict[str, Any] = Field(description="Faults of the recorder, the store and the segments.")


class RunList(PageOutput):
    """Runs, the newest first."""

    runs: list[RunSummary]


class AlertDetails(BaseModel):
    """What is said of an alert that has fired."""

    since_step: int = Field(description="The first step of the findings that made it fire.")
    since_ns: int = Field(description="When that was, by the clock of the rank.")
    labels: dict[str, str] = Field(description="The rule config's.")
    dry_run: bool = Field(description="It stops nothing and nobody is told.")
    inhibited_by: str | None = Field(description="The rule config that keeps it quiet.")
    message: str = Field(description="The rule config's own message, or the finding's.")
    explanation: Explanation


class AlertOutput(BaseModel):
    """An alert: a rule config on one attempt."""

    id: int
    run: str
    fingerprint: str = Field(description="The same on every attempt of the run.")
    name: str
    rule: str
    attempt: str
    severity: str
    phase: str
    since_step: int
    since_ns: int
    fired_ns: int | None
    resolved_ns: int | None
    finding: dict[str, Any] | None
    details: AlertDetails | None = Field(description="Once it has fired.")
    incident: IncidentSummary | None = Field(
        description="The alerts of the attempt that began close to it, and the likeliest cause among them; null for none."
    )


class AlertList(PageOutput):
    """Alerts, those that began last first."""

    alerts: list[AlertOutput]


class EventList(PageOutput):
    """Events in the order in which they came, and where the next ones follow."""

    events: list[CloudEvent]
    after: int = Field(description="Pass it as 'after' to get later events only.")


class TryOutput(BaseModel):
    """One try of an action."""

    number: int
    at_ns: int
    outcome: str
    detail: str


class ActionOutput(BaseModel):
    """An action and its tries."""

    id: int
    key: str
    kind: str
    event_id: str
    state: str = Field(description="pending, done, skipped or failed.")
    stage: int
    outcome: str
    created_ns: int
    finished_ns: int | None
    tries: list[TryOutput]


class ActionList(PageOutput):
    """Actions in the order in which they came."""

    actions: list[ActionOutput]


class StopOutput(BaseModel):
    """The answer to a stop."""

    accepted: bool = Field(description="False where the attempt has been asked to stop already.")
    attempt: str


class BacktestInput(_Input):
    """Runs to judge again."""

    runs: list[Annotated[str, Field(max_length=128)]] = Field(
        min_length=1, max_length=1000, description="Names of runs of the project; * and ? stand for anything."
    )
    rules: list[dict[str, Any]] = Field(
        default_factory=list,
        max_length=200,
        description="Rule configs, as in a rule file; the default rules where none.",
    )
    sweep: list[Annotated[str, Field(max_length=1000)]] = Field(
        default_factory=list,
        max_length=8,
        description="Other values of a parameter: [CONFIG.]PARAMETER=FROM:TO[:NUMBER] or =A,B,C.",
    )


class BacktestOutput(BaseModel):
    """A backtest, and what it found."""

    id: int
    state: str = Field(description="waiting, running or done.")
    runs: int = Field(description="How many runs are judged.")
    judged: int = Field(description="How many have been.")
    report: dict[str, Any] | None = Field(
        description="As 'watchstep rules backtest --json' writes it; once it is done."
    )


class RuleSummary(BaseModel):
    """A rule in a list."""

    name: str
    summary: str


class RuleOutput(RuleSummary):
    """A rule and its parameters."""

    description: str
    merge: str
    collections: list[str]
    parameters: dict[str, Any] = Field(description="JSON schema of the parameters.")


class RuleList(BaseModel):
    """The rules by name."""

    rules: list[RuleSummary]


class ServiceHealth(BaseModel):
    """Whether the service works."""

    status: str
