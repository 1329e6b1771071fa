"""What a recording does about its control document."""

from __future__ import annotations

from watchstep.capture.session import Session
from watchstep.capture.stop_talk import StopTalk
from watchstep.control import ControlDocument, StopRequest


def obey(session: Session, stop_talk: StopTalk, document: ControlDocument, attempt: str) -> None:
    """Take over what a newer document asks of an attempt. On whatever thread heard of it; never waits."""
    if document.stop is not None and document.stop.attempt == attempt:
        stop_talk.hear(document.stop, attempt)
    elif not document.admits(attempt):
        session.recorder.ask_to_stop(
            StopRequest(attempt, 0, f"this run was stopped before: {document.tombstone}"), refused=True
        )
    session.schedule.override(dict(document.cadence))
    asked = [session.snapshots.request(one.id, one.step) for one in document.asked_of(attempt)]
    if document.stop is not None or document.tombstone or any(asked):
        session.snapshot_writer.protect()
