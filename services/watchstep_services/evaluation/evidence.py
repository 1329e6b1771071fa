"""Evidence of an alert: its fingerprint on every attempt of its run, and the objects that hold the figures of a step."""

from __future__ import annotations

import hashlib
import json
import shlex
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.format.layout import run_prefix
from watchstep_services.db.models import RuleConfigRow, Segment
from watchstep_services.db.models.alert_life import FINGERPRINT_LENGTH
from watchstep_services.runs.claim import EventContext
from watchstep_services.runs.discovery import key_of

RECORDER = "recorder"


def fingerprint(project: str, run: str, row: RuleConfigRow) -> str:
    """A stable name of the alert of a rule config on a run: by project, run, the config's name and its labels.

    What a recorder asks for is never the same as an alert of the owner's or an operator's: it could keep that one from being
    told of.
    """
    labels: dict[str, Any] = (row.data or {}).get("labels") or {}
    named = [project, run, row.name, row.origin == RECORDER, sorted(labels.items())]
    text = json.dumps(named, separators=(",", ":")).encode()
    return hashlib.sha256(text).hexdigest()[:FINGERPRINT_LENGTH]


MOST_SEGMENTS = 16


def evidence_of(session: Session, place: EventContext, step: int) -> dict[str, Any]:
    """The run's place on the store, the step, the segments that hold it, and what shows the run from there."""
    rows = session.execute(
        select(Segment)
        .where(
            Segment.run_id == place.run_id,
            Segment.attempt == place.attempt,
            Segment.first <= step,
            Segment.last >= step,
            Segment.state == "read",
        )
        .order_by(Segment.position)
        .limit(MOST_SEGMENTS)
    ).scalars()
    root = f"{place.location}/{run_prefix(place.project, place.run)}"
    return {
        "store": root,
        "step": step,
        "segments": [key_of(row).path for row in rows],
        "command": f"watchstep runs show {shlex.quote(root)}",
    }
