"""Permissions of rules to stop jobs of a project, and the audit log of stops."""

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
from watchstep_services.runs.stops import Kind, allow, find_config_by_name, revoke

router = APIRouter(prefix="/v1/projects/{project}", tags=["stops"])
Number = Annotated[int, Path(ge=1, lt=2**63, description="The grant's id.")]


class GrantInput(BaseModel):
    """A permission to stop for one exact rule config: its name, parameters, and everything else that decides when it fires."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={"examples": [{"rule": "nan_or_inf", "reason": "quiet for a month of backtests"}]},
    )

    rule: str = Field(min_length=1, max_length=128, description="Name of the rule config.")
    reason: str = Field(min_length=1, max_length=1000, description="Reason, recorded in the audit log.")
    run: str = Field(
        "",
        max_length=128,
        description="Run to take the rule config from; required if it differs between runs.",
    )
    digest: str = Field(
        "",
        max_length=64,
        pattern="^[0-9a-f]*$",
        description="Alternatively: digest of the rule config, or a prefix of it.",
    )
    config: dict[str, Any] | None = Field(
        None, description="Alternatively: the rule config itself, as in a rule file."
    )


class RevokeInput(BaseModel):
    """Reason for revoking a grant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: str = Field(min_length=1, max_length=1000)


class GrantOutput(BaseModel):
    """A permission to stop."""

    id: int
    name: str
    rule: str
    digest: str = Field(description="Digest of the fields that decide when the rule fires.")
    judges: dict[str, Any]
    granted_by: str
    reason: str
    granted_ns: int
    revoked_by: str
    revoked_reason: str
    revoked_ns: int | None = Field(description="Time of the revocation; null while the grant is valid.")


class GrantList(PageOutput):
    """Grants, newest first."""

    grants: list[GrantOutput]


class AuditOutput(BaseModel):
    """An entry of the audit log."""

    id: int
    at_ns: int
    kind: str = Field(
        description="requested, repeated, would_have, tried, ended, allowed, revoked or restart_allowed."
    )
    run: str = Field(description="Name of the run; empty for entries of the whole project.")
    attempt: str
    who: str = Field(description="Who requested, allowed or executed it.")
    data: dict[str, Any] = Field(
        description="For a request: rule config, finding, evidence, and the grant. For an attempt to stop: its outcome."
    )


class AuditList(PageOutput):
    """Entries of the audit log, newest first."""

    entries: list[AuditOutput]


@router.post(
    "/stop-grants",
    summary="Allow a rule to stop",
    status_code=201,
    dependencies=[Once],
    responses=documented(409),
)
@permits("operate")
def grant_stop(
    project: str, body: GrantInput, service: Served, caller: Caller, slots: Working
) -> GrantOutput:
    """Allow alerts of exactly this rule config to stop their jobs, in every run of the project. Idempotent."""
    with service.database.read() as session:
        find_project(session, project)
    sent_config = None if body.config is None else _sent_config(slots, project, body.rule, body.config)
    with service.database.write() as session:
        find_project(session, project)
        config = sent_config or find_config_by_name(session, project, body.rule, body.run, body.digest)
        return _grant(allow(session, project, config, caller.who, body.reason))


@router.get("/stop-grants", summary="List grants")
@permits("read")
def list_grants(
    project: str,
    service: Served,
    paging: Paged,
    active: Annotated[bool, Query(description="Only valid grants.")] = False,
) -> GrantList:
    """Return the permissions to stop, including revoked ones, newest first."""
    with service.database.read() as session:
        find_project(session, project)
        conditions: list[ColumnElement[bool]] = [StopGrant.project == project]
        conditions += [StopGrant.revoked_ns.is_(None)] if active else []
        rows, token = paging.fetch(session, StopGrant, conditions, ListOrder(StopGrant.id, descending=True))
        return GrantList(grants=[_grant(row) for row in rows], next_page_token=token)


@router.post("/stop-grants/{number}/revoke", summary="Revoke a rule's permission to stop")
@permits("operate")
def revoke_grant(
    project: str, number: Number, body: RevokeInput, service: Served, caller: Caller
) -> GrantOutput:
    """Revoke a grant. Jobs that it stopped remain stopped. Idempotent."""
    with service.database.write() as session:
        find_project(session, project)
        row = session.get(StopGrant, number, with_for_update=True)
        if row is None or row.project != project:
            raise NotFoundError(
                f"grant {number} of project {project}: not found", "list the grants to get their ids"
            )
        revoke(session, row, caller.who, body.reason)
        return _grant(row)


@router.get("/audit", summary="Read the audit log")
@permits("read")
def list_audit(
    project: str,
    service: Served,
    paging: Paged,
    run: Annotated[str | None, Query(max_length=128, description="Only entries of this run.")] = None,
    attempt: Annotated[str | None, Query(max_length=128, description="Only entries of this attempt.")] = None,
    kind: Annotated[Kind | None, Query(description="Only entries of this kind.")] = None,
) -> AuditList:
    """Return the audit log of stops: requester, grant, evidence, each attempt to stop, and outcome. Entries outlive their runs."""
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


def _sent_config(slots: WorkSlots, project: str, name: str, data: dict[str, Any]) -> RuleConfig:
    (config,) = slots.checked_rules(project, [data])
    if config.name != name:
        raise NotFoundError(
            f"rule {name!r}: the config has the name {config.name!r}", "use the same name in both"
        )
    return config


def _entry(row: AuditEntry) -> AuditOutput:
    columns: dict[str, Any] = {name: getattr(row, name) for name in AuditOutput.model_fields}
    return AuditOutput(**{**columns, "data": without_addresses(row.data)})


def _grant(row: StopGrant) -> GrantOutput:
    return GrantOutput(**{name: getattr(row, name) for name in GrantOutput.model_fields})
