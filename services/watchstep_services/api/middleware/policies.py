"""What each route asks of a token. A route that asks nothing is refused to everybody, until it says what it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from watchstep_services.api.middleware.request_limits import MOST_BODY
from watchstep_services.auth.tokens import Permission

PERMISSION = "x-watchstep-permission"
"""Of an operation in the OpenAPI document: a permission, or ``none`` where no token is asked for."""

REACH = "x-watchstep-reach"
"""Of an operation: ``all projects`` where a token of one project is not enough."""

_MOST_PARTS = 16
_POLICY = "_watchstep_policy"
_OPEN = "none"
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True)
class RoutePolicy:
    """What a route asks.

    Attributes:
        permission: what the token's role must have; None where no token is asked for.
        all_projects: whether it asks for a token of all projects, where its path names none.
        most_bytes: how large a body may be.
        run_in_body: whether the endpoint itself holds tokens of one run to it, for its path names none.
        counted: whether requests are counted by address, where no token is asked for.
    """

    permission: Permission | None
    all_projects: bool = False
    most_bytes: int = MOST_BODY
    run_in_body: bool = False
    counted: bool = False


def permits(
    permission: Permission,
    *,
    all_projects: bool | None = None,
    most_bytes: int = MOST_BODY,
    run_in_body: bool = False,
) -> Callable[[Endpoint], Endpoint]:
    """Mark what an endpoint asks; below the route's own decorator.

    Where the path has a ``{project}``, the token must be of that project or of all. An endpoint without one that reads must
    itself show no more than `Caller` may see. Where it has a ``{run}`` as well, a token of one run must be of that; one of one run
    is refused where it has none.

    Args:
        permission: what the token's role must have.
        all_projects: whether a path without a ``{project}`` asks for a token of all projects; all but reading does where
            it is not said.
        most_bytes: how large a body may be; a larger one is answered with 413.
        run_in_body: let tokens of one run in though the path has no ``{run}``: the endpoint looks at `Caller` itself.
    """
    everywhere = permission != "read" if all_projects is None else all_projects
    return _mark(RoutePolicy(permission, everywhere, most_bytes, run_in_body))


def open_to_all(*, counted: bool) -> Callable[[Endpoint], Endpoint]:
    """Mark an endpoint that answers without a token.

    Args:
        counted: whether one address may call it ``WATCHSTEP_FAILURES_PER_MINUTE`` times a minute; probes may call as often as
            they like.
    """
    return _mark(RoutePolicy(None, counted=counted))


def policy_of(endpoint: object) -> RoutePolicy | None:
    """What an endpoint asks; None where it does not say, so that nobody may call it."""
    held = getattr(endpoint, _POLICY, None)
    return held if isinstance(held, RoutePolicy) else None


def describe(router: APIRouter) -> None:
    """Put the policy of each route into its part of the OpenAPI document.

    Raises:
        TypeError: the router holds something that no policy could be found for, as a router within it.
    """
    for route in router.routes:
        if not isinstance(route, APIRoute):
            raise TypeError(
                f"{route!r}: only plain routes have policies; include the router in the application"
            )
        policy = policy_of(route.endpoint)
        if policy is not None:
            said = {PERMISSION: policy.permission or _OPEN}
            if policy.all_projects and "{project}" not in route.path:
                said[REACH] = "all projects"
            route.openapi_extra = {**(route.openapi_extra or {}), **said}


def documented(router: APIRouter, shown: Callable[..., Any]) -> list[Any]:
    """What a router depends on so that the document shows its token: nothing where every route is open to all."""
    policies = [policy_of(route.endpoint) for route in router.routes if isinstance(route, APIRoute)]
    return (
        []
        if all(policy is not None and policy.permission is None for policy in policies)
        else [Depends(shown)]
    )


class Routes:
    """All routes that there are for a request: what is not among them does not exist."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes = tuple(route for route in routes if isinstance(route, Route))
        self._last_words = frozenset(route.path.rpartition("/")[2] for route in self._routes)
        self._shaped: dict[tuple[int, str], tuple[Route, ...]] = {}

    def find(self, scope: Scope) -> tuple[Route | None, dict[str, Any], frozenset[str]]:
        """The route of a request.

        Returns:
            It, the values in its path, and, where only the method is wrong, no route but the methods that are right.
        """
        methods: set[str] = set()
        for route in self._candidates(scope):
            match, child = route.matches(scope)
            if match is Match.FULL:
                return route, child["path_params"], frozenset()
            if match is Match.PARTIAL:
                methods |= route.methods or set()
        return None, {}, frozenset(methods)

    def _candidates(self, scope: Scope) -> tuple[Route, ...]:
        """Routes that may match: most differ in how many parts they have, or in the last one."""
        path = scope["path"]
        number, last = path.count("/"), path.rpartition("/")[2]
        if scope.get("root_path") or number > _MOST_PARTS:
            return self._routes
        shape = (
            number,
            last if last in self._last_words else "",
        )  # else it is a value, of which there are many
        found = self._shaped.get(shape)
        if found is None:
            found = self._shaped[shape] = tuple(route for route in self._routes if _may_match(route, *shape))
        return found


def _may_match(route: Route, parts: int, last: str) -> bool:
    own = route.path.rpartition("/")[2]
    return ":path}" in route.path or (route.path.count("/") == parts and ("{" in own or own == last))


def _mark(policy: RoutePolicy) -> Callable[[Endpoint], Endpoint]:
    def mark(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _POLICY, policy)
        return endpoint

    return mark
