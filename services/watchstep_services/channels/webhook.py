"""Webhooks: CloudEvents in structured mode, signed according to Standard Webhooks (https://www.standardwebhooks.com)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import Any, ClassVar, Literal

from pydantic import Field

from watchstep.errors import ConfigError
from watchstep_services.channels.delivery import DeliveryContext, Message, try_post
from watchstep_services.channels.notification import within
from watchstep_services.channels.receiver import HttpAddress, Receiver, Secret
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.core.egress import parse_address
from watchstep_services.core.events import MEDIA_TYPE

SECRET_PREFIX = "whsec_"  # noqa: S105 - the prefix of secrets
MOST_BYTES = 1_000_000
_SECRET_BYTES = (24, 64)
_NANOSECONDS = 1_000_000_000


class WebhookReceiver(Receiver):
    """Posts a CloudEvent to an address."""

    secret_fields: ClassVar[tuple[str, ...]] = ("secret", "previous_secret", "authorization")

    kind: Literal["webhook"]
    url: HttpAddress
    secret: Secret | None = Field(
        None, description="Signs the request: `whsec_` and 24 to 64 bytes in base64. Unsigned by default."
    )
    previous_secret: Secret | None = Field(
        None, description="An additional signature, while the recipient may still use the old secret."
    )
    authorization: Secret | None = Field(
        None, description="Sent as the header Authorization, for example `Bearer …`."
    )

    @property
    def destination(self) -> tuple[Any, ...]:
        """The address."""
        return (self.url,)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of the address."""
        return (parse_address(self.url).host,)

    def check_secret(self, field: str, secret: str) -> None:
        """Check the form of a signing secret, and the characters of a header."""
        if field == "authorization":
            header_value(field, secret)
        else:
            signing_key(secret)


def send(receiver: WebhookReceiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Post the event once."""
    body = within(message.event, MOST_BYTES)
    keys = [
        signing_key(delivery.secret(name))
        for name in ("secret", "previous_secret")
        if name in delivery.secrets
    ]
    headers = webhook_headers(message.notification.id, delivery.now_ns, body, keys)
    if "authorization" in delivery.secrets:
        headers["Authorization"] = header_value("authorization", delivery.secret("authorization"))
    return try_post(delivery, parse_address(receiver.url), headers, body)


def webhook_headers(event_id: str, now_ns: int, body: bytes, keys: list[bytes]) -> dict[str, str]:
    """Headers of a CloudEvent: content type, id and timestamp, and a signature by each key."""
    seconds = now_ns // _NANOSECONDS
    headers = {"Content-Type": MEDIA_TYPE, "webhook-id": event_id, "webhook-timestamp": str(seconds)}
    if keys:
        headers["webhook-signature"] = " ".join(signature(key, event_id, seconds, body) for key in keys)
    return headers


def signature(key: bytes, event_id: str, seconds: int, body: bytes) -> str:
    """A signature of id, time and body."""
    signed = hmac.new(key, f"{event_id}.{seconds}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(signed).decode()}"


def new_secret() -> str:
    """Generate a signing secret."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def signing_key(secret: str) -> bytes:
    """Decode the key of a signing secret.

    Raises:
        ConfigError: the secret is not valid; the message does not repeat it.
    """
    prefix, _, written = secret.partition("_")
    try:
        key = base64.b64decode(written, validate=True) if f"{prefix}_" == SECRET_PREFIX else b""
    except binascii.Error:
        key = b""
    if not _SECRET_BYTES[0] <= len(key) <= _SECRET_BYTES[1]:
        raise ConfigError(
            f"a signing secret must be {SECRET_PREFIX} and 24 to 64 bytes in base64",
            "create one with 'watchstep receivers new-secret'",
        )
    return key


def header_value(name: str, secret: str) -> str:
    """Check that a secret is a valid header value.

    Raises:
        ConfigError: it has characters that headers do not allow; the message does not repeat it.
    """
    if not secret.isascii() or not secret.isprintable():
        raise ConfigError(
            f"secret {name!r}: has characters that headers do not allow", "use visible ASCII characters"
        )
    return secret
