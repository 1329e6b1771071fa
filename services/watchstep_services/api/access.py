"""Who may do what: every route is denied unless its token's role and project allow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from watchstep_services.api.problems import RefusedError
from watchstep_services.service import Service
from watchstep_services.tokens import Identity, Permission, identify

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/openapi.json", "/docs"})
_bearer = HTTPBearer(auto_error=False, description="A Watchstep token.")
_PERMISSION = "_watchstep_permission"
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def permits(permission: Permission) -> Callable[[Endpoint], Endpoint]:
    """Mark what an endpoint needs; one without a mark needs ``operate``."""

    def mark(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _PERMISSION, permission)
        return endpoint

    return mark


def service_of(request: Request) -> Service:
    """The service behind the application."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def authorize(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Identity | None:
    """Check the token; a dependency of the whole application.

    Raises:
        RefusedError: 401 without a known token, 403 where its role or project does not allow the request.
    """
    if request.url.path in OPEN_PATHS:
        return None
    identity = identify(service_of(request).database, credentials.credentials) if credentials else None
    if identity is None:
        raise RefusedError(
            401, "no token, or one that is not known", "send 'Authorization: Bearer TOKEN' with a valid token"
        )
    needed: Permission = getattr(request.scope.get("endpoint"), _PERMISSION, "operate")
    if not identity.may(needed):
        raise RefusedError(
            403,
            f"a {identity.role} token may not {needed}",
            "use a token with a role that may: viewers read, recorders record, operators do all",
        )
    project = request.path_params.get("project")
    if identity.project is not None and project is not None and project != identity.project:
        raise RefusedError(
            403,
            f"the token belongs to project {identity.project!r}, not {project!r}",
            "use a token of that project",
        )
    return identity


Caller = Annotated[Identity, Depends(authorize)]
Served = Annotated[Service, Depends(service_of)]
