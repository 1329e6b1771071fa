"""What a stop tells of the way back: the job that was stopped, and the last checkpoint before the bad step."""

from __future__ import annotations

import logging
from typing import Any

from sqlalchemy import select

from watchstep.format.checkpoints import last_good
from watchstep_services.database.models import Event
from watchstep_services.dispatcher.outbox import DueAction
from watchstep_services.dispatcher.target import REFUSED, Target, at_store
from watchstep_services.service import Service

_log = logging.getLogger(__name__)


def told(service: Service, due: DueAction, target: Target) -> dict[str, Any]:
    """``job``, the ``step`` and ``tensor`` that were bad, where an alert asked, and the ``last_good_checkpoint``, or None."""
    finding = _finding(service, due)
    facts: dict[str, Any] = {
        name: finding[name] for name in ("step", "tensor") if finding.get(name) is not None
    }
    if target.job is not None:
        facts["job"] = f"{target.job.backend}:{target.job.id}"
    try:
        found = at_store(service, target, lambda run_store: last_good(run_store, facts.get("step")))
    except REFUSED as error:
        _log.warning(
            "run %s/%s: its checkpoints are not known: %s", target.run.project, target.run.run, error.what
        )
        found = None
    return {**facts, "last_good_checkpoint": None if found is None else found.as_data()}


def _finding(service: Service, due: DueAction) -> dict[str, Any]:
    """Of the alert that asked for the stop; empty where people did."""
    cause = str(due.payload["cause"])
    with service.database.read() as session:
        event = session.execute(
            select(Event.event).filter_by(run_id=due.run_id, id=cause)
        ).scalar_one_or_none()
    finding = {} if event is None else event["data"].get("finding")
    return dict(finding) if isinstance(finding, dict) else {}
