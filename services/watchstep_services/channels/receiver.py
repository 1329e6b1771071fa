"""What all kinds of receivers share, and their secrets: named by where they are, or given once and stored encrypted. They are never shown again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    SecretStr,
    StringConstraints,
    Tag,
)

from watchstep.errors import ConfigError
from watchstep_rules.config import message_template
from watchstep_rules.config.message_template import lines
from watchstep_rules.config.rule_config import ReceiverName
from watchstep_services.channels import wording
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


ENVIRONMENT_PREFIX = "WATCHSTEP_RECEIVER_"
"""Of the environment variables that a receiver may name: no other can be sent anywhere."""

MOST_SECRET_CHARACTERS = 4000
"""Of a secret."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class FromEnvironment(_Model):
    """A secret in an environment variable of the service."""

    env: str = Field(
        pattern=rf"^{ENVIRONMENT_PREFIX}[A-Z0-9_]{{1,100}}$",
        description=f"Its name; begins with {ENVIRONMENT_PREFIX}.",
    )


class FromFile(_Model):
    """A secret in a file on the service's machine, as Kubernetes and Docker mount them."""

    file: str = Field(
        min_length=1, max_length=1000, description="Its path. Only in the owner's file of receivers."
    )


class PlainSecret(_Model):
    """A secret itself; it is encrypted before it is stored."""

    value: SecretStr = Field(min_length=1, max_length=MOST_SECRET_CHARACTERS)


class EncryptedSecret(_Model):
    """A secret that is stored encrypted."""

    set: Literal[True] = Field(description="It stays as it is.")


def _written(value: Any) -> Any:
    return {"value": value} if isinstance(value, str | SecretStr) else value


AnySecret = FromEnvironment | FromFile | PlainSecret | EncryptedSecret

_FORMS: dict[str, type[BaseModel]] = {
    "env": FromEnvironment,
    "file": FromFile,
    "value": PlainSecret,
    "set": EncryptedSecret,
}


def _form(value: Any) -> str | None:
    if isinstance(value, dict):
        return next((key for key in _FORMS if key in value), None)
    return next((key for key, form in _FORMS.items() if isinstance(value, form)), None)


Secret = Annotated[
    Annotated[FromEnvironment, Tag("env")]
    | Annotated[FromFile, Tag("file")]
    | Annotated[PlainSecret, Tag("value")]
    | Annotated[EncryptedSecret, Tag("set")],
    Discriminator(
        _form,
        custom_error_type="secret",
        custom_error_message="write {env: NAME}, {file: PATH} or, where secrets can be kept, the secret itself",
    ),
    BeforeValidator(_written),
]
"""``{env: NAME}``, ``{file: PATH}``, the secret itself, or ``{set: true}`` for the one that is kept."""


def read_secret(name: str, secret: AnySecret) -> str:
    """A secret from where it lies.

    Raises:
        ConfigError: it is not there, or it is kept elsewhere.
    """
    if isinstance(secret, EncryptedSecret):
        raise ConfigError(f"secret {name!r}: is kept in the service's database", "ask the service")
    if isinstance(secret, PlainSecret):
        return secret.value.get_secret_value()
    if isinstance(secret, FromEnvironment):
        held = os.environ.get(secret.env, "")
        place = f"environment variable {secret.env}"
    else:
        place = f"file {secret.file}"
        try:
            with Path(secret.file).open(encoding="utf-8") as file:
                held = file.read(MOST_SECRET_CHARACTERS + 1).strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"secret {name!r}: {place}: {reason}", "put the secret there") from None
    if not held:
        raise ConfigError(f"secret {name!r}: {place} is not set or empty", "put the secret there")
    if len(held) > MOST_SECRET_CHARACTERS:
        raise ConfigError(
            f"secret {name!r}: {place} is longer than {MOST_SECRET_CHARACTERS} characters", "shorten it"
        )
    return held
