"""The page about the rules of a project: the table of rule configs, and the check of one while it is written."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from watchstep.format.layout import check_name
from watchstep_rules.config.rule_config import NAME_LENGTH
from watchstep_rules.registry import KINDS
from watchstep_rules.rule_files.checks import ConfigCheck, Remark, check_config_text
from watchstep_services.api.middleware.access import Caller, permits
from watchstep_services.api.middleware.request_limits import Working
from watchstep_services.api.queries.project_rules import parameters_of, read_rule_table
from watchstep_services.api.queries.state import Querying
from watchstep_services.api.routes.rules import shown_config
from watchstep_services.api.schemas.rule_pages import RuleCheck, RuleRemark, RuleTable

_MOST_RUNS = 50
_MOST_TEXT = 100_000

router = APIRouter(prefix="/v1/projects/{project}", tags=["rule configs"])


@router.get("/rule-table", summary="Get the rules of a project with their health")
@permits("read")
def get_rule_table(
    project: str,
    queries: Querying,
    caller: Caller,
    runs: Annotated[
        int,
        Query(ge=1, le=_MOST_RUNS, description="Number of newest runs whose health and alerts are counted."),
    ] = 20,
) -> RuleTable:
    """Return the rule configs that new runs get, the project's before the owner's, and those that were set for single runs."""
    operates = caller.may("operate")
    service = queries.service
    with queries.slots.acquire(project), service.database.read() as session:
        table = read_rule_table(service, session, project, runs, operates=operates)
    shown = [fact.model_copy(update={"config": shown_config(fact.config, caller)}) for fact in table.rules]
    return table.model_copy(update={"rules": shown})


class RuleCheckInput(BaseModel):
    """The text of one rule config."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={"examples": [{"text": "rule: vanishing_gradient\nparams: {threshold: 1.0e-7}\n"}]},
    )

    name: str = Field(
        "", max_length=NAME_LENGTH, description="Name that it is to be stored with; empty: any."
    )
    text: str = Field(max_length=_MOST_TEXT, description="YAML or JSON: an entry of 'rules' in a rule file.")


@router.post("/rule-checks", summary="Check a rule config")
@permits("operate")
def check_rule(project: str, body: RuleCheckInput, slots: Working) -> RuleCheck:
    """Check the text of a rule config like `watchstep rules check` does, and return all errors and warnings. Nothing is stored."""
    check_name("project", project)
    # Whether a kind of one's own is named is recognized in the text, because the slot is needed before the text is read.
    with slots.checking(project, [kind for kind in KINDS if kind in body.text]):
        check = check_config_text(body.text, body.name)
    return _answer(check)


def _answer(check: ConfigCheck) -> RuleCheck:
    config = check.config
    return RuleCheck(
        data=_json_ready(check.data),
        config=None if config is None else config.as_data(),
        parameters=None if config is None else parameters_of(config),
        remarks=[_remark(remark) for remark in check.remarks],
    )


def _remark(remark: Remark) -> RuleRemark:
    return RuleRemark(level=remark.level, line=remark.line, place=remark.place, text=remark.text)


def _json_ready(data: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return data of YAML as data of JSON; None if it has dates, sets, bytes, numbers that are not finite, or similar values."""
    try:
        converted: dict[str, Any] | None = json.loads(json.dumps(data, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return None
    return converted
