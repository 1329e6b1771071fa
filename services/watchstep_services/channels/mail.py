"""E-mail by SMTP: text and HTML, with a Message-ID that stays the same over all tries."""

from __future__ import annotations

import contextlib
import hashlib
import html
import re
import smtplib
import socket
from datetime import datetime, timezone
from email.message import EmailMessage
from email.policy import SMTP as SMTP_POLICY
from email.utils import format_datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from watchstep_services.channels.delivery import Cutoff, DeliveryContext, Message, connect, tls_context
from watchstep_services.channels.receiver import Receiver, Secret
from watchstep_services.core.due_action import AttemptResult
from watchstep_services.core.egress import check_host

Security = Literal["starttls", "tls", "none"]
_PORTS: dict[Security, int] = {"starttls": 587, "tls": 465, "none": 25}
_NANOSECONDS = 1_000_000_000

MailAddress = Annotated[
    str,
    StringConstraints(
        pattern=r"^[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9-]+)*$",
        max_length=254,
    ),
]

_ENHANCED_CODE = re.compile(r"[245]\.[0-9]{1,3}\.[0-9]{1,3}(?![0-9.])")


class EmailReceiver(Receiver):
    """Sends e-mail through an SMTP server."""

    secret_fields: ClassVar[tuple[str, ...]] = ("password",)

    kind: Literal["email"]
    host: Annotated[str, StringConstraints(max_length=253), AfterValidator(check_host)] = Field(
        description="Of the SMTP server."
    )
    port: int | None = Field(
        None, ge=1, le=65535, description="587 for starttls, 465 for tls, 25 for none where it is not given."
    )
    security: Security = Field(
        "starttls",
        description="starttls and tls refuse servers whose certificate is not valid; none: in clear text.",
    )
    username: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    password: Secret | None = None
    sender: MailAddress = Field(description="Whom it is from.")
    to: tuple[MailAddress, ...] = Field(min_length=1, max_length=50)

    @model_validator(mode="after")
    def _login_is_whole(self) -> EmailReceiver:
        if (self.username is None) != (self.password is None):
            raise ValueError("'username' and 'password' go together")
        if self.password is not None and self.security == "none":
            raise ValueError("a password is not sent in clear text: use 'security: starttls' or 'tls'")
        return self

    @property
    def destination(self) -> tuple[Any, ...]:
        """The server, and how it is spoken to."""
        return (self.host, self.port, self.security, self.username)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The server."""
        return (self.host,)


def send(receiver: EmailReceiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Send the message once; to servers and people one that comes twice is the same, by its Message-ID."""
    content = render_email(receiver, message).as_bytes(policy=SMTP_POLICY)
    with Cutoff(delivery.seconds) as cutoff:
        try:
            with contextlib.closing(_connect(receiver, delivery, cutoff)) as server:
                refused = _hand_over(server, receiver, content)
        except smtplib.SMTPRecipientsRefused as error:
            return _refused(receiver, error.recipients, left=False)
        except smtplib.SMTPResponseException as error:
            return _answered(receiver, error.smtp_code, error.smtp_error)
        except smtplib.SMTPNotSupportedError as error:
            return AttemptResult("failed", f"{receiver.host}: {error}; choose another 'security'")
        except (smtplib.SMTPException, OSError) as error:
            if cutoff.passed or isinstance(error, TimeoutError):
                return AttemptResult("error", f"{receiver.host}: no answer within {delivery.seconds:g} s")
            return AttemptResult("error", f"{receiver.host}: {type(error).__name__}: {error}")
    return (
        _refused(receiver, refused, left=True)
        if refused
        else AttemptResult("done", f"{receiver.host}: accepted")
    )


