"""``Idempotency-Key``: a request that creates something may be sent again, and is answered again instead of done again.

Every POST that makes something, or does something anew each time, takes part by ``dependencies=[Once]``. Answers are kept in the
database, so one whose answer holds a secret takes part by ``dependencies=[OnceSecret]``: nothing of its answer is kept, and a
request that is sent again is refused.
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
    """Not a fault: the request was answered before."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__("answered before")
        self.status = status
        self.body = body


_SENT_AGAIN = f"Of your making and new for each thing, as a UUID. A request that is sent again with it, within {KEPT_HOURS} hours, "


def _key(description: str) -> Any:
    pattern = r"^[\x21-\x7e]+$"
    return Header(
        alias="Idempotency-Key", min_length=1, max_length=255, pattern=pattern, description=description
    )


async def _once(
    request: Request,
    idempotency_key: Annotated[
        str | None, _key(f"{_SENT_AGAIN}is answered as it was the first time, and does nothing more.")
    ] = None,
) -> None:
    await _take(request, idempotency_key, secret=False)


async def _once_secret(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        _key(
            f"{_SENT_AGAIN}is refused with 409: the answer shows a secret, and is not kept to be given again."
        ),
    ] = None,
) -> None:
    await _take(request, idempotency_key, secret=True)


Once = Depends(_once)
OnceSecret = Depends(_once_secret)


async def _take(request: Request, idempotency_key: str | None, *, secret: bool) -> None:
    if idempotency_key is None:
        return
    content = await request.body()
    said = f"{request.method}\n{request.url.path}\n{request.url.query}"
    digest = hashlib.sha256(said.encode() + b"\n" + content).hexdigest()
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
            "a request with this Idempotency-Key was answered, and what it was answered with is shown only once",
            "if that answer was lost, find what was made in the list, revoke it, and make another with a new key",
        ) from error
    request.scope[_SCOPE] = _Claim(database, name, claimed_ns, secret)


def _claim(database: Database, name: str, digest: str) -> int:
    """Take a key for a request.

    Raises:
        AnsweredError: it was answered before.
        RefusedError: 409; the key is another request's, or this one is under way.
    """
    with database.write() as session:
        now = read_clock(session)
        session.execute(delete(ApiRequest).where(ApiRequest.expires_ns <= now))
        values = {
            "name": name, "request": digest, "status": None, "body": "", "claimed_ns": now, "expires_ns": now + _CLAIM_NS,
        }  # fmt: skip
        if insert_missing(session, ApiRequest, values):
            return now
        held = session.get_one(ApiRequest, name)
    if held.request != digest:
        raise RequestRefusedError(
            409, "the Idempotency-Key was sent before with another request", "make a new key for each thing"
        )
    if held.status is None:
        raise RequestRefusedError(
            409, "a request with this Idempotency-Key is under way", "send it again in some seconds"
        )
    raise AnsweredError(held.status, held.body)


def _keep(claim: _Claim, status: int, body: bytes) -> None:
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
    """ASGI: keeps the good answers to requests with a key. A refused or failed one leaves the key free.

    A process that dies with a request under way leaves its key taken for two minutes; whether it was done, only the thing
    itself tells.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or b"idempotency-key" not in dict(scope["headers"]):
            await self._app(scope, receive, send)
            return
        held = _Held(scope, send)
        try:
            await self._app(scope, receive, held)
        except BaseException:
            await held.release()
            raise


class _Held:
    """Holds an answer back until it is kept: who has seen it can rely on it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._start: Message | None = None
        self._body = bytearray()

    async def release(self) -> None:
        """Free the key, unless its answer was kept."""
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
        good = 200 <= self._start["status"] < 300 and len(self._body) <= _MOST_BYTES
        if good:
            await run_in_threadpool(_keep, claim, self._start["status"], bytes(self._body))
            del self._scope[_SCOPE]
        await self.release()
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": bytes(self._body)})


def answer_again(_request: Request, error: Exception) -> Response:
    """The answer of an earlier request."""
    assert isinstance(error, AnsweredError)
    return Response(error.body, error.status, {REPLAYED: "true"}, "application/json")
