"""Announcements: a recorder announces a new segment on the store and receives the run's control document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response
from sqlalchemy import update

from watchstep.errors import ConfigError
from watchstep.format.layout import SegmentKey, WriterId, check_name
from watchstep_services.api.lookup import lock_open_run
from watchstep_services.api.middleware.access import Served, permits
from watchstep_services.api.middleware.fast_route import FastRoute
from watchstep_services.api.schemas.models import AnnouncementInput, AnnouncementResponse, ControlData
from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.core.telemetry import metrics
from watchstep_services.db.records import RUNS, hint, put_segment

router = APIRouter(
    prefix="/v1/projects/{project}/runs/{run}/announcements", tags=["recording"], route_class=FastRoute
)

_WRITERS_WITH_HEALTH = 1024
_HEALTH_BYTES = 1024 * 1024  # of all writers of a run; the row is read with every request about the run
_LAGS_SECONDS = 1.0
_LONGEST_PAUSE = 10.0
_URGENT_INTERVAL_NS = 60 * NANOSECONDS
"""Interval at which announcements may mark a run as urgent. A run that is always urgent has priority for a quarter of the time."""


def pause_seconds(lag_ns: int) -> float:
    """Return the pause that a recorder is requested to leave between announcements.

    The pause is 0 if the run has waited less than a second for its evaluation, and twice the waiting time otherwise, so that
    recorders send fewer and larger segments while the service catches up.

    Args:
        lag_ns: time for which the run has waited for its evaluation.
    """
    lag = lag_ns / NANOSECONDS
    return 0.0 if lag < _LAGS_SECONDS else min(_LONGEST_PAUSE, 2 * lag)


@router.post("", summary="Announce a segment", response_model=AnnouncementResponse)
@permits("record", any_text=True)  # a refused announcement would delay alerts
def announce(project: str, run: str, body: AnnouncementInput, service: Served) -> Response:
    """Add a segment to the inbox. The service reads its content from the store only. Archived projects accept no segments."""
    # The key is built from validated parts; a recorder does not choose it.
    writer = WriterId(
        check_name("attempt", body.attempt), check_name("node", body.node), check_name("writer", body.writer)
    )
    if body.first > body.last:
        raise ConfigError(
            f"steps {body.first} to {body.last}: the range is empty", "announce the first and the last step"
        )
    key = SegmentKey(writer, body.seq, body.first, body.last)
    with service.database.write() as session:
        row = lock_open_run(session, project, run)
        waiting = row.due_ns is not None and row.due_ns <= row.now_ns
        pause = pause_seconds(row.now_ns - (row.due_ns or row.now_ns) if waiting else 0)
        changes: dict[str, Any] = {"last_seen_ns": row.now_ns}
        if row.poll_interval_ns:
            changes["poll_ns"] = row.now_ns + row.poll_interval_ns
        if body.urgent and row.now_ns - row.urgent_ns > _URGENT_INTERVAL_NS:
            changes["urgent_ns"] = row.now_ns
        health, before = _with_health(row.health, f"{writer.node}/{writer.writer}", body.health)
        if health is not None:
            changes["health"] = health
        fresh = put_segment(session, row.id, key, row.now_ns)
        if fresh:
            hint(session, row.id, requested=True, also=changes)
        else:
            session.execute(update(RUNS).where(RUNS.c.id == row.id).values(changes))
        failpoint("announce.accepting", row.id)
    failpoint("announce.accepted", row.id)
    metrics.ANNOUNCEMENTS.labels("fresh" if fresh else "known").inc()
    if before is not None:
        metrics.count_recorder_report(before, body.health)
    if fresh and not waiting:  # otherwise an earlier announcement has queued the run
        service.notifier.run_changed(row.id, row.cached_by)
    # Serialized here, because FastAPI would validate the model a second time.
    answer = AnnouncementResponse(control=ControlData.model_validate(row.control), pause_seconds=pause)
    return Response(answer.model_dump_json(), media_type="application/json")


def _with_health(
    run_health: Mapping[str, Any], writer: str, report: dict[str, Any]
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Add a writer's health report to that of its run.

    Returns:
        The new health of the run, or None if it does not change; and the writer's previous report, or None without a new one.
    """
    if not report:
        return None, None
    recorders = dict(run_health.get("recorders", {}))
    before = recorders.get(writer, {})
    recorders[writer] = report
    if len(recorders) > _WRITERS_WITH_HEALTH or len(json.dumps(recorders)) > _HEALTH_BYTES:
        return None, before
    return {**run_health, "recorders": recorders}, before
