"""Which rules may stop jobs of a project, by whose word, and the audit log of every stop."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement

from watchstep.errors import NotFoundError
from watchstep.format.layout import check_name
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.api.lookup import find_project
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.idempotency import Once
from watchstep_services.api.middleware.request_limits import Working, WorkSlots
from watchstep_services.api.schemas.paging import ListOrder, Paged, PageOutput
from watchstep_services.api.schemas.problems import documented
from watchstep_services.core.redaction import without_addresses
from watchstep_services.db.models import AuditEntry, StopGrant
from watchstep_services.runs.stops import Kind, allow, revoke, the_config_called

router = APIRouter(prefix="/v1/projects/{project}", tags=["stops"])
Number = Annotated[int, Path(ge=1, lt=2**63, description="The grant's id.")]


class GrantInput(BaseModel):
    """A rule that may stop from now on, exactly as it is: its name, its parameters, and all that decides when it fires."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={"examples": [{"rule": "nan_or_inf", "reason": "quiet for a month of backtests"}]},
    )

    rule: str = Field(min_length=1, max_length=128, description="The rule config's name.")
    reason: str = Field(min_length=1, max_length=1000, description="Why; it stands in the audit log.")
    run: str = Field("", max_length=128, description="As it is in this run; needed where runs differ.")
    digest: str = Field(
        "", max_length=64, pattern="^[0-9a-f]*$", description="Or: its digest, or the beginning of that."
    )
    config: dict[str, Any] | None = Field(None, description="Or: the rule config itself, as in a rule file.")


class RevokeInput(BaseModel):
    """Why a grant is taken back."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: str = Field(min_length=1, max_length=1000)


class GrantOutput(BaseModel):
    """A grant."""

    id: int
    name: str
    rule: str
    digest: str = Field(description="Of what the rule config judges.")
    judges: dict[str, Any]
    granted_by: str
    reason: str
    granted_ns: int
    revoked_by: str
    revoked_reason: str
    revoked_ns: int | None = Field(description="Null while it holds.")


class GrantList(PageOutput):
    """Grants, the newest first."""

    grants: list[GrantOutput]


class AuditOutput(BaseModel):
    """A line of the audit log."""

    id: int
    at_ns: int
    kind: str = Field(
        description="requested, repeated, would_have, tried, ended, allowed, revoked or restart_allowed."
    )
    run: str = Field(description="Empty for what holds for the whole project.")
    attempt: str
    who: str = Field(description="Asked, allowed, or tried.")
    data: dict[str, Any] = Field(
        description="Of a request: the rule config, the finding, the evidence, by whose word it may stop. Of a try: its outcome."
    )


class AuditList(PageOutput):
    """Lines of the audit log, the newest first."""

    entries: list[AuditOutput]


@router.post(
    "/stop-grants", summary="Let a rule stop", status_code=201, dependencies=[Once], responses=documented(409)
)
@permits("operate")
def grant_stop(
    project: str, body: GrantInput, service: Served, caller: Caller, slots: Working
) -> GrantOutput:
    """From now on, alerts of exactly this rule config stop their jobs, in every run of the project. Safe to repeat."""
    with service.database.read() as session:
        find_project(session, project)
    given = None if body.config is None else _given(slots, project, body.rule, body.config)
    with service.database.write() as session:
        find_project(session, project)
        config = given or the_config_called(session, project, body.rule, body.run, body.digest)
        return _grant(allow(session, project, config, caller.who, body.reason))


@router.get("/stop-grants", summary="List grants")
@permits("read")
def list_grants(
    project: str,
    service: Served,
    paging: Paged,
    active: Annotated[bool, Query(description="Only those that hold.")] = False,
) -> GrantList:
    """Who let which rule stop, and who took it back."""
    with service.database.read() as session:
        find_project(session, project)
        conditions: list[ColumnElement[bool]] = [StopGrant.project == project]
        conditions += [StopGrant.revoked_ns.is_(None)] if active else []
        rows, token = paging.fetch(session, StopGrant, conditions, ListOrder(StopGrant.id, descending=True))
        return GrantList(grants=[_grant(row) for row in rows], next_page_token=token)


@router.post("/stop-grants/{number}/revoke", summary="Let a rule stop no longer")
@permits("operate")
def revoke_grant(
    project: str, number: Number, body: RevokeInput, service: Served, caller: Caller
) -> GrantOutput:
    """Take a grant back. What it has stopped stays stopped. Safe to repeat."""
    with service.database.write() as session:
        find_project(session, project)
        row = session.get(StopGrant, number, with_for_update=True)
        if row is None or row.project != project:
            raise NotFoundError(f"grant {number} of project {project}: not known", "the list has the ids")
        revoke(session, row, caller.who, body.reason)
        return _grant(row)


@router.get("/audit", summary="Read the audit log")
@permits("read")
def list_audit(
    project: str,
    service: Served,
    paging: Paged,
    run: Annotated[str | None, Query(max_length=128, description="Only of this run.")] = None,
    attempt: Annotated[str | None, Query(max_length=128, description="Only of this attempt.")] = None,
    kind: Annotated[Kind | None, Query(description="Only lines of this kind.")] = None,
) -> AuditList:
    """Every stop: who asked and by whose word, on which evidence, each try, how it ended. Lines outlive their runs."""
    check_name("project", project)
    conditions: list[ColumnElement[bool]] = [AuditEntry.project == project]
    if run is not None:
        conditions.append(AuditEntry.run == check_name("run", run))
    if attempt is not None:
        conditions.append(AuditEntry.attempt == check_name("attempt", attempt))
    conditions += [AuditEntry.kind == kind] if kind is not None else []
    with service.database.read() as session:
        rows, token = paging.fetch(session, AuditEntry, conditions, ListOrder(AuditEntry.id, descending=True))
        return AuditList(entries=[_entry(row) for row in rows], next_page_token=token)


def _given(slots: WorkSlots, project: str, name: str, data: dict[str, Any]) -> RuleConfig:
    (config,) = slots.checked_rules(project, [data])
    if config.name != name:
        raise NotFoundError(f"rule {name!r}: the config is called {config.name!r}", "give one name")
    return config


def _entry(row: AuditEntry) -> AuditOutput:
    held: dict[str, Any] = {name: getattr(row, name) for name in AuditOutput.model_fields}
    return AuditOutput(**{**held, "data": without_addresses(row.data)})


def _grant(row: StopGrant) -> GrantOutput:
    return GrantOutput(**{name: getattr(row, name) for name in GrantOutput.model_fields})
