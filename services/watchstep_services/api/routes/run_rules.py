"""Rule configs of a run: which judge it, and how they stand; an operator adds, changes and removes them while it goes on."""

from __future__ import annotations

from fastapi import APIRouter, Response
from pydantic import BaseModel
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.etags import IfMatch, require_match, tag
from watchstep_services.api.middleware.work_slots import Working
from watchstep_services.api.routes.rule_configs import ConfigOutput, RuleConfigBody, checked, shown_config
from watchstep_services.api.routes.rule_states import rules_of
from watchstep_services.api.schemas.models import RuleState
from watchstep_services.api.schemas.problems import documented
from watchstep_services.auth.roles import AuthenticatedCaller
from watchstep_services.db.models import RuleConfigRow, RunRow
from watchstep_services.runs import rule_configs

run_rules_router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/rules", tags=["rule configs"])


class RuleStateList(BaseModel):
    """Rule configs in the order in which they came."""

    rules: list[RuleState]


@run_rules_router.get("", summary="List rule configs of a run")
@permits("read")
def list_run_rules(project: str, run: str, service: Served, caller: Caller) -> RuleStateList:
    """The rule configs that judge a run, and how they stand on its newest attempt."""
    with service.database.read() as session:
        return RuleStateList(rules=rules_of(service, session, find_run(session, project, run), caller))


@run_rules_router.get("/{name}", summary="Look at a rule config of a run")
@permits("read")
def get_run_rule(
    project: str, run: str, name: str, service: Served, caller: Caller, response: Response
) -> ConfigOutput:
    """The rule config of a name that judges a run: an operator's before the project's, the owner's and a recorder's."""
    with service.database.read() as session:
        held = _run_rule_output(_find_run_rule(session, find_run(session, project, run), name), caller)
    tag(response, held)
    return held


@run_rules_router.put("/{name}", summary="Put a rule config on a run", responses=documented(412))
@permits("operate")
def put_run_rule(
    project: str,
    run: str,
    name: str,
    body: RuleConfigBody,
    service: Served,
    caller: Caller,
    slots: Working,
    response: Response,
    if_match: IfMatch = None,
) -> ConfigOutput:
    """Have a rule judge the run from its next rows on, in place of the one of that name. Whether it stops jobs is granted apart."""
    config = checked(slots, project, name, body)
    with service.database.write() as session:
        row = find_run(session, project, run)
        known = rule_configs.in_force(session, row, name)
        require_match(if_match, None if known is None else _run_rule_output(known, caller))
        rule_configs.put_one(session, row, config)
        held = _run_rule_output(_find_run_rule(session, row, name), caller)
        run_id = row.id
    service.notifier.run_changed(run_id)
    tag(response, held)
    return held


@run_rules_router.delete(
    "/{name}", summary="Remove a rule config from a run", status_code=204, responses=documented(412)
)
@permits("operate")
def delete_run_rule(
    project: str, run: str, name: str, service: Served, caller: Caller, if_match: IfMatch = None
) -> None:
    """Have a rule judge the run no more; what it found stays. Another of the name, which it stood for, does not come back."""
    with service.database.write() as session:
        row = find_run(session, project, run)
        known = _find_run_rule(session, row, name)
        require_match(if_match, _run_rule_output(known, caller))
        rule_configs.remove(session, row, known)


def _find_run_rule(session: Session, run: RunRow, name: str) -> RuleConfigRow:
    held = rule_configs.in_force(session, run, name)
    if held is None:
        raise NotFoundError(
            f"rule config {name!r}: none of run {run.project}/{run.run}", "list the run's rules"
        )
    return held


def _run_rule_output(row: RuleConfigRow, caller: AuthenticatedCaller) -> ConfigOutput:
    config = shown_config(row.data, caller)
    return ConfigOutput(name=row.name, rule=row.rule, origin=row.origin, config=config)
