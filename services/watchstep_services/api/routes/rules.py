"""Rules, rule configs of runs and projects, and backtests.

Rules are the kinds that can be configured. The rule configs of a run evaluate it; an operator adds, changes and removes them while
it runs. The rule configs of a project apply to every run that is registered later. A backtest evaluates recorded runs with rules
that are not in force.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Response
from pydantic import BaseModel, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import NotFoundError, RuleError
from watchstep.format.layout import check_name
from watchstep_rules.backtest.backtest import report
from watchstep_rules.config.defaults import DEFAULT_RULES, OFF_BY_DEFAULT
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.python_rule import Python
from watchstep_rules.engine.incident import sentence
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.registry import KINDS, RULES, find_rule
from watchstep_rules.rule import AnyRule
from watchstep_services.api.lookup import find_run
from watchstep_services.api.middleware.access import Caller, Served, permits
from watchstep_services.api.middleware.etags import IfMatch, IfNoneMatch, require_absent, require_match, tag
from watchstep_services.api.middleware.idempotency import Once
from watchstep_services.api.middleware.request_limits import Working, WorkSlots
from watchstep_services.api.queries.state import Querying
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
from watchstep_services.auth import AuthenticatedCaller
from watchstep_services.core.redaction import without_addresses
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import ProjectRule, RuleConfigRow, RuleStateRow, RunRow
from watchstep_services.evaluation.backtests import read_progress, request_backtest
from watchstep_services.notify.directory import known_receivers
from watchstep_services.runs import rule_configs
from watchstep_services.runs.registration import ensure_project
from watchstep_services.runs.rule_configs import OVERRIDDEN, STRONGER_THAN_RECORDERS
from watchstep_services.runs.rule_health import no_data_reason, shown_memory, shown_state
from watchstep_services.runs.stops import permission_for
from watchstep_services.service.context import Service
from watchstep_services.service.judging import load_config

router = APIRouter(prefix="/v1/rules", tags=["rules"])


@router.get("", summary="List rules")
@permits("read")
def list_rules() -> RuleList:
    """Return all rules, by name."""
    rules = {**RULES, **KINDS}
    return RuleList(rules=[RuleSummary(**_summary_of(rules[name])) for name in sorted(rules)])


def _summary_of(rule: AnyRule) -> dict[str, Any]:
    configs = [config for config in DEFAULT_RULES if config.rule == rule.name]
    _, _, module = type(rule).__module__.partition(".builtin.")
    return {
        "name": rule.name,
        "summary": rule.summary,
        "group": module.partition(".")[0] if module else "custom",
        "usual_causes": [sentence(text) for text in rule.usual_causes],
        "default": configs[0].severity if configs else "off",
        "why_off": "" if configs else OFF_BY_DEFAULT.get(rule.name, ""),
    }


@router.get("/{name}", summary="Get a rule")
@permits("read")
def get_rule(name: str) -> RuleOutput:
    """Return what a rule tests, and the JSON schema of its parameters."""
    try:
        rule = find_rule(name)
    except RuleError as error:
        raise NotFoundError(error.what, error.hint) from error
    return RuleOutput(
        **_summary_of(rule),
        description=inspect.getdoc(type(rule)) or "",
        what_to_try=[sentence(text) for text in rule.what_to_try],
        cannot_distinguish=[sentence(text) for text in rule.cannot_distinguish],
        merge=rule.merge,
        collections=list(rule.needs.collections),
        parameters=rule.params_type.model_json_schema(),
    )


RuleConfigBody = Annotated[
    dict[str, Any],
    Body(
        description="A rule config, as an entry of 'rules' in a rule file. The address contains its name.",
        examples=[{"rule": "vanishing_gradient", "params": {"threshold": 1e-7}, "severity": "critical"}],
    ),
]


class ConfigOutput(BaseModel):
    """A rule config. Use its ETag for ``If-Match``."""

    name: str
    rule: str
    origin: str = Field(description="owner, project, operator or recorder.")
    config: dict[str, Any] = Field(
        description="The rule config as in a rule file. Callers without the permission operate see only the hosts of webhook addresses."
    )


def shown_config(data: dict[str, Any], caller: AuthenticatedCaller) -> dict[str, Any]:
    """Return the parts of a rule config that a caller may see."""
    config: dict[str, Any] = data if caller.may("operate") else without_addresses(data)
    return config


def checked(slots: WorkSlots, project: str, name: str, body: dict[str, Any]) -> RuleConfig:
    """Return a validated rule config, checked like `watchstep rules check` does.

    Raises:
        BusyError, RequestRefusedError: the config cannot be checked now.
        RuleError: the config is not valid. The error lists all problems.
    """
    body_name = body.get("name", name)
    if body_name != name:
        raise RuleError(
            f"name {str(body_name)[:80]!r}: differs from {name!r} in the address",
            "omit the name, or use the same in both",
        )
    (config,) = slots.checked_rules(project, [{**body, "name": name}])
    return config


def rules_of(service: Service, session: Session, run: RunRow, caller: AuthenticatedCaller) -> list[RuleState]:
    """Return the rule configs that evaluate a run, oldest first, with their states on its newest attempt."""
    rows = session.execute(
        select(RuleConfigRow, shown_state(RuleStateRow.state), RuleStateRow.findings)
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
    receivers = known_receivers(service, session, run.project)
    states = []
    for row, shown, findings in rows:
        config = load_config(row, None).config
        memory = shown_memory(shown)
        states.append(
            RuleState(
                name=row.name,
                rule=row.rule,
                origin=row.origin,
                granted_stop=config is not None
                and permission_for(session, run.project, row, config) is not None,
                health=memory.health.value,
                problem=memory.problem
                or (no_data_reason(run.health, config) if memory.health is RuleHealth.NO_DATA else ""),
                warnings=[] if config is None else service.unknown_receivers(config, receivers),
                evaluated_rows=memory.evaluated_rows,
                findings=findings or 0,
                phase=memory.alert.phase.value,
                isolation=(memory.state or {}).get("isolation") if row.rule == Python.name else None,
                overrides=[overridden[row.name]]
                if row.name in overridden and row.origin in STRONGER_THAN_RECORDERS
                else [],
                config=shown_config(row.data, caller),
            )
        )
    return states


run_rules_router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/rules", tags=["rule configs"])


class RuleStateList(BaseModel):
    """Rule configs, oldest first."""

    rules: list[RuleState]


@run_rules_router.get("", summary="List rule configs of a run")
@permits("read")
def list_run_rules(project: str, run: str, queries: Querying, caller: Caller) -> RuleStateList:
    """Return the rule configs that evaluate a run, with their states on its newest attempt."""
    service = queries.service
    with queries.slots.acquire(project), service.database.read() as session:
        return RuleStateList(rules=rules_of(service, session, find_run(session, project, run), caller))


@run_rules_router.get("/{name}", summary="Get a rule config of a run")
@permits("read")
def get_run_rule(
    project: str, run: str, name: str, service: Served, caller: Caller, response: Response
) -> ConfigOutput:
    """Return the rule config that is in force: an operator's overrides the project's, the owner's and a recorder's."""
    with service.database.read() as session:
        output = _run_rule_output(_find_run_rule(session, find_run(session, project, run), name), caller)
    tag(response, output)
    return output


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
    """Evaluate the run with this rule config from its next rows on, instead of the one of that name. Stops require a separate grant."""
    config = checked(slots, project, name, body)
    with service.database.write() as session:
        row = find_run(session, project, run)
        previous = rule_configs.in_force(session, row, name)
        require_match(if_match, None if previous is None else _run_rule_output(previous, caller))
        rule_configs.put_one(session, row, config)
        output = _run_rule_output(_find_run_rule(session, row, name), caller)
        run_id = row.id
    service.notifier.run_changed(run_id)
    tag(response, output)
    return output


@run_rules_router.delete(
    "/{name}", summary="Remove a rule config from a run", status_code=204, responses=documented(412)
)
@permits("operate")
def delete_run_rule(
    project: str, run: str, name: str, service: Served, caller: Caller, if_match: IfMatch = None
) -> None:
    """Remove a rule config from the run. Its findings remain. An overridden config of the same name does not return."""
    with service.database.write() as session:
        row = find_run(session, project, run)
        config_row = _find_run_rule(session, row, name)
        require_match(if_match, _run_rule_output(config_row, caller))
        rule_configs.remove(session, row, config_row)


def _find_run_rule(session: Session, run: RunRow, name: str) -> RuleConfigRow:
    row = rule_configs.in_force(session, run, name)
    if row is None:
        raise NotFoundError(
            f"rule config {name!r} of run {run.project}/{run.run}: not found", "list the run's rules"
        )
    return row


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
    """Return the project's own rule configs, by name. The owner's apply in addition and are not listed."""
    check_name("project", project)
    with service.database.read() as session:
        of_project = ProjectRule.project == project
        rows, token = paging.fetch(session, ProjectRule, [of_project], ListOrder(ProjectRule.name))
    return ProjectRuleList(rules=[_project_rule_output(row, caller) for row in rows], next_page_token=token)


@project_rules_router.get("/{name}", summary="Get a rule config of a project")
@permits("read")
def get_project_rule(
    project: str, name: str, service: Served, caller: Caller, response: Response
) -> ConfigOutput:
    """Return one of the project's own rule configs."""
    with service.database.read() as session:
        output = _project_rule_output(_find_project_rule(session, project, name), caller)
    tag(response, output)
    return output


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
    if_none_match: IfNoneMatch = None,
) -> ConfigOutput:
    """Evaluate runs that are registered from now on with this rule config, instead of the owner's of that name.

    Stops require a separate grant. Existing runs get the rule config when they are registered again. With ``If-None-Match: *``, only a
    new rule config is stored.
    """
    config = checked(slots, project, name, body)
    with service.database.write() as session:
        ensure_project(session, service, project)
        row = session.get(ProjectRule, (project, name), with_for_update=True)
        require_match(if_match, None if row is None else _project_rule_output(row, caller))
        require_absent(if_none_match, row is not None)
        now = read_clock(session)
        if row is None:
            row = ProjectRule(
                project=project, name=name, rule=config.rule, data=config.as_data(), changed_ns=now
            )
            session.add(row)
        else:
            row.rule, row.data, row.changed_ns = config.rule, config.as_data(), now
        output = _project_rule_output(row, caller)
    tag(response, output)
    return output


