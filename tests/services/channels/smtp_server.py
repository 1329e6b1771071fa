"""A real SMTP server: aiosmtpd, with TLS and login."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from typing import Any

from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session

from tests.services.channels.certificates import Certificate

USER, PASSWORD = "watchstep", "hunter2"


@dataclass
class SmtpServer:
    """What came in, and what is answered to recipients and to messages: the next of each, then 250."""

    port: int = 0
    messages: list[EmailMessage] = field(default_factory=list)
    recipients: list[list[str]] = field(default_factory=list)
    encrypted: list[bool] = field(default_factory=list)
    to_recipients: dict[str, str] = field(default_factory=dict)
    to_messages: list[str] = field(default_factory=list)

    async def handle_RCPT(  # noqa: N802 - aiosmtpd's name
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        answer = self.to_recipients.get(address, "250 OK")
        if answer.startswith("250"):
            envelope.rcpt_tos.append(address)
        return answer

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802
        answer = self.to_messages.pop(0) if self.to_messages else "250 OK"
        if answer.startswith("250"):
            assert isinstance(envelope.content, bytes)
            message = message_from_bytes(envelope.content, policy=policy.default)
            assert isinstance(message, EmailMessage)
            self.messages.append(message)
            self.recipients.append(list(envelope.rcpt_tos))
            assert server.transport is not None
            self.encrypted.append(server.transport.get_extra_info("ssl_object") is not None)
        return answer


def _login(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
    good = isinstance(data, LoginPassword) and (data.login, data.password) == (
        USER.encode(),
        PASSWORD.encode(),
    )
    return AuthResult(success=good, handled=good)


@contextmanager
def smtp_server(certificate: Certificate | None = None, *, at_once: bool = False) -> Iterator[SmtpServer]:
    """A server that offers STARTTLS and asks for a login where it has a certificate; with ``at_once``, TLS from the start."""
    held = SmtpServer()
    context = None if certificate is None else certificate.server_context()
    loop = asyncio.new_event_loop()

    def session() -> SMTP:
        if context is None or at_once:
            return SMTP(held, hostname="mail.test", loop=loop)
        return SMTP(
            held, hostname="mail.test", loop=loop, tls_context=context, require_starttls=True,
            authenticator=_login, auth_required=True, auth_exclude_mechanism=["LOGIN"],
        )  # fmt: skip

    listener = loop.run_until_complete(
        loop.create_server(session, "127.0.0.1", 0, ssl=context if at_once else None)
    )
    held.port = listener.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield held
    finally:
        asyncio.run_coroutine_threadsafe(_end(listener), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(listener: asyncio.Server) -> None:
    listener.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
