"""The response of the page about an alert: what fired, its evidence, what happened before, and what can be done."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from watchstep_rules.engine.incident import Explanation, IncidentSummary
from watchstep_rules.signals.deviations import Deviation
from watchstep_services.api.schemas.binned_lines import Values
from watchstep_services.api.schemas.models import ActionOutput, WasRight
from watchstep_services.api.schemas.run_pages import RunFacts, StopFacts


class RuleDocumentation(BaseModel):
    """What a rule means."""

    name: str
    summary: str = Field(description="When it fires, in one line.")
    description: str = Field(description="How it decides; paragraphs of plain text.")
    usual_causes: list[str] = Field(description="The likeliest for this finding first; not a diagnosis.")
    what_to_try: list[str]


class FiredRule(BaseModel):
    """The rule config of an alert."""

    name: str
    rule: str
    severity: str
    origin: str = Field(description="Empty: the rule config is not evaluated any more.")
    config: dict[str, Any] = Field(description="The rule config as in a rule file.")
    parameters: dict[str, Any] = Field(description="All parameters with their values, also the defaults.")
    parameter_schema: dict[str, Any] = Field(description="JSON schema of the parameters.")
    health: str = Field(description="Health on the newest attempt: ok, no_data or error.")
    problem: str
    documentation: RuleDocumentation


class Episode(BaseModel):
    """One time that an alert fired."""

    attempt: str
    since_step: int = Field(description="First step of the findings that made it fire.")
    step: int = Field(description="Step at which it fired.")
    fired_ns: int
    resolved_step: int | None
    resolved_ns: int | None
    message: str
    event_id: str


class AlertFinding(BaseModel):
    """The finding that an alert names as its cause."""

    step: int
    mode: str
    worker: int
    tensor: str = Field(description="Empty: the finding concerns the run as a whole.")
    module: str
    module_type: str
    role: str
    value: float | None = Field(description="Null: not finite; see value_text.")
    value_text: str
    threshold: float | None
    threshold_text: str
    message: str
    time_ns: int
    upstream: list[str]
    origin: str


class EvidenceLine(BaseModel):
    """A figure of the tensor around the step, one entry per row or, with many rows, per range of steps."""

    tensor: str
    figure: str
    mode: str
    worker: int
    measures_value: bool = Field(
        description="Whether the figure is what the rule compared, so that the thresholds have the same axis."
    )
    step: list[int]
    last_step: list[int]
    time_ns: list[int | None]
    mean: Values
    min: Values
    max: Values
    nonfinite: list[int]


class ThresholdPoint(BaseModel):
    """A finding of the rule: the value that it measured at a step, and its threshold there."""

    step: int
    tensor: str
    worker: int
    value: float | None
    threshold: float | None


class AlertSeries(BaseModel):
    """The evidence of an alert."""

    first: int = Field(description="First step of the window.")
    last: int = Field(description="Last step of the window.")
    lines: list[EvidenceLine] = Field(
        description="The line that the finding is about first, then the losses. Empty: the statistics are not available."
    )
    findings: list[ThresholdPoint] = Field(
        description="Stored findings in the window. Between them, the rule has not stored its threshold."
    )
    fixed_threshold: float | None = Field(
        description="Threshold of every step, if it is a parameter of the rule; null: it varies, or is not known."
    )
    fixed_parameter: str = Field(description="That parameter; empty: none.")


class PriorEvent(BaseModel):
    """Something that happened before an alert fired."""

    kind: Literal["event", "alert", "hyperparameter", "attempt", "checkpoint"]
    step: int | None
    at_ns: int | None
    title: str
    fingerprint: str = Field("", description="Of an alert: its fingerprint.")
    before: float | None = Field(None, description="Of a hyperparameter: the value before the change.")
    after: float | None = Field(None, description="Of a hyperparameter: the value after it.")


class RecordedObject(BaseModel):
    """An object on the store with data of the alert's step."""

    kind: Literal["snapshot", "trace", "samples", "bundle"]
    path: str = Field(description="Key below the run.")
    attempt: str
    worker: int
    first: int
    last: int
    mode: str = Field("", description="Of a snapshot.")
    collection: str = Field("", description="Of a snapshot with the tensors of a collection.")
    reason: str = Field("", description="Of a bundle: why it was taken.")


class CommandLines(BaseModel):
    """A command, or lines of Python, to copy."""

    title: str
    language: Literal["sh", "python"]
    text: str


class AlertDeviations(BaseModel):
    """Tensors outside their own earlier range at the step, largest deviation first."""

    deviations: list[Deviation]
    tensors_left_out: int
    superseded: bool = Field(description="Whether a later attempt repeated the step.")
    problem: str = Field(description="Why nothing was compared; empty: it was.")


class AlertState(BaseModel):
    """An alert over all attempts of its run."""

    fingerprint: str
    name: str
    rule: str
    severity: str
    phase: str = Field(description="firing or resolved.")
    episode: int
    attempt: str
    step: int = Field(description="Step of the last change.")
    since_step: int | None = Field(description="First step of the findings that made it fire.")
    since_ns: int
    fired_ns: int
    resolved_ns: int | None
    dry_run: bool
    inhibited_by: str
    labels: dict[str, str]
    message: str
    explanation: Explanation | None
    was_right: WasRight = Field(description="Answer of a person; empty: none yet.")


class AcknowledgementState(BaseModel):
    """Who acknowledged an alert."""

    who: str
    at_ns: int | None
    comment: str


class SilenceState(BaseModel):
    """The silence that applies to an alert."""

    id: int
    author: str
    reason: str
    ends_ns: int
    suppresses_stop: bool


class OtherAlert(BaseModel):
    """Another alert of the same run."""

    fingerprint: str
    name: str
    severity: str
    phase: str = Field(description="pending, firing or resolved, on the newest attempt.")
    step: int | None = Field(
        description="Step from which the run is bad, the first of the findings; null: it has not fired."
    )
    inhibited_by: str = Field("", description="Rule config whose alert explains this one; empty: none.")


class AlertPage(BaseModel):
    """The page of an alert in one response."""

    run: RunFacts
    stop: StopFacts | None
    alert: AlertState
    finding: AlertFinding
    rule: FiredRule
    incident: IncidentSummary | None
    episodes: list[Episode] = Field(description="Newest first; at most 50.")
    series: AlertSeries
    deviations: AlertDeviations
    computation: list[str] = Field(
        description="Tensors of the findings and deviations in the order in which a step computes them: what comes first can be the cause."
    )
    before: list[PriorEvent] = Field(description="Newest first.")
    actions: list[ActionOutput] = Field(description="Actions of the alert's events, with every attempt.")
    acknowledgement: AcknowledgementState | None
    silence: SilenceState | None
    objects: list[RecordedObject] = Field(description="At most 200.")
    commands: list[CommandLines]
    others: list[OtherAlert] = Field(description="Other alerts of the run, in the order of its rules.")
