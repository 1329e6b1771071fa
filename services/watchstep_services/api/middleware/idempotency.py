"""``Idempotency-Key``: a repeated request gets the stored response instead of being executed again.

Every POST that is not idempotent uses ``dependencies=[Once]``. Responses are stored in the database. An endpoint with a secret in its
response uses ``dependencies=[OnceSecret]``: its response is not stored, and a repeated request is refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Response
from sqlalchemy import delete, update
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from watchstep_services.api.middleware.access import service_of
from watchstep_services.api.schemas.problems import RequestRefusedError
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database, insert_missing
from watchstep_services.db.models import ApiRequest

KEPT_HOURS = 24
REPLAYED = "idempotency-replayed"
_HOUR_NS = 3_600_000_000_000
_CLAIM_NS = 120 * 1_000_000_000
_MOST_BYTES = 1024 * 1024
_SCOPE = "watchstep.idempotency"


@dataclass(frozen=True)
class _Claim:
    database: Database
    name: str
    claimed_ns: int
    secret: bool


class AnsweredError(Exception):
    """Raised to respond to a repeated request with the stored response. Not a fault."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__("already answered")
        self.status = status
        self.body = body


_REPEATED = f"A unique key for each request, for example a UUID. A repeated request with the same key within {KEPT_HOURS} hours "


def _key(description: str) -> Any:
    pattern = r"^[\x21-\x7e]+$"
    return Header(
        alias="Idempotency-Key", min_length=1, max_length=255, pattern=pattern, description=description
    )


async def _once(
    request: Request,
    idempotency_key: Annotated[
        str | None, _key(f"{_REPEATED}gets the same response and has no further effect.")
    ] = None,
) -> None:
    await _begin(request, idempotency_key, secret=False)


async def _once_secret(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        _key(f"{_REPEATED}is refused with 409, because the response contains a secret and is not stored."),
    ] = None,
) -> None:
    await _begin(request, idempotency_key, secret=True)


Once = Depends(_once)
OnceSecret = Depends(_once_secret)


async def _begin(request: Request, idempotency_key: str | None, *, secret: bool) -> None:
    if idempotency_key is None:
        return
    content = await request.body()
    head = f"{request.method}\n{request.url.path}\n{request.url.query}"
    digest = hashlib.sha256(head.encode() + b"\n" + content).hexdigest()
    token = request.headers.get("authorization", "")
    name = hashlib.sha256(f"{token}\n{idempotency_key}".encode()).hexdigest()
    database = service_of(request).database
    try:
        claimed_ns = await run_in_threadpool(_claim, database, name, digest)
    except AnsweredError as error:
        if not secret:
            raise
        raise RequestRefusedError(
            409,
            "a request with this Idempotency-Key was already answered, and its response contains a secret that is shown only once",
            "if you lost the response, find the object in the list, revoke it, and create another with a new key",
        ) from error
    request.scope[_SCOPE] = _Claim(database, name, claimed_ns, secret)


def _claim(database: Database, name: str, digest: str) -> int:
    """Claim a key for a request.

    Raises:
        AnsweredError: the request was already answered.
        RequestRefusedError: 409; the key belongs to another request, or this request is in progress.
    """
    with database.write() as session:
        now = read_clock(session)
        session.execute(delete(ApiRequest).where(ApiRequest.expires_ns <= now))
        values = {
            "name": name, "request": digest, "status": None, "body": "", "claimed_ns": now, "expires_ns": now + _CLAIM_NS,
        }  # fmt: skip
        if insert_missing(session, ApiRequest, values):
            return now
        row = session.get_one(ApiRequest, name)
    if row.request != digest:
        raise RequestRefusedError(
            409, "the Idempotency-Key was used for another request", "use a new key for each request"
        )
    if row.status is None:
        raise RequestRefusedError(
            409, "a request with this Idempotency-Key is in progress", "repeat it in some seconds"
        )
    raise AnsweredError(row.status, row.body)


def _store(claim: _Claim, status: int, body: bytes) -> None:
    with claim.database.write() as session:
        session.execute(
            update(ApiRequest)
            .where(ApiRequest.name == claim.name, ApiRequest.claimed_ns == claim.claimed_ns)
            .values(
                status=status,
                body="" if claim.secret else body.decode(),
                expires_ns=claim.claimed_ns + KEPT_HOURS * _HOUR_NS,
            )
        )


def _release(claim: _Claim) -> None:
    with claim.database.write() as session:
        session.execute(
            delete(ApiRequest).where(ApiRequest.name == claim.name, ApiRequest.claimed_ns == claim.claimed_ns)
        )


class Answers:
    """ASGI middleware: stores the successful responses to requests with a key. A refused or failed request releases its key.

    If a process dies during a request, the key remains claimed for two minutes. Whether the request took effect is visible only
    in the object itself.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http" or b"idempotency-key" not in dict(scope["headers"]):
            await self._app(scope, receive, send)
            return
        buffer = _ResponseBuffer(scope, send)
        try:
            await self._app(scope, receive, buffer)
        except BaseException:
            await buffer.release()
            raise


class _ResponseBuffer:
    """Delays a response until it is stored, so that a client that has received it can rely on it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._start: Message | None = None
        self._body = bytearray()

    async def release(self) -> None:
        """Release the key, unless the response was stored."""
        claim = self._scope.pop(_SCOPE, None)
        if claim is not None:
            await run_in_threadpool(_release, claim)

    async def __call__(self, message: Message) -> None:
        claim = self._scope.get(_SCOPE)
        if claim is None:
            await self._send(message)
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        assert self._start is not None
        self._body += message.get("body", b"")
        if message.get("more_body", False):
            return
        is_stored = 200 <= self._start["status"] < 300 and len(self._body) <= _MOST_BYTES
        if is_stored:
            await run_in_threadpool(_store, claim, self._start["status"], bytes(self._body))
            del self._scope[_SCOPE]
        await self.release()
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": bytes(self._body)})


def answer_again(_request: Request, error: Exception) -> Response:
    """Return the stored response of an earlier request."""
    assert isinstance(error, AnsweredError)
    return Response(error.body, error.status, {REPLAYED: "true"}, "application/json")
