"""Answers of the service as plain data, arrays and Arrow tables. Fields of later versions are left out; ``raw`` has all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from watchstep.errors import ServiceError

Document = TypeVar("Document")


@dataclass(frozen=True)
class RunInfo:
    """A run in a list; ``alerts`` is phase → number, and ``notes`` is how many that fire are of severity info. Times are nanoseconds since the epoch."""

    project: str
    run: str
    url: str
    state: str
    attempt: str
    last_step: int
    created_ns: int
    ended_ns: int | None
    alerts: Mapping[str, int]
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class RuleStatus:
    """A rule config of a run and how it stands: its health (ok, no_data, error) is apart from its alert's phase."""

    name: str
    rule: str
    origin: str
    granted_stop: bool
    health: str
    problem: str
    warnings: tuple[str, ...]
    phase: str
    config: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class RunState:
    """A run and all that the service knows of it."""

    info: RunInfo
    control: Mapping[str, Any]
    job: Mapping[str, Any] | None
    rules: tuple[RuleStatus, ...]
    health: Mapping[str, Any]


@dataclass(frozen=True)
class Alert:
    """An alert: a rule config on one attempt. ``details`` are there once it has fired."""

    run: str
    name: str
    rule: str
    attempt: str
    severity: str
    phase: str
    since_step: int
    since_ns: int
    fired_ns: int | None
    resolved_ns: int | None
    finding: Mapping[str, Any] | None
    details: Mapping[str, Any] | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Event:
    """A CloudEvent; ``place`` is where a later call resumes, 0 where the list does not say."""

    id: str
    type: str
    subject: str
    time: str
    data: Mapping[str, Any]
    raw: Mapping[str, Any] = field(repr=False, compare=False)
    place: int = 0


@dataclass(frozen=True)
class Action:
    """What an event caused, and every try of it."""

    id: int
    kind: str
    event_id: str
    state: str
    outcome: str
    created_ns: int
    finished_ns: int | None
    tries: tuple[Mapping[str, Any], ...]
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class SnapshotInfo:
    """Full tensors of one step of one worker."""

    attempt: str
    worker: int
    step: int
    mode: str
    bytes: int
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class RunToken:
    """A token that records one run; nothing of its secret. Times are nanoseconds since 1970.

    Attributes:
        state: active, expired or revoked.
        created_by: who made it.
        expires_ns: at the latest 14 days after the run has ended.
    """

    id: str
    name: str
    state: str
    created_ns: int
    created_by: str
    expires_ns: int
    revoked_ns: int | None
    last_used_ns: int | None
    raw: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Stop:
    """The answer to a stop; it is not accepted where the attempt has been asked already."""

    accepted: bool
    attempt: str
    raw: Mapping[str, Any] = field(repr=False, compare=False)


def read(kind: type[Document], data: Any, **more: Any) -> Document:
    """A document from an answer.

    Raises:
        ServiceError: the answer has another form.
    """
    names = [each.name for each in fields(kind) if each.name != "raw"]  # type: ignore[arg-type]
    try:
        values = {name: data[name] for name in names if name in data}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        made: Callable[..., Document] = kind
        return made(**values, **more, raw=data)
    except (TypeError, KeyError, AttributeError) as error:
        raise ServiceError(
            f"an answer is no {kind.__name__} ({error})", "use a client of the service's version"
        ) from error
