"""Access control: every route is refused unless the token's role, project and run allow it.

The check runs before the application, so that the body of a request is not read if its token lacks the permission.

Valid tokens are cached for `CACHE_SECONDS`, as the hash of the token and its identity, because a recorder sends an announcement
each second. Other processes may accept a token for this time after it was revoked or has expired. The process that revokes it
drops it from its cache at once.
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
from starlette.datastructures import Headers, QueryParams
from starlette.types import ASGIApp, Receive, Scope, Send

from watchstep.format.layout import run_prefix
from watchstep_services.api.lookup import unknown_run
from watchstep_services.api.middleware.policies import RoutePolicy, Routes, open_to_all, permits, policy_of
from watchstep_services.api.middleware.rate_limits import RateLimits
from watchstep_services.api.middleware.request_limits import check_head, check_length, limited
from watchstep_services.api.schemas.filters import check_query
from watchstep_services.api.schemas.problems import RequestRefusedError, answer_to
from watchstep_services.auth import PERMISSIONS, AuthenticatedCaller, Permission, digest_of, identify
from watchstep_services.notify.picture_links import PictureName, is_valid_link
from watchstep_services.service.context import Service

__all__ = ["Caller", "Gate", "Served", "document_token", "open_to_all", "permits"]

_IDENTITY = "watchstep.identity"
_bearer = HTTPBearer(auto_error=False, description="A Watchstep token.")


class Gate:
    """ASGI middleware: passes a permitted request on, and responds to any other with an error.

    Args:
        app: the next application.
        service: the service, which stores the tokens.
        routes: all routes.
        limits: rate limits.
        token_cache: identities of tokens that were looked up recently.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        routes: Routes,
        limits: RateLimits,
        token_cache: TokenCache,
    ) -> None:
        self._app = app
        self._service = service
        self._routes = routes
        self._limits = limits
        self._token_cache = token_cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no other protocol is supported; the server closes the connection
        try:
            policy = await self._admit(scope)
        except Exception as error:  # noqa: BLE001 - the handlers of the application do not cover this
            await answer_to(Request(scope), error)(scope, receive, send)
            return
        await self._app(scope, limited(receive, policy.most_bytes, any_text=policy.any_text), send)

    async def _admit(self, scope: Scope) -> RoutePolicy:
        """Check a request's head, and return the policy of its route."""
        check_head(scope)
        route, values, methods = self._routes.find(scope)
        if route is None and not methods and _is_visit(scope):
            scope["path"], scope["raw_path"] = (
                "/",
                b"/",
            )  # the page says that there is nothing at this address
            route, values, methods = self._routes.find(scope)
        endpoint = None if route is None else route.endpoint
        policy = policy_of(endpoint)
        if policy is None or policy.permission is not None:
            permission = None if policy is None else policy.permission
            token = _bearer_token(scope)
            if policy is not None and policy.signed and not token and await self._is_signed(scope, values):
                check_length(scope, policy.most_bytes)
                if route is not None:
                    check_query(scope, route)
                return policy
            identity = self._token_cache.get(token)
            if identity is None:
                identity = await run_in_threadpool(self._identify, scope, token, permission)
            elif not self._limits.count_locally(identity, permission):
                await run_in_threadpool(self._limits.take, identity, permission)
            if endpoint is None:
                _refuse_unknown(scope, methods)
            if policy is None or policy.permission is None:
                raise RequestRefusedError(
                    403,
                    "the address has no access policy, so that every token is refused",
                    "report the problem",
                )
            _check(identity, policy, policy.permission, values)
            scope[_IDENTITY] = identity
        elif policy.counted:
            await run_in_threadpool(self._limits.count_open, address_of(scope))
        check_length(scope, policy.most_bytes)
        if route is not None:
            check_query(scope, route)
        return policy

    async def _is_signed(self, scope: Scope, values: dict[str, Any]) -> bool:
        """Whether a request has a valid signature instead of a token; one without any needs a token.

        Raises:
            RequestRefusedError: 401, the signature is not valid or has expired; 429, too many requests from the address.
        """
        query = QueryParams(scope["query_string"])
        if "signature" not in query:
            return False
        await run_in_threadpool(self._limits.count_open, address_of(scope))
        picture = PictureName(str(values["project"]), str(values["run"]), str(values["fingerprint"]))
        settings, expires = self._service.settings, query.get("expires", "")
        if not await run_in_threadpool(
            is_valid_link, settings, picture, expires, query["signature"], time.time_ns()
        ):
            raise RequestRefusedError(
                401,
                "the link to the picture is not valid, or has expired",
                "open the alert's page, or send a bearer token",
            )
        return True

    def _identify(self, scope: Scope, token: str, permission: Permission | None) -> AuthenticatedCaller:
        address = address_of(scope)
        self._limits.check_address(address, token)
        started = self._token_cache.now()
        identity = identify(self._service.database, token) if token else None
        if identity is None:
            self._limits.count_failure(address)
            raise RequestRefusedError(
                401,
                "the token is missing, unknown, revoked or expired",
                "send a valid bearer token; the command line and the client read it from WATCHSTEP_TOKEN",
            )
        self._token_cache.put(token, identity, started)
        self._limits.record_success(token)
        self._limits.take(identity, permission)
        return identity


