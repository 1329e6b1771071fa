"""Announcements: a recorder says which segment lies on the store, and is told what is asked of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response
from sqlalchemy import update

from watchstep.errors import ConfigError
from watchstep.format.layout import SegmentKey, WriterId, check_name
from watchstep_services.api.lookup import hold_open_run
from watchstep_services.api.middleware.access import Served, permits
from watchstep_services.api.middleware.direct import Direct
from watchstep_services.api.schemas.models import AnnouncementInput, AnnouncementResponse, ControlData
from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.records import RUNS, hint, put_segment
from watchstep_services.service.context import Service

router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/announcements", tags=["recording"])

_WRITERS_WITH_HEALTH = 1024
_HEALTH_BYTES = 1024 * 1024  # of all writers of a run: its row is read whenever the run is looked at
_THREADS = 8
_LAGS_SECONDS = 1.0
_LONGEST_PAUSE = 10.0
_BELIEVED_AGAIN_NS = 60 * NANOSECONDS
"""A run that is urgent all the time comes before others for a quarter of it."""


def pause_seconds(lag_ns: int) -> float:
    """How long a recorder is asked to leave between announcements: nothing until its run has waited for a second.

    Then twice as long as it waits, so that fewer and larger segments come while the service catches up.

    Args:
        lag_ns: how long the run has been waiting for its evaluation.
    """
    lag = lag_ns / NANOSECONDS
    return 0.0 if lag < _LAGS_SECONDS else min(_LONGEST_PAUSE, 2 * lag)


@router.post("", summary="Announce a segment", response_model=AnnouncementResponse)
@permits("record")
def announce(project: str, run: str, body: AnnouncementInput, service: Served) -> Response:
    """Put a segment into the inbox. Whether it exists, and what it holds, only the store says. Archived projects take none."""
    return Response(_taken_in(service, project, run, body), media_type="application/json")


def direct(service: Service) -> Direct[AnnouncementInput]:
    """The same, for `access.Gate`."""
    return Direct(
        AnnouncementInput,
        lambda values, body: _taken_in(service, values["project"], values["run"], body),
        _THREADS,
    )


def _taken_in(service: Service, project: str, run: str, body: AnnouncementInput) -> bytes:
    """Take a segment in; returns the answer."""
    # The key is made here from checked parts; a recorder names no key.
    writer = WriterId(
        check_name("attempt", body.attempt), check_name("node", body.node), check_name("writer", body.writer)
    )
    if body.first > body.last:
        raise ConfigError(f"steps {body.first} to {body.last}: none", "announce the first and the last step")
    key = SegmentKey(writer, body.seq, body.first, body.last)
    with service.database.write() as session:
        row = hold_open_run(session, project, run)
        waiting = row.due_ns is not None and row.due_ns <= row.now_ns
        pause = pause_seconds(row.now_ns - (row.due_ns or row.now_ns) if waiting else 0)
        said: dict[str, Any] = {"last_seen_ns": row.now_ns}
        if row.poll_interval_ns:
            said["poll_ns"] = row.now_ns + row.poll_interval_ns
        if body.urgent and row.now_ns - row.urgent_ns > _BELIEVED_AGAIN_NS:
            said["urgent_ns"] = row.now_ns
        health, before = _with_health(row.health, f"{writer.node}/{writer.writer}", body.health)
        if health is not None:
            said["health"] = health
        fresh = put_segment(session, row.id, key, row.now_ns)
        if fresh:
            hint(session, row.id, asked=True, also=said)
        else:
            session.execute(update(RUNS).where(RUNS.c.id == row.id).values(said))
        failpoint("announce.accepting", row.id)
    failpoint("announce.accepted", row.id)
    metrics.ANNOUNCEMENTS.labels("fresh" if fresh else "known").inc()
    if before is not None:
        metrics.recorder_said(before, body.health)
    if fresh and not waiting:  # else it stands in the line already, by an earlier message
        service.notifier.run_changed(row.id, row.cached_by)
    # Not by the framework, which would check it once more.
    told = AnnouncementResponse(control=ControlData.model_validate(row.control), pause_seconds=pause)
    return told.model_dump_json().encode()


def _with_health(
    held: Mapping[str, Any], writer: str, said: dict[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """A run's health with what a writer says of itself, None where it stays; and what it said before, None where it says nothing."""
    if not said:
        return None, None
    recorders = dict(held.get("recorders", {}))
    before = recorders.get(writer, {})
    recorders[writer] = said
    if len(recorders) > _WRITERS_WITH_HEALTH or len(json.dumps(recorders)) > _HEALTH_BYTES:
        return None, before
    return {**held, "recorders": recorders}, before
