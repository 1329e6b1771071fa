"""Who may do what: every route is denied unless its token's role and project allow it.

The check stands before the application, so that nothing of a request is read for somebody who may not make it.

Tokens that were looked up a moment ago: a recorder that announces each second is not looked up each second.

What is remembered is the hash of a token and whose it is, for `KEPT_SECONDS`: so long a token may go on in other processes
after it was revoked or has ended. The process that revokes it forgets it at once.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from watchstep.format.layout import run_prefix
from watchstep_services.api.lookup import unknown_run
from watchstep_services.api.middleware.policies import RoutePolicy, Routes, open_to_all, permits, policy_of
from watchstep_services.api.middleware.rate_limits import RateLimits
from watchstep_services.api.middleware.request_limits import check_head, check_length, limited
from watchstep_services.api.schemas.filters import check_query
from watchstep_services.api.schemas.problems import RequestRefusedError, answer_to
from watchstep_services.auth.tokens import PERMISSIONS, AuthenticatedCaller, Permission, digest_of, identify
from watchstep_services.service.context import Service

__all__ = ["Caller", "Gate", "Served", "document_token", "open_to_all", "permits"]

_IDENTITY = "watchstep.identity"
_bearer = HTTPBearer(auto_error=False, description="A Watchstep token.")


class Gate:
    """ASGI: lets a request through to its route, or answers why not.

    Args:
        app: what stands behind.
        service: whose tokens count.
        routes: all that there are.
        limits: how often may be asked.
        known: tokens that were looked up a moment ago.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        routes: Routes,
        limits: RateLimits,
        known: KnownTokens,
    ) -> None:
        self._app = app
        self._service = service
        self._routes = routes
        self._limits = limits
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # nothing here speaks anything else; the server ends the connection
        try:
            policy = await self._admit(scope)
        except Exception as error:  # noqa: BLE001 - no handler of the application stands around this
            await answer_to(Request(scope), error)(scope, receive, send)
            return
        await self._app(scope, limited(receive, policy.most_bytes), send)

    async def _admit(self, scope: Scope) -> RoutePolicy:
        """Check a request's head; returns the policy of its route."""
        check_head(scope)
        route, values, methods = self._routes.find(scope)
        endpoint = None if route is None else route.endpoint
        policy = policy_of(endpoint)
        if policy is None or policy.permission is not None:
            permission = None if policy is None else policy.permission
            token = _shown_token(scope)
            identity = self._known.find(token)
            if identity is None:
                identity = await run_in_threadpool(self._identify, scope, token, permission)
            elif not self._limits.spared(identity, permission):
                await run_in_threadpool(self._limits.take, identity, permission)
            if endpoint is None:
                _refuse_unknown(scope, methods)
            if policy is None or policy.permission is None:
                raise RequestRefusedError(403, "the address has no policy", "report it: nobody may use it")
            _check(identity, policy, policy.permission, values)
            scope[_IDENTITY] = identity
        elif policy.counted:
            await run_in_threadpool(self._limits.note_open, address_of(scope))
        check_length(scope, policy.most_bytes)
        if route is not None:
            check_query(scope, route)
        return policy

    def _identify(self, scope: Scope, token: str, permission: Permission | None) -> AuthenticatedCaller:
        address = address_of(scope)
        self._limits.check_address(address, token)
        began = self._known.now()
        identity = identify(self._service.database, token) if token else None
        if identity is None:
            self._limits.note_failure(address)
            raise RequestRefusedError(
                401,
                "no token, or one that is not known, was revoked or has expired",
                "send a valid one as bearer token; the command line and the client take it from WATCHSTEP_TOKEN",
            )
        self._known.keep(token, identity, began)
        self._limits.note_success(token)
        self._limits.take(identity, permission)
        return identity


def address_of(scope: Scope) -> str:
    """Where a request comes from."""
    client = scope.get("client")
    return str(client[0]) if client else "of a socket"


