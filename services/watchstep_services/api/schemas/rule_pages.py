"""Responses of the page about the rules of a project: the rule configs with their health, and the check of one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class HealthCounts(BaseModel):
    """On how many of the newest runs a rule config had each health, on the newest attempt of each."""

    ok: int = 0
    no_data: int = 0
    error: int = 0


class UnhealthyRun(BaseModel):
    """A run on which a rule config could not be evaluated, or had no data."""

    run: str
    health: Literal["no_data", "error"]
    problem: str = Field(description="Why; empty: not known.")


class RuleAlertLink(BaseModel):
    """An alert of a rule config on a run."""

    run: str
    fingerprint: str
    phase: str = Field(description="pending, firing or resolved.")
    step: int = Field(description="Step at which it fired last.")


class RuleFacts(BaseModel):
    """A rule config, and how it did on the newest runs."""

    name: str
    rule: str
    origin: str = Field(
        description="owner or project: new runs get it. operator or recorder: it was set for single runs, which 'set_for' names."
    )
    severity: str
    config: dict[str, Any] = Field(
        description="The rule config as in a rule file. Callers without the permission operate see only the hosts of webhook addresses."
    )
    parameters: dict[str, Any] = Field(description="All parameters with their values, also the defaults.")
    problem: str = Field(description="Why this version cannot read the rule config; empty: it can.")
    warnings: list[str] = Field(
        description="Parts of the config that the service cannot execute, such as unknown receivers."
    )
    replaces_owner: bool = Field(description="Whether it replaces a rule config of the owner.")
    set_for: list[str] = Field(description="Newest runs that it was set for.")
    health: HealthCounts
    unhealthy: list[UnhealthyRun] = Field(description="Newest first, errors before others; at most 5.")
    alerts: list[RuleAlertLink] = Field(description="Of the newest runs, newest run first; at most 5.")
    alerts_total: int = Field(description="Number of the newest runs' alerts.")


class RuleTable(BaseModel):
    """The rule configs of a project: those that new runs get, then those that were set for single runs."""

    rules: list[RuleFacts]
    runs: int = Field(description="Number of newest runs whose health and alerts are counted.")
    owner_file: str = Field(
        description="Path of the owner's rule file where the service runs; empty: it uses the default rules, or the caller may not operate."
    )
    owner_defaults: bool = Field(description="Whether the owner's rules are the default rules.")


class RuleRemark(BaseModel):
    """An error or a warning about the text of a rule config."""

    level: Literal["error", "warning"]
    line: int = Field(description="Line of the text, from 1.")
    place: str = Field(description="Path in the rule config, such as params.threshold; empty: the whole.")
    text: str


class RuleCheck(BaseModel):
    """The result of a check of one rule config."""

    data: dict[str, Any] | None = Field(
        description="The text as data; null: it is not a mapping, or has values that JSON does not have."
    )
    config: dict[str, Any] | None = Field(
        description="The rule config with all fields; null: it is not valid."
    )
    parameters: dict[str, Any] | None = Field(
        description="All parameters with their values, also the defaults; null: the rule config is not valid."
    )
    remarks: list[RuleRemark]
