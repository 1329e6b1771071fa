"""E-mail over SMTP: text and HTML, with the same Message-ID in all tries."""

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

from watchstep_services.channels.delivery import (
    Cutoff,
    DeliveryContext,
    Message,
    MessagePicture,
    connect,
    tls_context,
)
from watchstep_services.channels.receiver import PictureUse, Receiver, Secret
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
    picture: ClassVar[PictureUse] = "inline"

    kind: Literal["email"]
    host: Annotated[str, StringConstraints(max_length=253), AfterValidator(check_host)] = Field(
        description="Host of the SMTP server."
    )
    port: int | None = Field(
        None, ge=1, le=65535, description="Defaults to 587 for starttls, 465 for tls, 25 for none."
    )
    security: Security = Field(
        "starttls",
        description="starttls and tls require a valid certificate; none is in clear text.",
    )
    username: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    password: Secret | None = None
    sender: MailAddress = Field(description="Sender address.")
    to: tuple[MailAddress, ...] = Field(min_length=1, max_length=50)

    @model_validator(mode="after")
    def _login_is_whole(self) -> EmailReceiver:
        if (self.username is None) != (self.password is None):
            raise ValueError("'username' and 'password' must be given together")
        if self.password is not None and self.security == "none":
            raise ValueError("a password is not sent in clear text: use 'security: starttls' or 'tls'")
        return self

    @property
    def destination(self) -> tuple[Any, ...]:
        """The server, its security and the user."""
        return (self.host, self.port, self.security, self.username)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The server."""
        return (self.host,)


def send(receiver: EmailReceiver, message: Message, delivery: DeliveryContext) -> AttemptResult:
    """Send the message once. Servers and mail programs recognize a duplicate by its Message-ID."""
    content = render_email(receiver, message).as_bytes(policy=SMTP_POLICY)
    with Cutoff(delivery.seconds) as cutoff:
        try:
            with contextlib.closing(_connect(receiver, delivery, cutoff)) as server:
                refused = _hand_over(server, receiver, content)
        except smtplib.SMTPRecipientsRefused as error:
            return _refused(receiver, error.recipients, some_accepted=False)
        except smtplib.SMTPResponseException as error:
            return _answered(receiver, error.smtp_code, error.smtp_error)
        except smtplib.SMTPNotSupportedError as error:
            return AttemptResult("failed", f"{receiver.host}: {error}; choose another 'security'")
        except (smtplib.SMTPException, OSError) as error:
            if cutoff.passed or isinstance(error, TimeoutError):
                return AttemptResult("error", f"{receiver.host}: no answer within {delivery.seconds:g} s")
            return AttemptResult("error", f"{receiver.host}: {type(error).__name__}: {error}")
    return (
        _refused(receiver, refused, some_accepted=True)
        if refused
        else AttemptResult("done", f"{receiver.host}: accepted")
    )


def render_email(receiver: EmailReceiver, message: Message) -> EmailMessage:
    """Build the e-mail. `email` writes the headers and refuses line breaks, which title and addresses do not contain."""
    notification = message.notification
    domain = receiver.sender.rpartition("@")[2]
    mail = EmailMessage(policy=SMTP_POLICY)
    mail["Subject"] = message.title
    mail["From"] = receiver.sender
    mail["To"] = ", ".join(receiver.to)
    mail["Date"] = format_datetime(datetime.fromtimestamp(notification.at_ns // _NANOSECONDS, timezone.utc))
    mail["Message-ID"] = f"<{_short(notification.id)}@{domain}>"
    thread = f"<{_short(notification.group_key)}.group@{domain}>"
    mail["In-Reply-To"] = thread
    mail["References"] = thread
    mail["Auto-Submitted"] = "auto-generated"
    mail["X-Watchstep-Notification"] = _short(notification.id)
    mail["X-Watchstep-Status"] = notification.status
    mail.set_content(message.text + "\n", charset="utf-8")
    picture = message.picture if message.picture is not None and message.picture.png else None
    content_id = f"{_short(notification.id)}.picture@{domain}"
    mail.add_alternative(_page(message, picture, content_id), subtype="html", charset="utf-8")
    if picture is not None:
        # Related to the HTML part only, so that programs show it in its place and list no attachment.
        *_, html_part = mail.iter_parts()
        assert isinstance(html_part, EmailMessage)
        html_part.add_related(
            picture.png, "image", "png", cid=f"<{content_id}>", disposition="inline", filename="alert.png"
        )
    return mail


def _page(message: Message, picture: MessagePicture | None, content_id: str) -> str:
    notification = message.notification
    link = html.escape(notification.url)
    image = ""
    if picture is not None:
        image = f'<p><img src="cid:{html.escape(content_id)}" alt="{html.escape(picture.text)}" width="800" style="max-width: 100%"></p>'
    colour = "#2e8b57" if notification.status == "resolved" else "#d0312d"
    return (
        '<!doctype html><html><body style="font-family: sans-serif">'
        f'<h2 style="border-left: 6px solid {colour}; padding-left: 10px">{html.escape(message.title)}</h2>'
        + (f'<p><a href="{link}">Open the {notification.page}</a></p>' if link else "")
        + f'{image}<pre style="white-space: pre-wrap">{html.escape(message.text)}</pre>'
        "</body></html>\n"
    )


def _short(text: str) -> str:
    """A name for a header: unchanged if it is short and plain, otherwise its hash."""
    plain = (
        text.isascii()
        and len(text) <= 64
        and all(character.isalnum() or character in "-_." for character in text)
    )
    return text if plain and text else hashlib.sha256(text.encode()).hexdigest()[:40]


class _Client(smtplib.SMTP):
    """Connects only to checked addresses, and verifies the certificate against the host's name."""

    def __init__(self, receiver: EmailReceiver, delivery: DeliveryContext, cutoff: Cutoff) -> None:
        self._receiver = receiver
        self._delivery = delivery
        self._cutoff = cutoff
        port = receiver.port or _PORTS[receiver.security]
        super().__init__(receiver.host, port, socket.gethostname(), cutoff.left)

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:  # noqa: ARG002 - the cutoff's
        connection = connect(self._delivery.egress_policy, host, port, self._cutoff)
        if self._receiver.security != "tls":
            return connection
        try:
            return tls_context().wrap_socket(connection, server_hostname=host)
        except BaseException:
            connection.close()
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
    with contextlib.suppress(smtplib.SMTPException, OSError):  # it is delivered; errors of QUIT are ignored
        server.quit()
    return refused


