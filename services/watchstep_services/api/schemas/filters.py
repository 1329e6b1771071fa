"""Filters that lists share: query parameters, and the conditions that they become.

Names in a query that an address does not know: a filter with a slip in its name would be no filter, and nobody would see it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

from fastapi import Query
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import AfterValidator
from sqlalchemy import ColumnElement
from sqlalchemy.orm import InstrumentedAttribute
from starlette.routing import Route
from starlette.types import Scope

from watchstep.errors import ConfigError
from watchstep_services.api.schemas.problems import RequestRefusedError

RunState = Literal["created", "running", "completed", "failed", "stopped", "lost"]
Severity = Literal["info", "warning", "critical"]
Phase = Literal["inactive", "pending", "firing", "resolved"]

_NANOSECONDS = 1_000_000_000
_LABEL = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]{0,62})=(.{0,256})", re.DOTALL)
_MOST = 20


def _plain(value: str) -> str:
    if "\0" in value:
        raise ValueError("holds a NUL")
    return value


Word = Annotated[str, AfterValidator(_plain)]
"""Text that a database can be asked for."""

States = Annotated[
    list[RunState] | None,
    Query(alias="state", max_length=_MOST, description="Only runs in one of these states."),
]
Severities = Annotated[
    list[Severity] | None,
    Query(alias="severity", max_length=_MOST, description="Only of one of these severities."),
]
Phases = Annotated[
    list[Phase] | None,
    Query(alias="phase", max_length=_MOST, description="Only alerts in one of these phases."),
]
Rules = Annotated[
    list[Annotated[Word, Query(max_length=128)]] | None,
    Query(alias="rule", max_length=_MOST, description="Only of one of these rules."),
]
Labels = Annotated[
    list[Word] | None,
    Query(
        alias="label",
        max_length=_MOST,
        description="Only with this label of the rule config: NAME=VALUE; all must hold.",
    ),
]
Since = Annotated[
    str | None,
    Query(
        max_length=40,
        description="Not before: RFC 3339, or nanoseconds since the epoch.",
        examples=["2026-11-21T00:00:00Z"],
    ),
]
Until = Annotated[
    str | None,
    Query(
        max_length=40,
        description="Before: RFC 3339, or nanoseconds since the epoch.",
        examples=["2026-11-22T00:00:00Z"],
    ),
]


def one_of(column: InstrumentedAttribute[str], values: Sequence[str] | None) -> Iterator[ColumnElement[bool]]:
    """The column holds one of these; no condition where there are none."""
    if values:
        yield column.in_(values)


def between(
    column: InstrumentedAttribute[int], since: str | None, until: str | None
) -> Iterator[ColumnElement[bool]]:
    """The column's time is not before the one and before the other.

    Raises:
        ConfigError: one of them is no time.
    """
    if since is not None:
        yield column >= time_ns("since", since)
    if until is not None:
        yield column < time_ns("until", until)


def labelled(
    column: InstrumentedAttribute[Any], labels: Sequence[str] | None
) -> Iterator[ColumnElement[bool]]:
    """The JSON column's ``labels`` hold these, each ``NAME=VALUE``.

    Raises:
        ConfigError: one of them is no label.
    """
    for label in labels or ():
        found = _LABEL.fullmatch(label)
        if found is None:
            raise ConfigError(f"label {label[:80]!r}: no NAME=VALUE", "write it as team=vision")
        yield column["labels"][found[1]].as_string() == found[2]


def time_ns(name: str, text: str) -> int:
    """A time as nanoseconds since the epoch.

    Raises:
        ConfigError: it is neither RFC 3339 nor a number.
    """
    if text.isascii() and text.isdigit() and int(text) < 2**63:
        return int(text)
    try:
        moment = datetime.fromisoformat(f"{text[:-1]}+00:00" if text[-1:] in {"Z", "z"} else text)
        since = moment - datetime(1970, 1, 1, tzinfo=timezone.utc)  # a TypeError where it has no zone
    except (ValueError, OverflowError, TypeError):
        raise _no_time(name, text) from None
    held = (since.days * 86_400 + since.seconds) * _NANOSECONDS + since.microseconds * 1000
    if not -(2**63) <= held < 2**63:
        raise _no_time(name, text)
    return held


def _no_time(name: str, text: str) -> ConfigError:
    return ConfigError(f"{name} {text!r}: no time", "write RFC 3339 with a zone, as 2026-11-21T08:00:00Z")


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
