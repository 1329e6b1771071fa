"""Request and response models that several routes share."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from watchstep_rules.engine.incident import Explanation, IncidentSummary
from watchstep_services.api.schemas.paging import PageOutput
from watchstep_services.core.events import CloudEvent

MOST_SEGMENTS = 256
"""Segments in one announcement."""

QUIET = "Since when nothing of a run in progress was evaluated, if that is 30 s or more; null: less, or it is over."
_HEALTH_BYTES = 64 * 1024
_NUL = re.compile(r"((?<!\\)(?:\\\\)*)\\u0000")
"""The escape of NUL, which PostgreSQL refuses, and the escaped backslashes before it."""

_NAME = "1 to 128 letters, digits, '.', '_' or '-', starting with a letter or digit."


class _Input(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class JobInput(_Input):
    """The job that runs an attempt."""

    backend: str = Field(description="Backend kind, for example local.", max_length=32)
    id: str = Field(description="Job id, as the backend shows it.", max_length=256)
    identity: dict[str, str | int] = Field(
        description="Fields that distinguish the job from a later one with the same id; for a local process: pid, start_ticks, boot, host."
    )


class RunInput(_Input):
    """A run to register."""

    run: str = Field(description=_NAME)
    rules: list[dict[str, Any]] = Field(
        default_factory=list, max_length=200, description="Rule configs, as in a rule file."
    )
    allow_stop: str = Field(
        "",
        max_length=1000,
        description="Reason for allowing these rules to stop jobs of the project, if they have the action 'stop'; operators only.",
    )
    attempt: str = Field("", description="Attempt that starts; required to bind a job. " + _NAME)
    job: JobInput | None = Field(None, description="Job to bind; operators only.")
    store: str = Field(
        "",
        max_length=1024,
        description="URL of the store that the run is recorded to; empty: that of the project's new runs. A bucket must be registered for the project.",
    )


class JobBinding(_Input):
    """A job to bind to an attempt."""

    attempt: str = Field("", description="Attempt of the run; empty: the newest.")
    job: JobInput


class StopInput(_Input):
    """A stop that an operator requests."""

    reason: str = Field("stopped by an operator", max_length=1000)
    attempt: str = Field("", description="Attempt of the run; empty: the newest.")


class AnnouncedSegment(_Input):
    """A segment on the store."""

    node: str = Field(description=_NAME)
    writer: str = Field(description=_NAME)
    seq: int = Field(ge=0, lt=10**10, description="Position in the writer's sequence.")
    first: int = Field(ge=0, lt=10**18, description="First step.")
    last: int = Field(ge=0, lt=10**18, description="Last step, which the writer has passed.")


class AnnouncementInput(_Input):
    """Segments of one attempt on the store. They are hints: the service reads the content from the store only."""

    attempt: str = Field(description=_NAME)
    segments: list[AnnouncedSegment] = Field(
        min_length=1, max_length=MOST_SEGMENTS, description="In the order in which they were written."
    )
    health: dict[str, Any] = Field(
        default_factory=dict, description="Counters of the recorder, for the writer of the last segment."
    )
    urgent: bool = Field(
        False,
        description="Values have just become NaN or infinite. The run is evaluated before others; accepted once a minute.",
    )

    @field_validator("health")
    @classmethod
    def _is_small(cls, value: dict[str, Any]) -> dict[str, Any]:
        # Rewritten without NaN and infinity, which are not valid JSON and which PostgreSQL refuses.
        text = json.dumps(value)
        if len(text) > _HEALTH_BYTES:
            raise ValueError(f"{len(text)} bytes of health: more than the limit of {_HEALTH_BYTES}")
        if "\\ud" in text or "\\u0000" in text:  # unpaired surrogates, and NUL, become question marks
            text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace").decode()
            text = _NUL.sub(r"\1?", text)
        health: dict[str, Any] = json.loads(text, parse_constant=str)
        return health


class StopData(BaseModel):
    """A stop request to workers."""

    attempt: str
    step: int
    reason: str
    event: str
    agreed: bool = Field(
        True,
        description="Whether all workers have agreed on the step; until then each reports whether it can stop there.",
    )


class SnapshotData(BaseModel):
    """A snapshot request to workers."""

    id: str
    step: int
    attempt: str = ""


class NeedData(BaseModel):
    """What a rule config needs the run's workers to capture."""

    rule: str
    collections: list[str]
    probes: list[str] = Field(default_factory=list, description="Additional figures.")
    every: int = Field(0, description="Number of steps between full tensors of the collections; 0: none.")
    modes: list[str] = Field(default_factory=list, description="Modes of the full tensors; empty: all.")


