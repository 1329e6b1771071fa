"""Secrets of receivers: named by where they lie, or given once and kept sealed. They are never shown again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, SecretStr, Tag

from watchstep.errors import ConfigError

ENVIRONMENT_PREFIX = "WATCHSTEP_RECEIVER_"
"""Of the environment variables that a receiver may name: no other can be sent anywhere."""

MOST_CHARACTERS = 4000
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
    """A secret itself; it is sealed before it is kept."""

    value: SecretStr = Field(min_length=1, max_length=MOST_CHARACTERS)


class SealedSecret(_Model):
    """A secret that is kept sealed."""

    set: Literal[True] = Field(description="It stays as it is.")


def _written(value: Any) -> Any:
    return {"value": value} if isinstance(value, str | SecretStr) else value


AnySecret = FromEnvironment | FromFile | PlainSecret | SealedSecret

_FORMS: dict[str, type[BaseModel]] = {
    "env": FromEnvironment,
    "file": FromFile,
    "value": PlainSecret,
    "set": SealedSecret,
}


def _form(value: Any) -> str | None:
    if isinstance(value, dict):
        return next((key for key in _FORMS if key in value), None)
    return next((key for key, form in _FORMS.items() if isinstance(value, form)), None)


Secret = Annotated[
    Annotated[FromEnvironment, Tag("env")]
    | Annotated[FromFile, Tag("file")]
    | Annotated[PlainSecret, Tag("value")]
    | Annotated[SealedSecret, Tag("set")],
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
    if isinstance(secret, SealedSecret):
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
                held = file.read(MOST_CHARACTERS + 1).strip()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"secret {name!r}: {place}: {reason}", "put the secret there") from None
    if not held:
        raise ConfigError(f"secret {name!r}: {place} is not set or empty", "put the secret there")
    if len(held) > MOST_CHARACTERS:
        raise ConfigError(
            f"secret {name!r}: {place} is longer than {MOST_CHARACTERS} characters", "shorten it"
        )
    return held
