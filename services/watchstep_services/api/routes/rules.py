"""The rules that can be configured."""

from __future__ import annotations

import inspect

from fastapi import APIRouter

from watchstep.errors import NotFoundError, RuleError
from watchstep_rules.registry import KINDS, RULES, find_rule
from watchstep_services.api.middleware.access import permits
from watchstep_services.api.schemas.models import RuleList, RuleOutput, RuleSummary

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