def _refused(
    receiver: EmailReceiver, refused: dict[str, tuple[int, bytes]], *, some_accepted: bool
) -> AttemptResult:
    """The result if some recipients, or all, were refused."""
    detail = "; ".join(f"{who}: {_reply(code, text)}" for who, (code, text) in sorted(refused.items()))
    if any(400 <= code < 500 for code, _ in refused.values()):
        return AttemptResult("error", f"{receiver.host}: not accepted yet: {detail}")
    if some_accepted:
        return AttemptResult("done", f"{receiver.host}: accepted, but not for {detail}")
    return AttemptResult("failed", f"{receiver.host}: no recipient was accepted: {detail}")


def _answered(receiver: EmailReceiver, code: int, text: bytes | str) -> AttemptResult:
    detail = f"{receiver.host}: {_reply(code, text)}"
    if code >= 500:
        return AttemptResult("failed", f"{detail}; the server refused the message, so it is not sent again")
    return AttemptResult("error", detail)


def _reply(code: int, reply: bytes | str) -> str:
    """The codes of a reply (RFC 5321, RFC 3463) without its text: users may name any port, and must not read what replies."""
    text = reply.decode("utf-8", errors="replace") if isinstance(reply, bytes) else reply
    enhanced = _ENHANCED_CODE.match(text)
    return f"answered {code} {enhanced[0]}" if enhanced else f"answered {code}"