@project_rules_router.delete(
    "/{name}", summary="Remove a rule config from a project", status_code=204, responses=documented(412)
)
@permits("operate")
def delete_project_rule(
    project: str, name: str, service: Served, caller: Caller, if_match: IfMatch = None
) -> None:
    """Remove a rule config for runs that are registered from now on. Existing runs keep it."""
    with service.database.write() as session:
        row = _find_project_rule(session, project, name)
        require_match(if_match, _project_rule_output(row, caller))
        session.delete(row)


def _find_project_rule(session: Session, project: str, name: str) -> ProjectRule:
    check_name("project", project)
    row = session.get(ProjectRule, (project, name))
    if row is None:
        raise NotFoundError(
            f"rule config {name!r} of project {project}: not found", "list the project's rules"
        )
    return row


def _project_rule_output(row: ProjectRule, caller: AuthenticatedCaller) -> ConfigOutput:
    config = shown_config(row.data, caller)
    return ConfigOutput(name=row.name, rule=row.rule, origin="project", config=config)


backtests_router = APIRouter(prefix="/v1/projects/{project}/backtests", tags=["backtests"])


@backtests_router.post(
    "", summary="Start a backtest", status_code=202, dependencies=[Once], responses=documented(409)
)
@permits("operate")
def post_backtest(project: str, body: BacktestInput, service: Served, slots: Working) -> BacktestOutput:
    """Evaluate runs of the project. A backtest stops no job and notifies nobody. Read its findings with the returned id."""
    rules = slots.checked_rules(project, body.rules) if body.rules else DEFAULT_RULES
    number = request_backtest(service, project, body.runs, rules, body.sweep)
    return _read(service, project, number)


@backtests_router.get("/{number}", summary="Get a backtest")
@permits("operate")
def get_backtest(
    project: str,
    number: Annotated[int, Path(ge=1, lt=2**63, description="The backtest's id.")],
    service: Served,
) -> BacktestOutput:
    """Return the progress of a backtest and, once it is done, its report."""
    return _read(service, project, number)


def _read(service: Service, project: str, number: int) -> BacktestOutput:
    progress = read_progress(service, project, number)
    return BacktestOutput(
        id=progress.id,
        state=progress.state,
        runs=len(progress.runs),
        evaluated_runs=len(progress.results),
        report=report(progress.results, progress.variations) if progress.state == "done" else None,
    )