def render_email(receiver: EmailReceiver, message: Message) -> EmailMessage:
    """The message. Headers are made by `email`, which takes no line breaks, from words that have none."""
    told = message.notification
    domain = receiver.sender.rpartition("@")[2]
    made = EmailMessage(policy=SMTP_POLICY)
    made["Subject"] = message.title
    made["From"] = receiver.sender
    made["To"] = ", ".join(receiver.to)
    made["Date"] = format_datetime(datetime.fromtimestamp(told.at_ns // _NANOSECONDS, timezone.utc))
    made["Message-ID"] = f"<{_short(told.id)}@{domain}>"
    thread = f"<{_short(told.group_key)}.group@{domain}>"
    made["In-Reply-To"] = thread
    made["References"] = thread
    made["Auto-Submitted"] = "auto-generated"
    made["X-Watchstep-Notification"] = _short(told.id)
    made["X-Watchstep-Status"] = told.status
    made.set_content(message.text + "\n", charset="utf-8")
    made.add_alternative(_page(message), subtype="html", charset="utf-8")
    return made


def _page(message: Message) -> str:
    colour = "#2e8b57" if message.notification.status == "resolved" else "#d0312d"
    return (
        '<!doctype html><html><body style="font-family: sans-serif">'
        f'<h2 style="border-left: 6px solid {colour}; padding-left: 10px">{html.escape(message.title)}</h2>'
        f'<pre style="white-space: pre-wrap">{html.escape(message.text)}</pre>'
        f'<p><a href="{html.escape(message.notification.run_url)}">In the API</a> (JSON, with a token)</p>'
        "</body></html>\n"
    )


def _short(text: str) -> str:
    """A name as a header may have it: as it is where that is short and plain, else by its hash."""
    plain = (
        text.isascii() and len(text) <= 64 and all(message.isalnum() or message in "-_." for message in text)
    )
    return text if plain and text else hashlib.sha256(text.encode()).hexdigest()[:40]


class _Client(smtplib.SMTP):
    """Connects to checked addresses alone, and knows the name that a certificate must have."""

    def __init__(self, receiver: EmailReceiver, delivery: DeliveryContext, cutoff: Cutoff) -> None:
        self._receiver = receiver
        self._outside = delivery
        self._cutoff = cutoff
        port = receiver.port or _PORTS[receiver.security]
        super().__init__(receiver.host, port, socket.gethostname(), cutoff.left)

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:  # noqa: ARG002 - the cutoff's
        made = connect(self._outside.reach, host, port, self._cutoff)
        if self._receiver.security != "tls":
            return made
        try:
            return tls_context().wrap_socket(made, server_hostname=host)
        except BaseException:
            made.close()
            raise


def _connect(receiver: EmailReceiver, delivery: DeliveryContext, cutoff: Cutoff) -> smtplib.SMTP:
    server = _Client(receiver, delivery, cutoff)
    try:
        if receiver.security == "starttls":
            server.starttls(context=tls_context())
        if receiver.username is not None:
            server.login(receiver.username, delivery.secret("password"))
    except BaseException:
        server.close()
        raise
    return server


def _hand_over(server: smtplib.SMTP, receiver: EmailReceiver, content: bytes) -> dict[str, tuple[int, bytes]]:
    refused = server.sendmail(receiver.sender, list(receiver.to), content)
    with contextlib.suppress(smtplib.SMTPException, OSError):  # it is delivered; the farewell changes nothing
        server.quit()
    return refused


def _refused(receiver: EmailReceiver, refused: dict[str, tuple[int, bytes]], *, left: bool) -> AttemptResult:
    """What it means that some recipients, or all where none is ``left``, were not taken."""
    told = "; ".join(f"{who}: {_said(code, words)}" for who, (code, words) in sorted(refused.items()))
    if any(400 <= code < 500 for code, _ in refused.values()):
        return AttemptResult("error", f"{receiver.host}: not taken yet: {told}")
    if left:
        return AttemptResult("done", f"{receiver.host}: accepted, but not for {told}")
    return AttemptResult("failed", f"{receiver.host}: no recipient was taken: {told}")


def _answered(receiver: EmailReceiver, code: int, words: bytes | str) -> AttemptResult:
    said = f"{receiver.host}: {_said(code, words)}"
    if code >= 500:
        return AttemptResult("failed", f"{said}; the server refuses it, so it is not sent again")
    return AttemptResult("error", said)


def _said(code: int, words: bytes | str) -> str:
    """The codes of an answer (RFC 5321, RFC 3463), and none of its words: any port may be named, and what answers is not shown."""
    text = words.decode("utf-8", errors="replace") if isinstance(words, bytes) else words
    enhanced = _ENHANCED_CODE.match(text)
    return f"answered {code} {enhanced[0]}" if enhanced else f"answered {code}"
