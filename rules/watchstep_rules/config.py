"""A rule config: a rule with parameters, scope, severity and actions, as data."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    HttpUrl,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails

from watchstep.errors import RuleError
from watchstep.tensors import TensorInfo
from watchstep_rules.contract import AnyRule, Needs, Params, Severity
from watchstep_rules.registry import find_rule


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StopAction(_Model):
    """Stop the job."""

    kind: Literal["stop"] = "stop"


class WebhookAction(_Model):
    """Post the event as a CloudEvent to an address."""

    kind: Literal["webhook"] = "webhook"
    url: HttpUrl


Action = Annotated[StopAction | WebhookAction, Field(discriminator="kind")]


def _as_action(value: Any) -> Any:
    if value == "stop":
        return {"kind": "stop"}
    if isinstance(value, dict) and list(value) == ["webhook"]:
        return {"kind": "webhook", "url": value["webhook"]}
    return value


class TensorScope(_Model):
    """Which tensors a rule config judges. What is left out does not narrow."""

    collection: str | None = Field(None, description="Only tensors of this collection.")
    include: str | None = Field(
        None, description="Only names that this regular expression matches from the start."
    )
    exclude: str | None = Field(
        None, description="Not names that this regular expression matches from the start."
    )

    @field_validator("include", "exclude")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
        return value

    def holds(self, info: TensorInfo, needs: Needs) -> bool:
        """Whether a tensor is in scope of a rule with these needs."""
        collections = (self.collection,) if self.collection else needs.collections
        return (
            any(name in info.collections for name in collections)
            and (not needs.roles or info.role in needs.roles)
            and (self.include is None or re.match(self.include, info.name) is not None)
            and (self.exclude is None or re.match(self.exclude, info.name) is None)
        )


class Hold(_Model):
    """How long a finding must last before the alert fires."""

    steps: int = Field(1, ge=1, description="So many judged steps of one tensor in a row.")


def _check_params(kind: type[Params], params: dict[str, Any]) -> None:
    """Raise as pydantic does, with the place under ``params``."""
    try:
        kind.model_validate(params)
    except ValidationError as error:
        details = [
            InitErrorDetails(
                type=found["type"],
                loc=("params", *found["loc"]),
                input=found["input"],
                ctx=found.get("ctx", {}),
            )
            for found in error.errors()
        ]
        raise ValidationError.from_exception_data(kind.__name__, details) from error


class RuleConfig(_Model):
    """One rule as it runs."""

    rule: str = Field(description="The rule's name.")
    name: str = Field("", description="The config's own name; the rule's where it is left out.")
    params: dict[str, Any] = Field(default_factory=dict, description="The rule's parameters.")
    tensors: TensorScope = TensorScope()
    hold: Hold = Field(Hold(), alias="for")
    severity: Severity = "warning"
    actions: tuple[Annotated[Action, BeforeValidator(_as_action)], ...] = ()

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @model_validator(mode="after")
    def _known(self) -> RuleConfig:
        try:
            rule = find_rule(self.rule)
        except RuleError as error:
            raise ValueError(f"{error.what}; {error.mend}") from error
        _check_params(rule.params_type, self.params)
        if not self.name:
            object.__setattr__(self, "name", self.rule)
        return self

    @property
    def implementation(self) -> AnyRule:
        """The rule."""
        return find_rule(self.rule)

    @property
    def parameters(self) -> Params:
        """The rule's parameters, checked, with defaults filled in."""
        checked: Params = self.implementation.params_type.model_validate(self.params)
        return checked

    @property
    def stops(self) -> bool:
        """Whether an alert of this config stops the job."""
        return any(isinstance(action, StopAction) for action in self.actions)

    def without_stop(self) -> RuleConfig:
        """The same, but it stops nothing: what a recorder may ask for."""
        return self.model_copy(
            update={"actions": tuple(a for a in self.actions if not isinstance(a, StopAction))}
        )

    def as_data(self) -> dict[str, Any]:
        """A JSON-ready form that reads back as the same config."""
        return self.model_dump(mode="json", by_alias=True)