class ControlData(BaseModel):
    """The control document: what the run's workers are requested to do."""

    version: int
    stop: StopData | None
    snapshots: list[SnapshotData]
    cadence: list[tuple[str, int]]
    tombstone: str
    admitted: str = Field(
        "", description="The only attempt that may start despite the tombstone; empty: none."
    )
    needs: list[NeedData] = Field(
        default_factory=list, description="What the rules of the run need the workers to capture."
    )


class AnnouncementResponse(BaseModel):
    """The response to an announcement."""

    control: ControlData
    pause_seconds: float = Field(
        0.0,
        description="Pause to leave between announcements that are not urgent, while the service lags; 0: none.",
    )
    evaluated: bool = Field(
        False, description="Whether rows of the run were evaluated since it was last registered."
    )
    ignored: int = Field(
        0,
        description="Segments that were not added to the inbox, because too many wait for their evaluation.",
    )


class OverriddenRule(BaseModel):
    """A rule config that is not evaluated, because another of the same name overrides it."""

    origin: str = Field(description="Always recorder.")
    rule: str
    config: dict[str, Any]


class RuleState(BaseModel):
    """A rule config of a run with its state. Its health is independent of its alert."""

    name: str
    rule: str
    origin: str = Field(description="owner, project, operator or recorder.")
    granted_stop: bool = Field(description="Whether its alert may stop the job, if it has the action 'stop'.")
    health: str = Field(description="Health on the newest attempt: ok, no_data or error.")
    problem: str
    warnings: list[str] = Field(
        description="Parts of the config that the service cannot execute, such as unknown receivers."
    )
    evaluated_rows: int = Field(description="Number of evaluated rows.")
    findings: int = Field(description="Number of findings; the first thousand are stored.")
    phase: str = Field(description="inactive, pending, firing or resolved.")
    isolation: dict[str, Any] | None = Field(
        None, description="Isolation of a Python rule's process at its last evaluation."
    )
    overrides: list[OverriddenRule] = Field(
        default_factory=list,
        description="Rule configs of recorders with the same name, which are neither evaluated nor notified.",
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
    """Number of alerts of a run by phase."""

    pending: int = 0
    firing: int = 0
    resolved: int = 0
    notes: int = Field(0, description="Number of firing alerts of severity info.")


class RunSummary(BaseModel):
    """A run in a list."""

    project: str
    run: str
    url: str
    state: str = Field(description="created, running, completed, failed, stopped or lost.")
    attempt: str = Field(description="Newest attempt; empty: none.")
    last_step: int = Field(description="Largest evaluated step; -1: none.")
    created_ns: int
    ended_ns: int | None
    alerts: AlertCounts
    store: str = Field(
        description="URL or folder that contains <project>/<run>/, from which the service reads it."
    )
    evaluated_ns: int = Field(
        description="When rows of the run were last evaluated since it was last registered; 0: not since then."
    )
    quiet_since_ns: int | None = Field(description=QUIET)


class RunOutput(RunSummary):
    """A run."""

    control: ControlData
    job: JobOutput | None
    rules: list[RuleState]
    health: dict[str, Any] = Field(description="Problems of the recorders, the store and the segments.")


class RegisteredRun(RunOutput):
    """A run that was registered."""

    store_id: str = Field(
        description="Id in the marker of the store's folder, which a recorder waits for if its own folder has another; empty for a bucket, and if it is not known yet."
    )
    capture: dict[str, Any] | None = Field(
        description="Capture document of the project, for a launch that sets no configuration; null: none."
    )
    page_url: str = Field(
        description="URL of the run's web page; empty if the service has no public URL (`WATCHSTEP_PUBLIC_URL`)."
    )


class RunList(PageOutput):
    """Runs, newest first."""

    runs: list[RunSummary]


class AlertDetails(BaseModel):
    """Details of an alert that has fired."""

    since_step: int = Field(description="First step of the findings that made it fire.")
    since_ns: int = Field(description="Time of that step, by the clock of the rank.")
    labels: dict[str, str] = Field(description="Labels of the rule config.")
    dry_run: bool = Field(description="Whether the alert neither stops a job nor notifies anybody.")
    inhibited_by: str | None = Field(description="Rule config that inhibits it; null: none.")
    message: str = Field(description="Message of the rule config, or of the finding.")
    explanation: Explanation


WasRight = Literal["", "yes", "no", "not_sure"]
"""The answer of a person to whether an alert was right; empty: none yet."""


class AlertOutput(BaseModel):
    """An alert: a rule config on one attempt."""

    id: int
    run: str
    fingerprint: str = Field(description="Id of the alert, the same on every attempt of the run.")
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
    details: AlertDetails | None = Field(description="Null until it has fired.")
    incident: IncidentSummary | None = Field(
        description="Alerts of the attempt that started close to it, with the likeliest cause; null: none."
    )
    was_right: WasRight = Field(
        description="Answer of a person, for all attempts of the run; empty: none yet."
    )


class AlertList(PageOutput):
    """Alerts, most recently started first."""

    alerts: list[AlertOutput]


class EventList(PageOutput):
    """Events, oldest first, and the position after them."""

    events: list[CloudEvent]
    after: int = Field(description="Position after these events, to pass as 'after'.")


class TryOutput(BaseModel):
    """One attempt to execute an action."""

    number: int
    at_ns: int
    outcome: str
    detail: str


class ActionOutput(BaseModel):
    """An action and the attempts to execute it."""

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
    """Actions, oldest first."""

    actions: list[ActionOutput]


class StopOutput(BaseModel):
    """The response to a stop request."""

    accepted: bool = Field(description="False if a stop of the attempt was already requested.")
    attempt: str


class BacktestInput(_Input):
    """A backtest to start."""

    runs: list[Annotated[str, Field(max_length=128)]] = Field(
        min_length=1, max_length=1000, description="Names of runs of the project, with the wildcards * and ?."
    )
    rules: list[dict[str, Any]] = Field(
        default_factory=list,
        max_length=200,
        description="Rule configs, as in a rule file; empty: the default rules.",
    )
    sweep: list[Annotated[str, Field(max_length=1000)]] = Field(
        default_factory=list,
        max_length=8,
        description="Values of parameters to compare: [CONFIG.]PARAMETER=FROM:TO[:NUMBER] or =A,B,C.",
    )


class BacktestOutput(BaseModel):
    """A backtest and its report."""

    id: int
    state: str = Field(description="waiting, running or done.")
    runs: int = Field(description="Number of runs.")
    evaluated_runs: int = Field(description="Number of evaluated runs.")
    report: dict[str, Any] | None = Field(
        description="Report in the format of 'watchstep rules backtest --json'; null until it is done."
    )


class RuleSummary(BaseModel):
    """A rule in a list."""

    name: str
    summary: str
    group: str = Field(
        description="What it is about: activations, data, gradients, losses, system, tensors or weights; sagemaker, or custom."
    )
    usual_causes: list[str] = Field(description="What most often makes it fire, the likeliest first.")
    default: str = Field(description="Severity among the default rules; off: it is none of them.")
    why_off: str = Field(description="Why it is none of the default rules; empty if it is one.")


class RuleOutput(RuleSummary):
    """A rule and its parameters."""

    description: str
    what_to_try: list[str] = Field(description="Remedies, in the order of the causes.")
    cannot_distinguish: list[str] = Field(
        description="Healthy trainings that it may report, and faults that it may miss, by its nature."
    )
    merge: str
    collections: list[str]
    parameters: dict[str, Any] = Field(description="JSON schema of the parameters.")


class RuleList(BaseModel):
    """Rules by name."""

    rules: list[RuleSummary]


class QueueStatus(BaseModel):
    """Work that is due and that no worker has claimed."""

    name: str = Field(
        description="runs: runs to evaluate; actions: stops, notifications and webhooks to try; backtests: backtests to continue."
    )
    length: int
    oldest_seconds: float = Field(description="How long the oldest has waited; 0 if there is none.")


class ServiceStatus(BaseModel):
    """What waits in the service, and for how long."""

    version: str
    database: bool = Field(
        description="Whether the database responds; all other values are 0 or empty if not."
    )
    queues: list[QueueStatus]
    waiting_segments: int = Field(
        description="Segments that were announced or found, and are not evaluated yet."
    )
    oldest_segment_seconds: float = Field(description="How long the oldest of them has waited.")
    projects: dict[str, float] = Field(
        default_factory=dict,
        description="How long the oldest of them has waited, by project; the 100 projects that wait longest.",
    )
    pending_actions: dict[str, int] = Field(description="Unfinished actions, due or not, by kind.")
    runs: dict[str, int] = Field(description="Runs by state.")


class ServiceHealth(BaseModel):
    """Health of the service."""

    status: str