def _shown_token(scope: Scope) -> str:
    scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _refuse_unknown(scope: Scope, methods: frozenset[str]) -> None:
    if methods:
        raise RequestRefusedError(
            405,
            f"Method {scope['method']}: Not Allowed here",
            f"use one of: {', '.join(sorted(methods))}",
            {"allow": ", ".join(sorted(methods))},
        )
    raise RequestRefusedError(
        404, f"address {scope['path']!r}: Not Found", "see /docs for the addresses and methods"
    )


def _check(
    identity: AuthenticatedCaller, policy: RoutePolicy, permission: Permission, values: dict[str, Any]
) -> None:
    if not identity.may(permission):
        roles = [role for role, held in PERMISSIONS.items() if permission in held]
        raise RequestRefusedError(
            403,
            f"a token of role {identity.role} may not {permission}",
            f"use a token of role {' or '.join(roles)}",
        )
    if identity.project is None:
        return
    if "project" not in values and policy.all_projects:
        raise RequestRefusedError(
            403,
            f"the token belongs to project {identity.project!r}, and this is of all projects",
            "use a token of all projects",
        )
    if "project" in values and values["project"] != identity.project:
        raise RequestRefusedError(
            403,
            f"the token belongs to project {identity.project!r}, not {values['project']!r}",
            "use a token of that project",
        )
    if identity.run is not None:
        _check_run(identity.project, identity.run, policy, values)


def _check_run(project: str, own: str, policy: RoutePolicy, values: dict[str, Any]) -> None:
    """For a token of one run no other exists, whatever there is."""
    if "run" in values and "project" in values:
        run_prefix(project, values["run"])
        if values["run"] != own:
            raise unknown_run(project, values["run"])
    elif not policy.run_in_body:
        raise RequestRefusedError(
            403,
            f"the token belongs to run {own!r}, and this is of the whole project",
            "use a token of the project",
        )


def identity_of(scope: Scope) -> AuthenticatedCaller | None:
    """Who makes a request that was let in; None where no token was asked for."""
    identity = scope.get(_IDENTITY)
    assert identity is None or isinstance(identity, AuthenticatedCaller)
    return identity


def service_of(request: Request) -> Service:
    """The service behind the application."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


async def _served(request: Request) -> Service:
    # Coroutines, this and the others that do nothing: what is none is called in a thread, which costs more than it does.
    return service_of(request)


async def _caller(request: Request) -> AuthenticatedCaller:
    identity = request.scope.get(_IDENTITY)
    assert isinstance(identity, AuthenticatedCaller), (
        "an endpoint that asks who calls must not be open to all"
    )
    return identity


async def document_token(_: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> None:
    """Tells the OpenAPI document that a token is asked for; `Gate` has looked at it already."""


Caller = Annotated[AuthenticatedCaller, Depends(_caller)]
Served = Annotated[Service, Depends(_served)]


KEPT_SECONDS = 5.0
_MOST_KEPT = 10_000


class KnownTokens:
    """Identities by the hash of their token. Thread-safe.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: OrderedDict[str, tuple[AuthenticatedCaller, float]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, token: str) -> AuthenticatedCaller | None:
        """Whose token it is; None where that has to be looked up."""
        with self._lock:
            held = self._held.get(digest_of(token))
        return None if held is None or held[1] <= self._clock() else held[0]

    def keep(self, token: str, identity: AuthenticatedCaller, since: float) -> None:
        """Remember a token that was good.

        Args:
            token: as it was shown.
            identity: whose it is.
            since: by the clock, before it was looked up.
        """
        digest = digest_of(token)
        with self._lock:
            self._held.pop(digest, None)
            self._held[digest] = identity, since + KEPT_SECONDS
            while len(self._held) > _MOST_KEPT:
                self._held.popitem(last=False)

    def now(self) -> float:
        """By the clock."""
        return self._clock()

    def forget(self, public: str) -> None:
        """A token is good no more.

        Args:
            public: its id.
        """
        with self._lock:
            for digest in [
                digest for digest, (identity, _) in self._held.items() if identity.token == public
            ]:
                del self._held[digest]
