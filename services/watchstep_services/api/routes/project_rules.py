"""Rule configs of a project: they judge every run that is registered from then on."""

from __future__ import annotations

from fastapi import APIRouter, Response
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep.format.layout import check_name
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.etags import IfMatch, require_match, tag
from watchstep_services.api.middleware.work_slots import Working
from watchstep_services.api.routes.rule_configs import ConfigOutput, RuleConfigBody, checked, shown_config
from watchstep_services.api.schemas.paging import ListOrder, Paged, PageOutput
from watchstep_services.api.schemas.problems import documented
from watchstep_services.auth.roles import AuthenticatedCaller
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import ProjectRule
from watchstep_services.runs.registration import ensure_project

project_rules_router = APIRouter(prefix="/v1/projects/{project}/rules", tags=["rule configs"])


class ProjectRuleList(PageOutput):
    """Rule configs by name."""

    rules: list[ConfigOutput]


@project_rules_router.get("", summary="List rule configs of a project")
@permits("read")
def list_project_rules(project: str, service: Served, caller: Caller, paging: Paged) -> ProjectRuleList:
    """The project's own rule configs, by name; the owner's come on top of them."""
    check_name("project", project)
    with service.database.read() as session:
        of_project = ProjectRule.project == project
        rows, token = paging.fetch(session, ProjectRule, [of_project], ListOrder(ProjectRule.name))
    return ProjectRuleList(rules=[_project_rule_output(row, caller) for row in rows], next_page_token=token)


@project_rules_router.get("/{name}", summary="Look at a rule config of a project")
@permits("read")
def get_project_rule(
    project: str, name: str, service: Served, caller: Caller, response: Response
) -> ConfigOutput:
    """One of the project's own rule configs."""
    with service.database.read() as session:
        held = _project_rule_output(_find_project_rule(session, project, name), caller)
    tag(response, held)
    return held


@project_rules_router.put("/{name}", summary="Put a rule config on a project", responses=documented(409, 412))
@permits("operate")
def put_project_rule(
    project: str,
    name: str,
    body: RuleConfigBody,
    service: Served,
    caller: Caller,
    slots: Working,
    response: Response,
    if_match: IfMatch = None,
) -> ConfigOutput:
    """Have a rule judge the runs that are registered from now on, in place of the owner's of that name.

    Whether it stops jobs is granted apart. Runs that are known already get it when they are registered again.
    """
    config = checked(slots, project, name, body)
    with service.database.write() as session:
        ensure_project(session, service, project)
        row = session.get(ProjectRule, (project, name), with_for_update=True)
        require_match(if_match, None if row is None else _project_rule_output(row, caller))
        now = read_clock(session)
        if row is None:
            row = ProjectRule(
                project=project, name=name, rule=config.rule, data=config.as_data(), changed_ns=now
            )
            session.add(row)
        else:
            row.rule, row.data, row.changed_ns = config.rule, config.as_data(), now
        held = _project_rule_output(row, caller)
    tag(response, held)
    return held


@project_rules_router.delete(
    "/{name}", summary="Remove a rule config from a project", status_code=204, responses=documented(412)
)
@permits("operate")
def delete_project_rule(
    project: str, name: str, service: Served, caller: Caller, if_match: IfMatch = None
) -> None:
    """Have it judge no run that is registered from now on; runs that have it keep it."""
    with service.database.write() as session:
        row = _find_project_rule(session, project, name)
        require_match(if_match, _project_rule_output(row, caller))
        session.delete(row)


def _find_project_rule(session: Session, project: str, name: str) -> ProjectRule:
    check_name("project", project)
    row = session.get(ProjectRule, (project, name))
    if row is None:
        raise NotFoundError(f"rule config {name!r}: none of project {project}", "list the project's rules")
    return row


def _project_rule_output(row: ProjectRule, caller: AuthenticatedCaller) -> ConfigOutput:
    config = shown_config(row.data, caller)
    return ConfigOutput(name=row.name, rule=row.rule, origin="project", config=config)
