"""Names in a query that an address does not know: a filter with a slip in its name would be no filter, and nobody would see it."""

from __future__ import annotations

from urllib.parse import parse_qsl

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.routing import Route
from starlette.types import Scope

from watchstep_services.api.schemas.problems import RequestRefusedError

_PREFIX = "/v1/"
_STREAMS = "text/event-stream"


def check_query(scope: Scope, route: Route) -> None:
    """Refuse names that a route does not know. Pages for people and streams of events, whose readers add some, take any.

    Raises:
        RefusedError: 422.
    """
    if not scope["query_string"] or not route.path.startswith(_PREFIX):
        return  # probes of health and scrapes of figures may carry what they like
    known = known_names(route)
    if known is None:
        return
    asked = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    unknown = sorted({name for name, _ in asked} - known)
    if unknown:
        takes = (
            f"use one of: {', '.join(sorted(known))}" if known else "leave it out: this address takes none"
        )
        raise RequestRefusedError(422, f"query parameter {unknown[0][:80]!r}: not known here", takes)


def known_names(route: Route) -> frozenset[str] | None:
    """The names that a route's query may have; None where it takes any."""
    if not isinstance(route, APIRoute):
        return None
    good = route.responses.get(200, {}).get("content", {})
    return None if _STREAMS in good else frozenset(_names(route.dependant))


def _names(dependant: Dependant) -> set[str]:
    found = {field.alias for field in dependant.query_params}
    return found.union(*(_names(one) for one in dependant.dependencies))
