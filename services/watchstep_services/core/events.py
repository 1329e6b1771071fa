"""Events as CloudEvents 1.0, in JSON."""

from __future__ import annotations

import uuid
from datetime import datetime, timezone
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

EventType = Literal[
    "io.watchstep.run.started",
    "io.watchstep.run.ended",
    "io.watchstep.run.restart_allowed",
    "io.watchstep.alert.firing",
    "io.watchstep.alert.revised",
    "io.watchstep.alert.resolved",
    "io.watchstep.alert.acknowledged",
    "io.watchstep.stop.requested",
    "io.watchstep.stop.done",
    "io.watchstep.stop.would_have",
    "io.watchstep.rule.error",
    "io.watchstep.rule.no_data",
    "io.watchstep.rule.ok",
]
MEDIA_TYPE = "application/cloudevents+json"
_NANOSECONDS = 1_000_000_000


class CloudEvent(BaseModel):
    """An event.

    ``data`` of an alert holds the rule config, the finding, an explanation, ``url``, which is the address of its page and empty if the
    service has no public URL, and how to fetch the evidence. Where it names
    ``inhibited_by``, or a ``dry_run``, the event is a record: nothing was stopped and nobody was told.
    """

    model_config = ConfigDict(frozen=True)

    specversion: Literal["1.0"] = "1.0"
    id: str = Field(description="Unique; a notification that comes twice carries the same.")
    source: str = Field(description="The run's address on the API.")
    type: EventType
    subject: str = Field(description="<project>/<run>")
    time: str = Field(description="RFC 3339, UTC, by the database's clock.")
    datacontenttype: Literal["application/json"] = "application/json"
    data: dict[str, Any]


def run_url(base_url: str, project: str, run: str) -> str:
    """Address of a run on the API."""
    return f"{base_url}/v1/projects/{project}/runs/{run}"


def project_url(base_url: str, project: str) -> str:
    """Address of a project on the API."""
    return f"{base_url}/v1/projects/{project}"


def make_event(
    kind: EventType, base_url: str, named: tuple[str, str], at_ns: int, data: dict[str, Any]
) -> CloudEvent:
    """A new event.

    Args:
        kind: its type.
        base_url: of the API.
        named: project and run.
        at_ns: nanoseconds since the epoch.
        data: JSON-ready.
    """
    project, run = named
    return CloudEvent(
        id=str(uuid.uuid4()),
        source=run_url(base_url, project, run),
        type=kind,
        subject=f"{project}/{run}",
        time=rfc3339(at_ns),
        data={"project": project, "run": run, "run_url": run_url(base_url, project, run), **data},
    )


def rfc3339(at_ns: int) -> str:
    """Nanoseconds since the epoch as RFC 3339 in UTC, with microseconds."""
    seconds, rest = divmod(at_ns, _NANOSECONDS)
    moment = datetime.fromtimestamp(seconds, timezone.utc).replace(microsecond=rest // 1000)
    return moment.isoformat().replace("+00:00", "Z")
