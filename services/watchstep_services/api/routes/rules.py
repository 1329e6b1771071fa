"""The rules that can be configured.

Rule configs as the API takes and gives them.

How the rule configs of a run stand.

Rule configs of a run: which judge it, and how they stand; an operator adds, changes and removes them while it goes on.

Rule configs of a project: they judge every run that is registered from then on.

Backtests: judge runs that are there already, by rules that are not in force.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any

from fastapi import APIRouter, Body, Response
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError, RuleError
from watchstep.format.layout import check_name
from watchstep_rules.backtest.report import report
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.python_rule import Python
from watchstep_rules.registry import KINDS, RULES, find_rule
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.etags import IfMatch, require_match, tag
from watchstep_services.api.middleware.idempotency import Once
from watchstep_services.api.middleware.request_limits import Working, WorkSlots
from watchstep_services.api.schemas.models import (
    BacktestInput,
    BacktestOutput,
    OverriddenRule,
    RuleList,
    RuleOutput,
    RuleState,
    RuleSummary,
)
from watchstep_services.api.schemas.paging import ListOrder, Paged, PageOutput
from watchstep_services.api.schemas.problems import documented
from watchstep_services.auth.tokens import AuthenticatedCaller
from watchstep_services.core.redaction import without_addresses
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import ProjectRule, RuleConfigRow, RuleStateRow, RunRow
from watchstep_services.evaluation.backtests import read_progress, request_backtest
from watchstep_services.notify.directory import known_receivers
from watchstep_services.runs import rule_configs
from watchstep_services.runs.registration import ensure_project
from watchstep_services.runs.rule_configs import OVERRIDDEN, STRONGER_THAN_RECORDERS
from watchstep_services.runs.stops import word_for
from watchstep_services.service.context import Service
from watchstep_services.service.judging import load_config, memory_of

router = APIRouter(prefix="/v1/rules", tags=["rules"])


@router.get("", summary="List rules")
@permits("read")
def list_rules() -> RuleList:
    """All rules by name."""
    every = {**RULES, **KINDS}
    return RuleList(rules=[RuleSummary(name=name, summary=every[name].summary) for name in sorted(every)])


@router.get("/{name}", summary="Look at a rule")
@permits("read")
def get_rule(name: str) -> RuleOutput:
    """What a rule tests, and the JSON schema of its parameters."""
    try:
        rule = find_rule(name)
    except RuleError as error:
        raise NotFoundError(error.what, error.hint) from error
    return RuleOutput(
        name=rule.name,
        summary=rule.summary,
        description=inspect.getdoc(type(rule)) or "",
        merge=rule.merge,
        collections=list(rule.needs.collections),
        parameters=rule.params_type.model_json_schema(),
    )


RuleConfigBody = Annotated[
    dict[str, Any],
    Body(
        description="A rule config, as an entry of 'rules' in a rule file; its name is that of the address.",
        examples=[{"rule": "vanishing_gradient", "params": {"threshold": 1e-7}, "severity": "critical"}],
    ),
]


class ConfigOutput(BaseModel):
    """A rule config. Its ETag is for ``If-Match``."""

    name: str
    rule: str
    origin: str = Field(description="owner, project, operator or recorder.")
    config: dict[str, Any] = Field(
        description="As in a rule file. Addresses of webhooks are shown to those who may operate; to others, their hosts."
    )


def shown_config(data: dict[str, Any], caller: AuthenticatedCaller) -> dict[str, Any]:
    """A rule config as somebody may see it."""
    told: dict[str, Any] = data if caller.may("operate") else without_addresses(data)
    return told


def checked(slots: WorkSlots, project: str, name: str, body: dict[str, Any]) -> RuleConfig:
    """A rule config of a name, looked over as 'watchstep rules check' does.

    Raises:
        BusyError, RefusedError: it cannot be checked now.
        RuleError: it cannot be used; all that is wrong with it is named.
    """
    given = body.get("name", name)
    if given != name:
        raise RuleError(
            f"name {str(given)[:80]!r}: the address says {name!r}", "leave it out, or make them the same"
        )
    (config,) = slots.checked_rules(project, [{**body, "name": name}])
    return config


def rules_of(service: Service, session: Session, run: RunRow, caller: AuthenticatedCaller) -> list[RuleState]:
    """The rule configs that judge a run, in the order in which they came, as they stand on its newest attempt."""
    rows = session.execute(
        select(RuleConfigRow, RuleStateRow)
        .outerjoin(
            RuleStateRow, (RuleStateRow.config_id == RuleConfigRow.id) & (RuleStateRow.attempt == run.attempt)
        )
        .where(RuleConfigRow.run_id == run.id, ~RuleConfigRow.origin.startswith("retired"))
        .order_by(RuleConfigRow.id)
    ).all()
    overridden = {
        row.name: OverriddenRule(origin="recorder", rule=row.rule, config=shown_config(row.data, caller))
        for row in session.execute(
            select(RuleConfigRow).filter_by(run_id=run.id, origin=OVERRIDDEN)
        ).scalars()
    }
    known = known_receivers(service, session, run.project)
    states = []
    for config, held in rows:
        asked = load_config(config, None).config
        memory = memory_of(None if held is None else held.state)
        states.append(
            RuleState(
                name=config.name,
                rule=config.rule,
                origin=config.origin,
                granted_stop=asked is not None and word_for(session, run.project, config, asked) is not None,
                health=memory.health.value,
                problem=memory.problem,
                warnings=[] if asked is None else service.unknown_receivers(asked, known),
                judged=memory.judged,
                findings=0 if held is None else held.findings,
                phase=memory.alert.phase.value,
                isolation=(memory.state or {}).get("isolation") if config.rule == Python.name else None,
                overrides=[overridden[config.name]]
                if config.name in overridden and config.origin in STRONGER_THAN_RECORDERS
                else [],
                config=shown_config(config.data, caller),
            )
        )
    return states


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


backtests_router = APIRouter(prefix="/v1/projects/{project}/backtests", tags=["backtests"])


@backtests_router.post(
    "", summary="Ask for a backtest", status_code=202, dependencies=[Once], responses=documented(409)
)
@permits("operate")
def post_backtest(project: str, body: BacktestInput, service: Served, slots: Working) -> BacktestOutput:
    """Judge runs of the project. Nothing is stopped or told; what was found is read by the number that is given."""
    rules = slots.checked_rules(project, body.rules) if body.rules else DEFAULT_RULES
    number = request_backtest(service, project, body.runs, rules, body.sweep)
    return _read(service, project, number)


@backtests_router.get("/{number}", summary="Look at a backtest")
@permits("operate")
def get_backtest(project: str, number: int, service: Served) -> BacktestOutput:
    """How far it came, and, once it is done, what it found."""
    return _read(service, project, number)


def _read(service: Service, project: str, number: int) -> BacktestOutput:
    held = read_progress(service, project, number)
    return BacktestOutput(
        id=held.id,
        state=held.state,
        runs=len(held.runs),
        judged=len(held.results),
        report=report(held.results, held.variations) if held.state == "done" else None,
    )
