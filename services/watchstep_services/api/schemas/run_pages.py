"""Responses of the pages about runs: the table of a project's runs, and the overview of one run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from watchstep_services.api.schemas.binned_lines import LineGroup, StepGrid
from watchstep_services.api.schemas.models import QUIET, AlertCounts

HealthLevel = Literal["ok", "warning", "fault", "unknown"]
RateKind = Literal["recent", "mean"]
LaneState = Literal["ok", "pending", "firing", "resolved", "no_data", "error"]


class StepRate(BaseModel):
    """How fast a run makes steps."""

    steps_per_second: float
    kind: RateKind = Field(
        description="recent: of the last ten minutes with data; mean: of the newest attempt."
    )


class Overhead(BaseModel):
    """Cost of recording, as a share of the program's time; of several recorders, the largest."""

    share: float = Field(description="Since the start.")
    recent_share: float | None = Field(description="In the last five minutes; null: not known.")
    budget: float | None = Field(description="The budget; null: none is set.")
    steps: int | None = Field(
        description="Number of steps so far; null: not known. The first steps are measured beyond the budget."
    )


class HealthDigest(BaseModel):
    """Health of a run's recorders in one line."""

    level: HealthLevel = Field(
        description="fault: a recorder had a fault; warning: rows or objects were dropped, or a document, store or segment has "
        "a problem; unknown: no recorder has reported."
    )
    recorders: int = Field(description="Number of recorders that reported.")
    faults: int
    dropped: int = Field(description="Number of dropped rows, steps and objects.")
    problems: list[str] = Field(description="The first problems as text.")


class StopFacts(BaseModel):
    """A stop of an attempt."""

    attempt: str
    reason: str
    step: int | None = Field(description="Step at which the workers stop; null: not agreed.")
    event: str = Field(description="Id of the event that requested it.")
    fingerprint: str | None = Field(description="Alert that requested it; null: an operator, or not known.")
    state: str = Field(description="pending, done, skipped or failed; empty: no action is stored.")
    outcome: str = Field(description="Result of the action; empty: none yet.")
    requested_ns: int | None
    finished_ns: int | None


class RunFacts(BaseModel):
    """What is known about a run without its statistics."""

    project: str
    run: str
    url: str
    state: str = Field(description="created, running, completed, failed, stopped or lost.")
    attempt: str = Field(description="Newest attempt; empty: none.")
    attempts: int
    workers: int = Field(description="Number of ranks of the newest attempt; 0: not known.")
    last_step: int = Field(description="Largest evaluated step; -1: none.")
    max_step: int | None = Field(description="Number of steps that the run will make; null: not known.")
    rate: StepRate | None
    created_ns: int
    started_ns: int | None = Field(
        description="Start of the first attempt, by its own clock; null: not known."
    )
    last_seen_ns: int = Field(description="When the service last received or read data of the run.")
    quiet_since_ns: int | None = Field(description=QUIET)
    ended_ns: int | None = Field(
        description="When its last worker ended, as it recorded; if that is not known, when the service noticed. Null: it has not ended."
    )
    duration_ns: int | None = Field(
        description="From the start to the end, or to last_seen_ns while it runs; null: not started."
    )
    overhead: Overhead | None
    health: HealthDigest
    alerts: AlertCounts = Field(description="Alerts over all attempts.")
    tags: list[str]
    reason: str = Field(
        description="Why it ended: reason of the stop, or of a worker's failure; empty: none."
    )


class RunTable(BaseModel):
    """A page of the table of runs."""

    runs: list[RunFacts]
    total: int = Field(description="Number of runs that match the filters.")
    offset: int = Field(description="Number of matching runs before this page.")
    tags: list[str] = Field(description="Tags of the project, for the filter; at most 200.")


class RunMark(BaseModel):
    """Something that happened, to be marked on the step axis."""

    id: str = Field(description="Id of the event; of a start of an attempt, 'attempt:' and its name.")
    type: str = Field(description="Type of the event, or attempt.started.")
    at_ns: int = Field(description="Time by the service's clock.")
    step: int | None = Field(description="Step; null: it belongs to no step, place it by its time.")
    attempt: str
    superseded: bool = Field(
        description="Whether a later attempt repeated the step, so that its statistics are not shown."
    )
    title: str = Field(description="One line of text.")
    severity: str = Field(description="Severity of the alert; empty: not an alert.")
    name: str = Field(description="Rule config; empty: none.")
    fingerprint: str = Field(description="Fingerprint of the alert; empty: none.")
    since_step: int | None = Field(
        None,
        description="Of an alert: the step from which the run is bad, the first of its findings; null: none.",
    )
    worker: int | None = Field(None, description="Rank of the worker of the alert's finding; null: none.")
    tensor: str = Field("", description="Tensor that the alert's finding is about; empty: none.")
    causes: list[str] = Field(
        [],
        description="Earlier tensors in the data flow that were bad at this step, the origin first.",
    )
    inhibited_by: str = Field("", description="Rule config whose alert explains this one; empty: none.")


