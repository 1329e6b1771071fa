"""Filters of lists: query parameters, and the SQL conditions that they become.

Unknown query parameters are refused. Otherwise a filter with a misspelled name would have no effect, and nobody would notice.
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
        raise ValueError("contains a NUL character")
    return value


Word = Annotated[str, AfterValidator(_plain)]
"""Text without characters that databases refuse."""

States = Annotated[
    list[RunState] | None,
    Query(alias="state", max_length=_MOST, description="Only runs in one of these states."),
]
Severities = Annotated[
    list[Severity] | None,
    Query(alias="severity", max_length=_MOST, description="Only alerts of one of these severities."),
]
Phases = Annotated[
    list[Phase] | None,
    Query(alias="phase", max_length=_MOST, description="Only alerts in one of these phases."),
]
Rules = Annotated[
    list[Annotated[Word, Query(max_length=128)]] | None,
    Query(alias="rule", max_length=_MOST, description="Only alerts of one of these rules."),
]
Labels = Annotated[
    list[Word] | None,
    Query(
        alias="label",
        max_length=_MOST,
        description="Only alerts with this label of the rule config: NAME=VALUE; all labels must match.",
    ),
]
Since = Annotated[
    str | None,
    Query(
        max_length=40,
        description="Start, inclusive: RFC 3339, or nanoseconds since the epoch.",
        examples=["2026-11-21T00:00:00Z"],
    ),
]
Until = Annotated[
    str | None,
    Query(
        max_length=40,
        description="End, exclusive: RFC 3339, or nanoseconds since the epoch.",
        examples=["2026-11-22T00:00:00Z"],
    ),
]


def one_of(column: InstrumentedAttribute[str], values: Sequence[str] | None) -> Iterator[ColumnElement[bool]]:
    """Yield the condition that a column has one of the values; nothing without values."""
    if values:
        yield column.in_(values)


def between(
    column: InstrumentedAttribute[int], since: str | None, until: str | None
) -> Iterator[ColumnElement[bool]]:
    """Yield the conditions that a column's time is at or after `since`, and before `until`.

    Raises:
        ConfigError: a value is not a valid time.
    """
    if since is not None:
        yield column >= time_ns("since", since)
    if until is not None:
        yield column < time_ns("until", until)


def labelled(
    column: InstrumentedAttribute[Any], labels: Sequence[str] | None
) -> Iterator[ColumnElement[bool]]:
    """Yield the conditions that a JSON column's ``labels`` contain these, each ``NAME=VALUE``.

    Raises:
        ConfigError: a label does not have the form ``NAME=VALUE``.
    """
    for label in labels or ():
        match = _LABEL.fullmatch(label)
        if match is None:
            raise ConfigError(
                f"label {label[:80]!r}: not of the form NAME=VALUE", "use, for example, team=vision"
            )
        yield column["labels"][match[1]].as_string() == match[2]


def time_ns(name: str, text: str) -> int:
    """Parse a time to nanoseconds since the epoch.

    Raises:
        ConfigError: the text is neither RFC 3339 nor a number.
    """
    if text.isascii() and text.isdigit() and int(text) < 2**63:
        return int(text)
    try:
        moment = datetime.fromisoformat(f"{text[:-1]}+00:00" if text[-1:] in {"Z", "z"} else text)
        since = moment - datetime(1970, 1, 1, tzinfo=timezone.utc)  # raises a TypeError without a time zone
    except (ValueError, OverflowError, TypeError):
        raise _invalid_time(name, text) from None
    nanoseconds = (since.days * 86_400 + since.seconds) * _NANOSECONDS + since.microseconds * 1000
    if not -(2**63) <= nanoseconds < 2**63:
        raise _invalid_time(name, text)
    return nanoseconds


def _invalid_time(name: str, text: str) -> ConfigError:
    return ConfigError(
        f"{name} {text!r}: not a valid time",
        "use RFC 3339 with a time zone, for example 2026-11-21T08:00:00Z",
    )


_PREFIX = "/v1/"
_STREAMS = "text/event-stream"


def check_query(scope: Scope, route: Route) -> None:
    """Check the names of a request's query parameters.

    HTML pages and event streams accept any name, because their clients add some.

    Raises:
        RequestRefusedError: 422, a parameter is unknown.
    """
    if not scope["query_string"] or not route.path.startswith(_PREFIX):
        return  # health probes and metric scrapes may have any parameters
    accepted = accepted_names(route)
    if accepted is None:
        return
    parameters = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    unknown = sorted({name for name, _ in parameters} - accepted)
    if unknown:
        hint = (
            f"use one of: {', '.join(sorted(accepted))}"
            if accepted
            else "omit it: this address accepts no query parameters"
        )
        raise RequestRefusedError(422, f"query parameter {unknown[0][:80]!r}: unknown", hint)


def accepted_names(route: Route) -> frozenset[str] | None:
    """Return the names of a route's query parameters; None if it accepts any."""
    if not isinstance(route, APIRoute):
        return None
    success = route.responses.get(200, {}).get("content", {})
    return None if _STREAMS in success else frozenset(_names(route.dependant))


def _names(dependant: Dependant) -> set[str]:
    names = {field.alias for field in dependant.query_params}
    return names.union(*(_names(dependency) for dependency in dependant.dependencies))
