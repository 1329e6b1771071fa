"""Which objects hold the figures of a step, and where they lie."""

from __future__ import annotations

import shlex
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.format.layout import run_prefix
from watchstep_services.database.models import Segment
from watchstep_services.evaluator.discover import key_of
from watchstep_services.evaluator.place import Place

MOST_SEGMENTS = 16


def evidence_of(session: Session, place: Place, step: int) -> dict[str, Any]:
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
