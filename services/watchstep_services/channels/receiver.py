"""What receivers of all kinds share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from watchstep.errors import ConfigError
from watchstep_rules.config import message_template
from watchstep_rules.config.plain_text import lines
from watchstep_rules.config.rule_config import ReceiverName
from watchstep_services.channels import wording
from watchstep_services.channels.secret_fields import AnySecret, PlainSecret
from watchstep_services.core.egress import MOST_CHARACTERS, parse_address

_Template = Annotated[
    str, StringConstraints(min_length=1, max_length=message_template.MOST_CHARACTERS), AfterValidator(lines)
]


def _address(text: str) -> str:
    parse_address(text)
    return text


HttpAddress = Annotated[
    str,
    StringConstraints(min_length=1, max_length=MOST_CHARACTERS),
    AfterValidator(_address),
    Field(json_schema_extra={"pattern": "^[hH][tT][tT][pP][sS]?://."}),
]
"""An address without credentials; secrets in its path are shown to those who may change receivers."""


class Receiver(BaseModel):
    """Somebody or something that is told of alerts."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    secret_fields: ClassVar[tuple[str, ...]] = ()
    """Names of fields that are secrets."""

    administered: ClassVar[bool] = False
    """Whether it acts with the service's own rights, so that only an admin may write one."""

    name: ReceiverName
    title: Annotated[_Template, AfterValidator(wording.check_title)] | None = Field(
        None, description=f"Template of the title; `{wording.DEFAULT_TITLE}` by default."
    )
    text: Annotated[_Template, AfterValidator(wording.check_text)] | None = Field(
        None, description="Template of the text; `{alerts}` stands for each alert, by the template for one."
    )
    alert: Annotated[_Template, AfterValidator(wording.check_alert)] | None = Field(
        None, description="Template of one alert within the text."
    )

    @property
    def templates(self) -> wording.Templates:
        """Its own templates."""
        return wording.Templates(self.title, self.text, self.alert)

    @property
    def destination(self) -> tuple[Any, ...]:
        """Where its secrets are sent to: kept secrets are not kept where this changes."""
        return ()

    def secrets(self) -> dict[str, AnySecret]:
        """The secrets that are named or given, by field."""
        held = ((name, getattr(self, name)) for name in self.secret_fields)
        return {name: secret for name, secret in held if secret is not None}

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts that it names, as far as they are no secrets."""
        return ()

    def check_secret(self, field: str, secret: str) -> None:
        """See that a secret can be used.

        Raises:
            ConfigError: it cannot; the message does not repeat it.
        """
        if not secret.isprintable():
            raise ConfigError(f"secret {field!r}: has control characters", "leave them out")

    def as_data(self) -> dict[str, Any]:
        """JSON-ready; given secrets show as ``{"set": true}``, and so do kept ones."""
        data = self.model_dump(mode="json", exclude_none=True)
        for name, secret in self.secrets().items():
            if isinstance(secret, PlainSecret):
                data[name] = {"set": True}
        return data