class LaneInterval(BaseModel):
    """Steps during which a rule was in one state. Intervals of a lane are ordered and do not overlap."""

    state: LaneState
    attempt: str
    first: int = Field(description="First step.")
    last: int | None = Field(description="Last step; null: it still lasts.")
    from_ns: int | None = Field(description="When the state began, by the service's clock; null: not known.")
    message: str = Field(description="Message of the alert, or problem of the rule; may be empty.")


class RuleLane(BaseModel):
    """A rule config of a run and its states over the steps."""

    name: str
    rule: str
    severity: str
    origin: str = Field(
        description="owner, project, operator or recorder; empty: it is not evaluated any more."
    )
    fingerprint: str = Field(description="Fingerprint of its alert; empty: it has never fired.")
    phase: str = Field(description="Phase of its alert on the newest attempt.")
    health: str = Field(description="Health on the newest attempt: ok, no_data or error.")
    problem: str
    intervals: list[LaneInterval]


class AttemptFacts(BaseModel):
    """An attempt of a run."""

    attempt: str
    world_size: int = Field(description="Number of ranks; 0: not known.")
    started_ns: int | None
    first_seen_ns: int | None
    first_step: int | None = Field(description="First recorded step; null: none.")
    last_step: int = Field(description="Largest step that was read; -1: none.")
    watermark: int
    states: dict[str, int] = Field(description="How its workers ended: state to number of workers.")
    reason: str = Field(description="Reason of the first worker that failed or was stopped; empty: none.")
    job: str = Field(description="Backend and id of its job; empty: none is bound.")
    job_state: str


class RecorderFacts(BaseModel):
    """The last report of a recorder."""

    writer: str
    overhead: Overhead | None
    faults: int
    dropped: int
    notes: dict[str, str] = Field(description="What it could not record, and why.")
    report: dict[str, Any] = Field(description="The report as it was received.")


class RunHealth(BaseModel):
    """Health of a run."""

    summary: HealthDigest
    recorders: list[RecorderFacts]
    left_out: int = Field(description="Number of recorders beyond the limit.")
    documents: dict[str, str] = Field(description="Documents, segments and listings with problems.")


class ExternalLink(BaseModel):
    """Address of the run in another tool."""

    name: str
    url: str = Field(description="An http or https address. It comes from the recorder: show the host.")


class Configuration(BaseModel):
    """Configuration of a run."""

    config: dict[str, Any] = Field(description="Capture configuration of the run document.")
    environment: dict[str, str] = Field(
        description="Provenance of the newest attempt, without secrets: command line, folder, commit, versions, host, devices and some environment variables."
    )
    hyperparameters: dict[str, float | None] = Field(
        description="Last recorded value of each hyperparameter of the optimizers."
    )
    created_ns: int | None
    location: str = Field(description="URL of the run on its store, for watchstep.open_run.")


class RunOverview(BaseModel):
    """The page of a run in one response."""

    run: RunFacts
    stop: StopFacts | None
    problem: str = Field(description="Why there are no statistics; empty: there are.")
    grid: StepGrid
    losses: LineGroup
    optimizer: LineGroup = Field(
        description="Learning rates and other hyperparameters. A value lasts until the next one: columns without a row repeat it, with count 0."
    )
    metrics: LineGroup = Field(
        description="Other scalars that the program recorded; of several workers, a line per worker."
    )
    system: LineGroup = Field(
        description="Load of processors, memory and GPUs, and waiting for data; of several workers, a line per worker."
    )
    workers: list[int] = Field(description="Ranks of the workers with records.")
    collections: dict[str, int] = Field(description="Recorded collections: name to number of tensors.")
    marks: list[RunMark] = Field(description="By time.")
    marks_left_out: int = Field(description="Number of earlier marks beyond the limit.")
    lanes: list[RuleLane]
    configuration: Configuration
    attempts: list[AttemptFacts] = Field(description="Oldest first.")
    health: RunHealth
    links: list[ExternalLink]
