"""Rule configs as the API takes and gives them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Body
from pydantic import BaseModel, Field

from watchstep.errors import RuleError
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.api.middleware.work_slots import WorkSlots
from watchstep_services.auth.roles import AuthenticatedCaller
from watchstep_services.core.rule_addresses import without_addresses

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
