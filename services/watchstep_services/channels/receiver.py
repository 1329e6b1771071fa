"""The base class of receivers, and their secrets.

A secret is referred to by its location, or given once and stored encrypted. Secrets are never shown again.
"""

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
from watchstep_rules.config import rule_config
from watchstep_rules.config.rule_config import ReceiverName, lines
from watchstep_services.channels import wording
from watchstep_services.core.egress import MOST_CHARACTERS, parse_address

_Template = Annotated[
    str, StringConstraints(min_length=1, max_length=rule_config.MOST_CHARACTERS), AfterValidator(lines)
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
"""An address without credentials. Secrets in its path are shown to users who may change receivers."""


PictureUse = Literal["none", "link", "inline"]
"""``link``: by a signed address, if the service has a public URL; ``inline``: within the message."""


class Receiver(BaseModel):
    """A recipient of alerts."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    secret_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the fields with secrets."""

    administered: ClassVar[bool] = False
    """Whether it uses the service's own permissions, so that only an admin may write one."""

    picture: ClassVar[PictureUse] = "none"
    """How its messages carry the picture of an alert."""

    acknowledges: ClassVar[bool] = False
    """Whether it is notified when a person acknowledges the alerts that it was notified of."""

    name: ReceiverName
    title: Annotated[_Template, AfterValidator(wording.check_title)] | None = Field(
        None, description=f"Template of the title; `{wording.DEFAULT_TITLE}` by default."
    )
    text: Annotated[_Template, AfterValidator(wording.check_text)] | None = Field(
        None,
        description="Template of the text; `{alerts}` is replaced by all alerts, each by its own template.",
    )
    alert: Annotated[_Template, AfterValidator(wording.check_alert)] | None = Field(
        None, description="Template of one alert within the text."
    )

    @property
    def templates(self) -> wording.Templates:
        """The receiver's templates."""
        return wording.Templates(self.title, self.text, self.alert)

    @property
    def destination(self) -> tuple[Any, ...]:
        """Where its secrets are sent; stored secrets cannot be kept if this changes."""
        return ()

    def secrets(self) -> dict[str, AnySecret]:
        """The secrets that are set, by field."""
        fields = ((name, getattr(self, name)) for name in self.secret_fields)
        return {name: secret for name, secret in fields if secret is not None}

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that it names, except in secrets."""
        return ()

    def check_secret(self, field: str, secret: str) -> None:
        """Check that a secret can be used.

        Raises:
            ConfigError: it cannot be used; the message does not repeat it.
        """
        if not secret.isprintable():
            raise ConfigError(f"secret {field!r}: has control characters", "remove them")

    def as_data(self) -> dict[str, Any]:
        """Convert to JSON-ready data; plain and stored secrets are replaced by ``{"set": true}``."""
        data = self.model_dump(mode="json", exclude_none=True)
        for name, secret in self.secrets().items():
            if isinstance(secret, PlainSecret):
                data[name] = {"set": True}
        return data


ENVIRONMENT_PREFIX = "WATCHSTEP_RECEIVER_"
"""Prefix of the environment variables that a receiver may name, so that no others can be sent."""

MOST_SECRET_CHARACTERS = 4000
"""Limit of characters of a secret."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class FromEnvironment(_Model):
    """A secret in an environment variable of the service."""

    env: str = Field(
        pattern=rf"^{ENVIRONMENT_PREFIX}[A-Z0-9_]{{1,100}}$",
        description=f"Name of the variable; begins with {ENVIRONMENT_PREFIX}.",
    )


class FromFile(_Model):
    """A secret in a file on the service's machine, as Kubernetes and Docker mount them."""

    file: str = Field(
        min_length=1, max_length=1000, description="Path of the file. Only in the owner's file of receivers."
    )


class PlainSecret(_Model):
    """The value of a secret; it is encrypted before it is stored."""

    value: SecretStr = Field(min_length=1, max_length=MOST_SECRET_CHARACTERS)


class EncryptedSecret(_Model):
    """A stored, encrypted secret."""

    set: Literal[True] = Field(description="The stored secret is kept.")


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
        custom_error_message="write {env: NAME}, {file: PATH} or, if the receiver is stored by the service, the secret's value",
    ),
    BeforeValidator(_written),
]
"""``{env: NAME}``, ``{file: PATH}``, the secret's value, or ``{set: true}`` for a stored secret."""


def read_secret(name: str, secret: AnySecret) -> str:
    """Read a secret from its location.

    Raises:
        ConfigError: it is missing, or stored in the database.
    """
    if isinstance(secret, EncryptedSecret):
        raise ConfigError(f"secret {name!r}: is stored in the service's database", "use the service's API")
    if isinstance(secret, PlainSecret):
        return secret.value.get_secret_value()
    if isinstance(secret, FromEnvironment):
        text = os.environ.get(secret.env, "")
        location = f"environment variable {secret.env}"
    else:
        location = f"file {secret.file}"
        try:
            with Path(secret.file).open(encoding="utf-8") as file:
                text = file.read(MOST_SECRET_CHARACTERS + 1).strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"secret {name!r}: {location}: {reason}", "put the secret there") from None
    if not text:
        raise ConfigError(f"secret {name!r}: {location} is not set or empty", "put the secret there")
    if len(text) > MOST_SECRET_CHARACTERS:
        raise ConfigError(
            f"secret {name!r}: {location} is longer than {MOST_SECRET_CHARACTERS} characters", "shorten it"
        )
    return text
