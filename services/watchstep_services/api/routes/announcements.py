"""Announcements: a recorder announces new segments on the store and receives the run's control document."""

from __future__ import annotations

import functools
import json

from fastapi import APIRouter, Response

from watchstep.errors import ConfigError
from watchstep.format.layout import SegmentKey, WriterId, check_name, run_prefix
from watchstep_services.api.lookup import unknown_run
from watchstep_services.api.middleware.access import Served, permits
from watchstep_services.api.middleware.fast_route import FastRoute
from watchstep_services.api.schemas.models import (
    AnnouncedSegment,
    AnnouncementInput,
    AnnouncementResponse,
    ControlData,
)
from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.core.telemetry import metrics
from watchstep_services.runs.announcements import Announcement, accept_announcement

router = APIRouter(
    prefix="/v1/projects/{project}/runs/{run}/announcements", tags=["recording"], route_class=FastRoute
)

_LAGS_SECONDS = 1.0
_LONGEST_PAUSE = 10.0
_CACHED_CHARACTERS = 4096
"""Longest control document with a cached answer. Almost all are shorter."""


def pause_seconds(lag_ns: int) -> float:
    """Return the pause that a recorder is requested to leave between announcements.

    The pause is 0 if the run has waited less than a second for its evaluation, and twice the waiting time otherwise, so that
    recorders send fewer and larger segments while the service catches up.

    Args:
        lag_ns: time for which the run has waited for its evaluation.
    """
    lag = lag_ns / NANOSECONDS
    return 0.0 if lag < _LAGS_SECONDS else min(_LONGEST_PAUSE, 2 * lag)


@router.post(
    "",
    summary="Announce segments",
    response_model=AnnouncementResponse,
    responses={
        202: {"model": AnnouncementResponse, "description": "Some were ignored, because too many wait."}
    },
)
@permits("record", any_text=True)  # a refused announcement would delay alerts
def announce(project: str, run: str, body: AnnouncementInput, service: Served) -> Response:
    """Add segments to the inbox. The service reads their content from the store only. Archived projects accept no segments.

    Segments are ignored if too many of the run or of the project wait for their evaluation; the service finds them on the store.
    """
    run_prefix(project, run)
    announcement = Announcement(_keys(body), body.health, body.urgent)
    failpoint("announce.accepting", f"{project}/{run}")
    accepted = accept_announcement(service.database, service.waiting_room, project, run, announcement)
    if accepted is None:
        raise unknown_run(project, run)
    failpoint("announce.accepted", accepted.run_id)
    metrics.ANNOUNCEMENTS.labels("fresh").inc(accepted.fresh)
    metrics.ANNOUNCEMENTS.labels("known").inc(len(announcement.keys) - accepted.fresh - accepted.ignored)
    metrics.ANNOUNCEMENTS.labels("ignored").inc(accepted.ignored)
    if body.health:
        metrics.count_recorder_report(accepted.health_before, body.health)
    if accepted.fresh and accepted.lag_ns is None:  # otherwise an earlier announcement has queued the run
        service.notifier.run_changed(accepted.run_id, accepted.cached_by)
    control = accepted.control
    pause = _LONGEST_PAUSE if accepted.ignored else pause_seconds(accepted.lag_ns or 0)
    answer = _cached_answer(control) if len(control) <= _CACHED_CHARACTERS else _control_answer(control)
    evaluated = "true" if accepted.evaluated else "false"
    # The control document is in every answer, so that a recorder that announces too much receives a stop, too.
    return Response(
        f'{{"control":{answer},"pause_seconds":{pause},"evaluated":{evaluated},"ignored":{accepted.ignored}}}',
        202 if accepted.ignored else 200,
        media_type="application/json",
    )


def _keys(body: AnnouncementInput) -> list[SegmentKey]:
    """Return the announced segments, each once, built from validated parts: a recorder does not choose the key.

    Raises:
        BadNameError: a name is not valid.
        ConfigError: a range of steps is empty.
    """
    attempt = check_name("attempt", body.attempt)
    writers = {
        (segment.node, segment.writer): WriterId(
            attempt, check_name("node", segment.node), check_name("writer", segment.writer)
        )
        for segment in body.segments
    }
    keys = {}
    for segment in body.segments:
        keys[segment.node, segment.writer, segment.seq] = _key(writers[segment.node, segment.writer], segment)
    return list(keys.values())


def _key(writer: WriterId, segment: AnnouncedSegment) -> SegmentKey:
    if segment.first > segment.last:
        raise ConfigError(
            f"steps {segment.first} to {segment.last}: the range is empty",
            "announce the first and the last step",
        )
    return SegmentKey(writer, segment.seq, segment.first, segment.last)


def _control_answer(control: str) -> str:
    """Return a control document as the response contains it, serialized here, because FastAPI would validate it a second time."""
    return ControlData.model_validate(json.loads(control)).model_dump_json()


# The documents of most runs are equal, and that of one run seldom changes.
_cached_answer = functools.lru_cache(maxsize=1024)(_control_answer)
