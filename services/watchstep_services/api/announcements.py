"""Announcements: a recorder says which segment lies on the store, and is told what is asked of it."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter
from sqlalchemy import update

from watchstep.errors import ConfigError
from watchstep.layout import SegmentKey, WriterId, check_name
from watchstep_services import metrics
from watchstep_services.api.access import Served, permits
from watchstep_services.api.lookup import find_open_run
from watchstep_services.api.models import Announced, AnnouncementInput, ControlData
from watchstep_services.database.clock import read_clock
from watchstep_services.database.models import Run
from watchstep_services.database.records import hint, put_segment
from watchstep_services.points import reach
from watchstep_services.settings import NANOSECONDS

router = APIRouter(prefix="/v1/projects/{project}/runs/{run}/announcements", tags=["recording"])

_WRITERS_WITH_HEALTH = 1024
_HEALTH_BYTES = 1024 * 1024  # of all writers of a run: its row is read whenever the run is looked at
_LAGS_SECONDS = 1.0
_LONGEST_PAUSE = 10.0


def pause_seconds(lag_ns: int) -> float:
    """How long a recorder is asked to leave between announcements: nothing until its run has waited for a second.

    Then twice as long as it waits, so that fewer and larger segments come while the service catches up.

    Args:
        lag_ns: how long the run has been waiting for its evaluation.
    """
    lag = lag_ns / NANOSECONDS
    return 0.0 if lag < _LAGS_SECONDS else min(_LONGEST_PAUSE, 2 * lag)


@router.post("", summary="Announce a segment")
@permits("record")
def announce(project: str, run: str, body: AnnouncementInput, service: Served) -> Announced:
    """Put a segment into the inbox. Whether it exists, and what it holds, only the store says. Archived projects take none."""
    # The key is made here from checked parts; a recorder names no key.
    writer = WriterId(
        check_name("attempt", body.attempt), check_name("node", body.node), check_name("writer", body.writer)
    )
    if body.first > body.last:
        raise ConfigError(f"steps {body.first} to {body.last}: none", "announce the first and the last step")
    key = SegmentKey(writer, body.seq, body.first, body.last)
    with service.database.write() as session:
        row = find_open_run(session, project, run)
        now = read_clock(session)
        waiting = row.due_ns is not None and row.due_ns <= now
        pause = pause_seconds(now - (row.due_ns or now) if waiting else 0)
        said: dict[str, Any] = {"heard_ns": now}
        if row.quiet_ns:
            said["look_ns"] = now + row.quiet_ns
        before = None
        if body.health:
            held = dict(row.health.get("recorders", {}))
            before = held.get(f"{writer.node}/{writer.writer}", {})
            held[f"{writer.node}/{writer.writer}"] = body.health
            if len(held) <= _WRITERS_WITH_HEALTH and len(json.dumps(held)) <= _HEALTH_BYTES:
                said["health"] = {**row.health, "recorders": held}
        fresh = put_segment(session, row.id, key, now)
        if fresh:
            hint(session, row.id, asked=True, also=said)
        else:
            session.execute(
                update(Run)
                .where(Run.id == row.id)
                .values(**said)
                .execution_options(synchronize_session=False)
            )
        reach("announce.accepting", row.id)
        run_id, control, holder = row.id, row.control, row.holder
    reach("announce.accepted", run_id)
    metrics.ANNOUNCEMENTS.labels("fresh" if fresh else "known").inc()
    if before is not None:
        metrics.recorder_said(before, body.health)
    if fresh and not waiting:  # else it stands in the line already, by an earlier message
        service.notifier.run_changed(run_id, holder)
    return Announced(control=ControlData.model_validate(control), pause_seconds=pause)
