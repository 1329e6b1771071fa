"""Runs and their attempts: registration, lists, stops, and bound jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.layout import check_name
from watchstep_launch.backend import JobHandle
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.python_rule import NOT_FROM_RECORDERS, no_programs
from watchstep_services.api.lookup import find_run, unknown_run
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.idempotency import Once
from watchstep_services.api.middleware.request_limits import Working, check_rules
from watchstep_services.api.queries.state import Querying
from watchstep_services.api.routes.rules import rules_of
from watchstep_services.api.schemas.filters import Phase, Since, States, Until, between, one_of
from watchstep_services.api.schemas.models import (
    AlertCounts,
    ControlData,
    JobBinding,
    JobInput,
    JobOutput,
    RegisteredRun,
    RunInput,
    RunList,
    RunOutput,
    RunSummary,
    StopInput,
    StopOutput,
)
from watchstep_services.api.schemas.paging import ListOrder, Paged, PageOutput
from watchstep_services.api.schemas.problems import RequestRefusedError, documented
from watchstep_services.auth import AuthenticatedCaller
from watchstep_services.core.events import run_url
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import AlertRow, Attempt, BoundJobRow, RunRow
from watchstep_services.runs import registration
from watchstep_services.runs.lifecycle import health_of, quiet_since
from watchstep_services.runs.registration import RunOrigin, bind_job, register
from watchstep_services.runs.rule_configs import Origin
from watchstep_services.runs.stops import StopRequester, allow, request_stop
from watchstep_services.service.context import Service
from watchstep_services.tenancy import ConflictError, bound_job, capture_document

router = APIRouter(prefix="/v1/projects/{project}/runs", tags=["runs"])


@router.post("", summary="Register a run", response_model=RegisteredRun)
@permits("record", run_in_body=True)
async def register_run(
    project: str, body: RunInput, service: Served, caller: Caller, slots: Working
) -> Response:
    """Register a run, before or after its first segment is on the store. Idempotent.

    The service owner's rules also evaluate the run. The requested rules stop a job only if an operator has allowed it; otherwise
    the audit log records the stop that they would have requested.
    """
    work = partial(_register, service, project, body, caller)
    return Response(await slots.register(project, body.rules, work), media_type="application/json")


def _register(service: Service, project: str, body: RunInput, caller: AuthenticatedCaller) -> bytes:
    """Register a run; returns the answer, which is encoded here because that takes as long as the rest if the run has many rules."""
    if caller.run is not None:
        _check_token_run(service, project, body.run, caller.run)
    operator = caller.may("operate")
    if body.job is not None and not operator:
        raise RequestRefusedError(
            403, "a recorder token may not bind a job", "bind the job at launch, or use an operator token"
        )
    if body.allow_stop and not operator:
        raise RequestRefusedError(
            403, "a recorder token may not allow a stop", "have an operator do it: watchstep rules allow-stop"
        )
    if body.job is not None and not body.attempt:
        raise ConfigError("attempt: missing for the job", "set the attempt that the job runs")
    if body.attempt:
        check_name("attempt", body.attempt)
    if not operator:
        registration.check_counts(body.rules)
    job = _handle(body.job) if body.job is not None else None  # refused before anything is written
    origin: Origin = "operator" if operator else "recorder"
    source = RunOrigin(body.store, caller.token if operator else "")
    with no_programs("" if operator else NOT_FROM_RECORDERS):
        rules = check_rules(body.rules)
    run_id = register(service, project, body.run, rules, origin, source)
    if body.allow_stop:
        _allow(service, project, rules, caller.who, body.allow_stop)
    if job is not None:
        bind_job(service, run_id, body.attempt, job, caller.role)
    service.notifier.run_changed(run_id)
    output = _read(service, project, body.run, caller)
    with service.database.read() as session:
        capture = capture_document(session, project)
        store_id = service.stores.id_of(find_run(session, project, body.run).place)
    page_url = service.links.run(project, body.run)
    answer = RegisteredRun(**dict(output), store_id=store_id, capture=capture, page_url=page_url)
    return answer.model_dump_json().encode()


@router.get("", summary="List runs")
@permits("read")
def list_runs(
    project: str,
    service: Served,
    paging: Paged,
    states: States = None,
    alerts: Annotated[
        list[Phase] | None,
        Query(alias="alert", max_length=4, description="Only runs with an alert in one of these phases."),
    ] = None,
    since: Since = None,
    until: Until = None,
) -> RunList:
    """Return the runs of a project, newest first."""
    check_name("project", project)
    conditions = [
        RunRow.project == project,
        *one_of(RunRow.state, states),
        *between(RunRow.created_ns, since, until),
    ]
    if alerts:
        conditions.append(RunRow.id.in_(select(AlertRow.run_id).where(AlertRow.phase.in_(alerts))))
    with service.database.read() as session:
        rows, token = paging.fetch(session, RunRow, conditions, ListOrder(RunRow.id, descending=True))
        counts, now = _counts(session, [row.id for row in rows]), read_clock(session)
        runs = [RunSummary(**_summary(service, row, counts[row.id], now)) for row in rows]
    return RunList(runs=runs, next_page_token=token)


@router.get("/{run}", summary="Get a run")
@permits("read")
def get_run(project: str, run: str, queries: Querying, caller: Caller) -> RunOutput:
    """Return state, alerts, job, rules and health of a run."""
    with queries.slots.acquire(project):
        return _read(queries.service, project, run, caller)


@router.post(
    "/{run}/stop", summary="Stop a run", status_code=202, dependencies=[Once], responses=documented(409)
)
@permits("operate")
def stop_run(project: str, run: str, body: StopInput, service: Served, caller: Caller) -> StopOutput:
    """Request the workers to stop, then end the job. Repeated requests stop an attempt once.

    If a stop had no effect, for example because no job was bound yet, and the attempt continues, another request tries again.
    """
    with service.database.write() as session:
        row = find_run(session, project, run)
        attempt = check_name("attempt", body.attempt or row.attempt) if body.attempt or row.attempt else ""
        if not attempt:
            raise ConfigError(f"run {project}/{run}: has no attempt yet", "stop the run after it has started")
        attempt_row = session.execute(select(Attempt.id).filter_by(run_id=row.id, attempt=attempt)).first()
        if attempt_row is None:
            raise NotFoundError(f"attempt {attempt!r}: not found", f"the newest is {row.attempt!r}")
        if (
            attempt == row.attempt
            and row.state in ("completed", "failed")
            and bound_job(session, row.id, attempt) is None
        ):
            raise ConflictError(
                f"run {project}/{run}: attempt {attempt} has ended ({row.state}), so that there is nothing to stop",
                "stop it while it is running",
            )
        cause, requester = ("", body.reason), StopRequester(caller.who)
        action = request_stop(session, service.base_url, row.id, attempt, cause, requester)
    if action is not None:
        service.notifier.action_due(action)
    return StopOutput(accepted=action is not None, attempt=attempt)


@router.put("/{run}/job", summary="Bind a job")
@permits("operate")
def put_job(project: str, run: str, body: JobBinding, service: Served, caller: Caller) -> RunOutput:
    """Bind an attempt to its job, so that the service can stop it."""
    with service.database.read() as session:
        row = find_run(session, project, run)
    attempt = body.attempt or row.attempt
    if not attempt:
        raise ConfigError(f"run {project}/{run}: has no attempt yet", "set the attempt that the job runs")
    bind_job(service, row.id, attempt, _handle(body.job), caller.role)
    return _read(service, project, run, caller)


def _check_token_run(service: Service, project: str, run: str, own: str) -> None:
    """Check that a token of one run registers that run, and does not recreate it after its deletion.

    Raises:
        BadNameError: the name is not valid.
        NotFoundError: it is another run, or was deleted.
    """
    check_name("run", run)
    if run != own:
        raise unknown_run(project, run)
    with service.database.read() as session:
        find_run(session, project, run)


def _allow(service: Service, project: str, rules: tuple[RuleConfig, ...], who: str, reason: str) -> None:
    with service.database.write() as session:
        for config in rules:
            if config.stops:
                allow(session, project, config, who, reason)


def _handle(job: JobInput) -> JobHandle:
    return JobHandle(job.backend, job.id, job.identity)


def _read(service: Service, project: str, run: str, caller: AuthenticatedCaller) -> RunOutput:
    with service.database.read() as session:
        row = find_run(session, project, run)
        bound = bound_job(session, row.id, row.attempt)
        return RunOutput(
            **_summary(service, row, _counts(session, [row.id])[row.id], read_clock(session)),
            control=ControlData.model_validate(row.control),
            job=None if bound is None else job_output(bound.row),
            rules=rules_of(service, session, row, caller),
            health=health_of(row, read_clock(session)),
        )


def _counts(session: Session, run_ids: Sequence[int]) -> dict[int, AlertCounts]:
    by_phase_and_severity = (
        select(AlertRow.run_id, AlertRow.phase, AlertRow.severity, func.count())
        .where(AlertRow.run_id.in_(run_ids), AlertRow.phase.in_(("pending", "firing", "resolved")))
        .group_by(AlertRow.run_id, AlertRow.phase, AlertRow.severity)
    )
    counts: dict[int, Counter[str]] = {run_id: Counter() for run_id in run_ids}
    for run_id, phase, severity, number in session.execute(by_phase_and_severity):
        counts[run_id][phase] += int(number)
        if phase == "firing" and severity == "info":
            counts[run_id]["notes"] += int(number)
    return {run_id: AlertCounts(**by_phase) for run_id, by_phase in counts.items()}


def _summary(service: Service, row: RunRow, alerts: AlertCounts, now: int) -> dict[str, Any]:
    return {
        "project": row.project,
        "run": row.run,
        "url": run_url(service.base_url, row.project, row.run),
        "state": row.state,
        "attempt": row.attempt,
        "last_step": row.last_step,
        "created_ns": row.created_ns,
        "ended_ns": row.ended_ns,
        "alerts": alerts,
        "store": row.place.location,
        "evaluated_ns": row.evaluated_ns if row.evaluated_ns > row.registered_ns else 0,
        "quiet_since_ns": quiet_since(row, now),
    }


attempts_router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/attempts", tags=["runs"])


class AttemptOutput(BaseModel):
    """An attempt of a run."""

    attempt: str
    world_size: int = Field(description="Number of ranks; 0 until it is known.")
    on_stop: str = Field(description="What its workers do when a stop is requested.")
    started_ns: int = Field(description="Start, by the clock of the attempt; 0 until it is known.")
    first_seen_ns: int = Field(
        description="Time at which the service first read data of the attempt; 0 until then."
    )
    watermark: int = Field(description="Last step that all live workers have passed; -1: none.")
    largest: int = Field(description="Largest step that was read; -1: none.")
    ends: dict[str, Any] = Field(description="Rank to how it ended.")
    job: JobOutput | None


class AttemptList(PageOutput):
    """Attempts, oldest first."""

    attempts: list[AttemptOutput]


@attempts_router.get("", summary="List attempts")
@permits("read")
def list_attempts(project: str, run: str, service: Served, paging: Paged) -> AttemptList:
    """Return the attempts of a run, in the order in which the service detected them."""
    with service.database.read() as session:
        row = find_run(session, project, run)
        rows, token = paging.fetch(session, Attempt, [Attempt.run_id == row.id], ListOrder(Attempt.id))
        chosen = select(BoundJobRow).where(
            BoundJobRow.run_id == row.id, BoundJobRow.attempt.in_([row.attempt for row in rows])
        )
        jobs = {job.attempt: job for job in session.execute(chosen).scalars()}
    attempts = [_attempt(row, jobs.get(row.attempt)) for row in rows]
    return AttemptList(attempts=attempts, next_page_token=token)


@attempts_router.get("/{attempt}", summary="Get an attempt")
@permits("read")
def get_attempt(project: str, run: str, attempt: str, service: Served) -> AttemptOutput:
    """Return the progress of an attempt, how its workers ended, and its job."""
    check_name("attempt", attempt)
    with service.database.read() as session:
        row = find_run(session, project, run)
        key = {"run_id": row.id, "attempt": attempt}
        attempt_row = session.execute(select(Attempt).filter_by(**key)).scalar_one_or_none()
        job = session.execute(select(BoundJobRow).filter_by(**key)).scalar_one_or_none()
    if attempt_row is None:
        raise NotFoundError(
            f"attempt {attempt!r} of run {project}/{run}: not found", "list the run's attempts"
        )
    return _attempt(attempt_row, job)


def _attempt(row: Attempt, job: BoundJobRow | None) -> AttemptOutput:
    columns = {name: getattr(row, name) for name in AttemptOutput.model_fields if name != "job"}
    return AttemptOutput(**columns, job=None if job is None else job_output(job))


def job_output(job: BoundJobRow) -> JobOutput:
    """Return the response for a bound job."""
    return JobOutput(
        backend=job.backend,
        id=job.job_id,
        identity=job.identity,
        bound_by=job.bound_by,
        state=job.state,
        exit_code=job.exit_code,
    )