def address_of(scope: Scope) -> str:
    """Return the client address of a request."""
    client = scope.get("client")
    return str(client[0]) if client else "of a socket"


def _bearer_token(scope: Scope) -> str:
    scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _is_visit(scope: Scope) -> bool:
    """Whether a person opens an address outside of the API in a browser."""
    accepts = Headers(scope=scope).get("accept", "")
    return scope["method"] == "GET" and "text/html" in accepts and not scope["path"].startswith("/v1")


def _refuse_unknown(scope: Scope, methods: frozenset[str]) -> None:
    if methods:
        raise RequestRefusedError(
            405,
            f"method {scope['method']}: not allowed for this address",
            f"use one of: {', '.join(sorted(methods))}",
            {"allow": ", ".join(sorted(methods))},
        )
    raise RequestRefusedError(
        404, f"address {scope['path']!r}: not found", "see /docs for the addresses and methods"
    )


def _check(
    identity: AuthenticatedCaller, policy: RoutePolicy, permission: Permission, values: dict[str, Any]
) -> None:
    if not identity.may(permission):
        roles = [role for role, permissions in PERMISSIONS.items() if permission in permissions]
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
            f"the token belongs to project {identity.project!r}, but the request concerns all projects",
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
    """Respond to a token of one run as if no other run existed."""
    if "run" in values and "project" in values:
        run_prefix(project, values["run"])
        if values["run"] != own:
            raise unknown_run(project, values["run"])
    elif not policy.run_in_body:
        raise RequestRefusedError(
            403,
            f"the token belongs to run {own!r}, but the request concerns the whole project",
            "use a token of the project",
        )


def identity_of(scope: Scope) -> AuthenticatedCaller | None:
    """Return the identity of a permitted request; None if its route requires no token."""
    identity = scope.get(_IDENTITY)
    assert identity is None or isinstance(identity, AuthenticatedCaller)
    return identity


def service_of(request: Request) -> Service:
    """Return the service of the application."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


async def _served(request: Request) -> Service:
    # A coroutine, like the other trivial dependencies: FastAPI calls plain functions in a thread, which costs more than the call.
    return service_of(request)


async def _caller(request: Request) -> AuthenticatedCaller:
    identity = request.scope.get(_IDENTITY)
    assert isinstance(identity, AuthenticatedCaller), (
        "an endpoint with a Caller parameter must require a token"
    )
    return identity


async def document_token(_: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> None:
    """Document in OpenAPI that a token is required. `Gate` has already checked it."""


Caller = Annotated[AuthenticatedCaller, Depends(_caller)]
Served = Annotated[Service, Depends(_served)]


CACHE_SECONDS = 5.0
_MOST_CACHED = 10_000


class TokenCache:
    """Cache of identities by the hash of their token. Thread-safe.

    Args:
        clock: clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, tuple[AuthenticatedCaller, float]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, token: str) -> AuthenticatedCaller | None:
        """Return the identity of a token; None if it is not cached."""
        with self._lock:
            entry = self._entries.get(digest_of(token))
        return None if entry is None or entry[1] <= self._clock() else entry[0]

    def put(self, token: str, identity: AuthenticatedCaller, since: float) -> None:
        """Add a valid token.

        Args:
            token: the token.
            identity: its identity.
            since: time by the clock before the token was looked up.
        """
        digest = digest_of(token)
        with self._lock:
            self._entries.pop(digest, None)
            self._entries[digest] = identity, since + CACHE_SECONDS
            while len(self._entries) > _MOST_CACHED:
                self._entries.popitem(last=False)

    def now(self) -> float:
        """Return the time by the clock."""
        return self._clock()

    def discard(self, public: str) -> None:
        """Remove a token.

        Args:
            public: id of the token.
        """
        with self._lock:
            for digest in [
                digest for digest, (identity, _) in self._entries.items() if identity.token == public
            ]:
                del self._entries[digest]
