"""Access policies of routes: which token a route requires.

A route without a policy is refused for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from watchstep_services.api.middleware.request_limits import MOST_BODY
from watchstep_services.auth import Permission

PERMISSION = "x-watchstep-permission"
"""Extension of an operation in the OpenAPI document: the required permission, or ``none`` if no token is required."""

SCOPE = "x-watchstep-scope"
"""Extension of an operation: ``all projects`` if a token of one project is not sufficient."""

_MOST_PARTS = 16
_POLICY = "_watchstep_policy"
_OPEN = "none"
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True)
class RoutePolicy:
    """Access policy of a route.

    Attributes:
        permission: permission that the token's role must have; None if no token is required.
        all_projects: whether a path without a ``{project}`` requires a token of all projects.
        most_bytes: maximum size of a body.
        run_in_body: whether the endpoint itself restricts tokens of one run, because its path contains no ``{run}``.
        counted: whether requests without a token are counted by address.
        any_text: whether a body may have unpaired surrogates, which the endpoint replaces.
        signed: whether a request without a token is passed on to the endpoint if its query has a ``signature``, which the gate
            verifies; such requests are counted by address.
    """

    permission: Permission | None
    all_projects: bool = False
    most_bytes: int = MOST_BODY
    run_in_body: bool = False
    counted: bool = False
    any_text: bool = False
    signed: bool = False


def permits(
    permission: Permission,
    *,
    all_projects: bool | None = None,
    most_bytes: int = MOST_BODY,
    run_in_body: bool = False,
    any_text: bool = False,
    signed: bool = False,
) -> Callable[[Endpoint], Endpoint]:
    """Set the policy of an endpoint. Place the decorator below that of the route.

    If the path contains a ``{project}``, the token must belong to that project or to all. An endpoint for reading without one must
    itself limit its response to what `Caller` may see. If the path also contains a ``{run}``, a token of one run must belong to
    that run. Without a ``{run}``, tokens of one run are refused.

    Args:
        permission: permission that the token's role must have.
        all_projects: whether a path without a ``{project}`` requires a token of all projects; default: for all permissions
            except read.
        most_bytes: maximum size of a body; a larger one gets the status 413.
        run_in_body: whether to accept tokens of one run although the path contains no ``{run}``; the endpoint then checks
            `Caller` itself.
        any_text: whether a body may have unpaired surrogates; the endpoint then replaces them.
        signed: whether a signed link to a picture replaces the token. Only for the path of a picture.
    """
    needs_all = permission != "read" if all_projects is None else all_projects
    return _mark(
        RoutePolicy(permission, needs_all, most_bytes, run_in_body, any_text=any_text, signed=signed)
    )


def open_to_all(*, counted: bool) -> Callable[[Endpoint], Endpoint]:
    """Set the policy of an endpoint that requires no token.

    Args:
        counted: whether to limit each address to ``WATCHSTEP_FAILURES_PER_MINUTE`` requests a minute. Health probes are not
            limited.
    """
    return _mark(RoutePolicy(None, counted=counted))


def policy_of(endpoint: object) -> RoutePolicy | None:
    """Return the policy of an endpoint; None if it has none, so that every token is refused."""
    policy = getattr(endpoint, _POLICY, None)
    return policy if isinstance(policy, RoutePolicy) else None


def describe(router: APIRouter) -> None:
    """Add the policy of each route to its operation in the OpenAPI document.

    Raises:
        TypeError: the router contains anything but routes, for example another router.
    """
    for route in router.routes:
        if not isinstance(route, APIRoute):
            raise TypeError(
                f"{route!r}: only plain routes have policies; include the router in the application"
            )
        policy = policy_of(route.endpoint)
        if policy is not None:
            extensions = {PERMISSION: policy.permission or _OPEN}
            if policy.all_projects and "{project}" not in route.path:
                extensions[SCOPE] = "all projects"
            route.openapi_extra = {**(route.openapi_extra or {}), **extensions}


def documented(router: APIRouter, document_token: Callable[..., Any]) -> list[Any]:
    """Return the dependencies that document the token of a router; empty if no route requires one."""
    policies = [policy_of(route.endpoint) for route in router.routes if isinstance(route, APIRoute)]
    return (
        []
        if all(policy is not None and policy.permission is None for policy in policies)
        else [Depends(document_token)]
    )


class Routes:
    """The routes of the application, by which requests are matched before they reach it."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes = tuple(route for route in routes if isinstance(route, Route))
        self._last_parts = frozenset(route.path.rpartition("/")[2] for route in self._routes)
        self._by_shape: dict[tuple[int, str], tuple[Route, ...]] = {}

    def find(self, scope: Scope) -> tuple[Route | None, dict[str, Any], frozenset[str]]:
        """Find the route of a request.

        Returns:
            The route, the values in its path, and no methods. If only the method does not match: None, and the methods that would.
        """
        methods: set[str] = set()
        for route in self._candidates(scope):
            match, child = route.matches(scope)
            if match is Match.FULL:
                return route, child["path_params"], frozenset()
            if match is Match.PARTIAL:
                methods |= route.methods or set()
        if "GET" in methods:
            methods.add("HEAD")
        return None, {}, frozenset(methods)

    def _candidates(self, scope: Scope) -> tuple[Route, ...]:
        """Return the routes that may match. Most routes differ in their number of parts, or in the last part."""
        path = scope["path"]
        number, last = path.count("/"), path.rpartition("/")[2]
        if scope.get("root_path") or number > _MOST_PARTS:
            return self._routes
        # A last part that no route has is a value. Such values are not cached, because there are many.
        shape = (number, last if last in self._last_parts else "")
        routes = self._by_shape.get(shape)
        if routes is None:
            routes = self._by_shape[shape] = tuple(
                route for route in self._routes if _may_match(route, *shape)
            )
        return routes


def _may_match(route: Route, parts: int, last: str) -> bool:
    own = route.path.rpartition("/")[2]
    return (
        ":path}" in route.path
        or ":any_path}" in route.path
        or (route.path.count("/") == parts and ("{" in own or own == last))
    )


def _mark(policy: RoutePolicy) -> Callable[[Endpoint], Endpoint]:
    def mark(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _POLICY, policy)
        return endpoint

    return mark
