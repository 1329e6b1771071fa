"""Dispatch: claim one due action of the outbox, try it with no transaction open, and record the result.

The metrics, log fields and spans of a try, and webhooks that a rule config names, are part of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from watchstep.errors import WatchstepError
from watchstep.format.control import ControlDocument
from watchstep_services.channels.delivery import DeliveryContext, try_post
from watchstep_services.channels.webhook import webhook_headers
from watchstep_services.core.due_action import AttemptResult, DeliveryKey, DueAction
from watchstep_services.core.egress import AddressRefusedError, parse_address
from watchstep_services.core.events import make_event
from watchstep_services.core.failpoints import failpoint
from watchstep_services.core.settings import nanoseconds
from watchstep_services.core.telemetry import logs, metrics, tracing
from watchstep_services.db.clock import read_clock
from watchstep_services.db.lease import ACTION_LEASE
from watchstep_services.db.models import ActionRow, ActionTry, RunRow
from watchstep_services.db.records import add_event
from watchstep_services.dispatch.stop import try_stop
from watchstep_services.notify.directory import reach_of
from watchstep_services.notify.flush import NOTIFY, try_notify
from watchstep_services.runs.control import MIRROR, try_mirror
from watchstep_services.runs.lifecycle import ENDED
from watchstep_services.runs.stops import Subject, note
from watchstep_services.service.context import Service

_LONGEST = 500

_log = logging.getLogger(__name__)


class TryObservation:
    """One try as it goes on."""

    def __init__(self, due: DueAction, span: tracing.Spanned) -> None:
        self._due = due
        self._span = span

    def finished(self, tried: AttemptResult) -> None:
        """Record the result in metrics, the log and the span; a try that only waited is not recorded."""
        if tried.result == "waiting":
            self._span.drop()
            return
        metrics.ACTION_TRIES.labels(self._due.kind, tried.result).inc()
        if tried.result == "done" and self._due.kind in {"webhook", "notify"} and self._due.after_unknown:
            metrics.DUPLICATES.labels(self._due.kind).inc()
        self._span.say(outcome=tried.result, stage=tried.stage)
        if tried.result in {"error", "failed"}:
            self._span.fail(tried.result)  # the detail may hold what the receiver said
            _log.warning("%s not done: %s", self._due.kind, tried.detail[:_LONGEST])
        else:
            _log.info("%s %s", self._due.kind, tried.result)


@contextmanager
def observing_try(due: DueAction) -> Iterator[TryObservation]:
    """Observe a try; its span belongs to the trace of the event that caused the action."""
    attempt = str(due.payload["attempt"]) if "attempt" in due.payload else None
    named: dict[str, str | int] = {
        "action": due.id,
        "try": due.tries + 1,
        "project": due.project,
        "run": due.run,
    }
    with (
        logs.fields(project=due.project, run=due.run, attempt=attempt, action=due.id),
        tracing.span(f"watchstep.{due.kind}", due.traceparent, named) as span,
    ):
        yield TryObservation(due, span)


def count_lost_lease() -> None:
    """Count a try whose action another worker claimed before it was recorded."""
    metrics.LEASES_LOST.labels("action").inc()


def try_webhook(service: Service, due: DueAction) -> AttemptResult:
    """Post the event once; the receiver knows a repeated one by its id.

    Redirects are not followed, and addresses that are not public are refused, as of receivers. It is not signed: a receiver
    of kind ``webhook`` is.
    """
    event = due.payload["event"]
    body = json.dumps(event).encode()
    delivery = DeliveryContext(
        reach_of(service.settings, due.project), service.settings.webhook_seconds, due.now_ns
    )
    try:
        address = parse_address(str(due.payload["url"]))
        headers = webhook_headers(str(event["id"]), due.now_ns, body, [])
        return try_post(delivery, address, headers, body)
    except ValueError as error:
        return AttemptResult("failed", f"the address cannot be used: {error}")
    except AddressRefusedError as error:
        return AttemptResult("failed", f"{error.what} ({error.hint})")


_KINDS = {"stop": try_stop, MIRROR: try_mirror, "webhook": try_webhook, NOTIFY: try_notify}
POSTS = ("webhook", NOTIFY)
"""Kinds of actions that notify people."""

_LONGEST_BACKOFF = 300.0
_LONGEST_MIRROR_BACKOFF = 30.0
"""A tombstone is to be on a store soon after that answers again: a cluster may start the job again meanwhile."""
_MOST_DOUBLINGS = 30
_FINAL = {"done", "skipped", "failed"}


def due_actions(service: Service, limit: int = 100) -> list[int]:
    """Ids of actions that are due: what runs are asked for, and then so many of what people are told, each the longest due first.

    However many receivers do not answer, no stop waits behind what they are to be told. Of what people are told the first of each
    project comes before the second of any.
    """
    is_due = (ACTION_LEASE.is_free(),)
    asked = (
        select(ActionRow.id)
        .where(*is_due, ActionRow.kind.not_in(POSTS))
        .order_by(ActionRow.next_ns)
        .limit(limit)
    )
    turn = func.row_number().over(partition_by=RunRow.project, order_by=(ActionRow.next_ns, ActionRow.id))
    posts = (
        select(ActionRow.id, ActionRow.next_ns, turn.label("turn"))
        .join(RunRow, RunRow.id == ActionRow.run_id)
        .where(*is_due, ActionRow.kind.in_(POSTS))
        .subquery()
    )
    posts_due = select(posts.c.id).order_by(posts.c.turn, posts.c.next_ns, posts.c.id).limit(limit)
    with service.database.read() as session:
        return [*session.execute(asked).scalars(), *session.execute(posts_due).scalars()]


def posts_of(service: Service, action_ids: Collection[int]) -> dict[int, DeliveryKey]:
    """The receivers of actions; actions without one are left out. One query for all."""
    if not action_ids:
        return {}
    with service.database.read() as session:
        rows = session.execute(
            select(ActionRow.id, ActionRow.payload, RunRow.project)
            .join(RunRow, RunRow.id == ActionRow.run_id)
            .where(ActionRow.id.in_(action_ids), ActionRow.kind.in_(POSTS))
        ).all()
    return {row.id: DeliveryKey(row.project, _receiver_in(row.payload)) for row in rows}


def project_of(service: Service, action_id: int) -> str:
    """The project of an action; empty where there is none."""
    with service.database.read() as session:
        of = (
            select(RunRow.project)
            .join(ActionRow, ActionRow.run_id == RunRow.id)
            .where(ActionRow.id == action_id)
        )
        return session.execute(of).scalar_one_or_none() or ""


def _receiver_in(payload: Mapping[str, Any]) -> str:
    return str(payload.get("receiver") or urlsplit(str(payload.get("url", ""))).netloc)


def next_due_ns(service: Service) -> int | None:
    """Nanoseconds until the next pending action is due, negative if it is overdue; None for none."""
    with service.database.read() as session:
        first = session.execute(
            select(func.min(ActionRow.next_ns)).where(ActionRow.state == "pending")
        ).scalar_one()
        return None if first is None else int(first) - read_clock(session)


def dispatch(service: Service, action_id: int) -> AttemptResult | None:
    """Try an action once.

    A try that fails in any way is recorded and tried again later, so that it blocks no other.

    Returns:
        What came of it; None where it is not due or another worker has it.
    """
    failpoint("dispatch.claiming", action_id)
    due = _claim(service, action_id)
    if due is None:
        return None
    failpoint("dispatch.claimed", due)
    with observing_try(due) as seen:
        tried = _try(service, due)
        seen.finished(tried)
    failpoint("dispatch.sent", due)
    _record(service, due, tried)
    failpoint("dispatch.recorded", due)
    return tried


def _try(service: Service, due: DueAction) -> AttemptResult:
    try:
        return _KINDS[due.kind](service, due)
    except WatchstepError as error:
        return AttemptResult("error", f"{error.what} ({error.hint})", due.stage)
    except Exception as error:  # noqa: BLE001 - told with the action; it must not keep others from their turn
        _log.exception("action %d (%s) failed", due.id, due.kind)
        return AttemptResult("error", f"{type(error).__name__}: {error}", due.stage)


def _claim(service: Service, action_id: int) -> DueAction | None:
    settings = service.settings
    lease = case(
        (ActionRow.kind.in_(POSTS), nanoseconds(settings.lease_seconds + settings.webhook_seconds)),
        else_=nanoseconds(settings.lease_seconds),
    )
    with service.database.write() as session:
        # Until the try is recorded the action is not due again; if this process dies, it is when the lease ends.
        token = ACTION_LEASE.claim(session, action_id, lease)
        if token is None:
            return None
        row = session.get_one(ActionRow, action_id)
        run = session.get_one(RunRow, row.run_id)
        return DueAction(
            id=row.id,
            run_id=row.run_id,
            event_id=row.event_id,
            kind=row.kind,
            payload=row.payload,
            stage=row.stage,
            stage_since_ns=row.stage_since_ns,
            tries=row.tries,
            claims=token,
            now_ns=read_clock(session),
            traceparent=row.traceparent,
            project=run.project,
            run=run.run,
        )


def _record(service: Service, due: DueAction, tried: AttemptResult) -> None:
    with service.database.write() as session:
        row = ACTION_LEASE.lock(session, due.id, due.claims)
        if row is None or row.state != "pending":
            count_lost_lease()
            return  # the lease ended and another worker has gone on from here
        now = read_clock(session)
        if tried.result == "waiting":
            row.next_ns = tried.after_ns
            return
        row.tries += 1
        session.add(
            ActionTry(
                action_id=row.id,
                number=row.tries,
                at_ns=now,
                outcome=tried.result,
                detail=tried.detail[:4000],
            )
        )
        row.outcome = tried.detail[:4000]
        # A try that fails has not moved the stage: one that it has committed itself stays.
        if tried.stage != row.stage and (tried.result != "error" or tried.stage != due.stage):
            row.stage, row.stage_since_ns = tried.stage, now
        if tried.result == "advanced":
            row.next_ns = tried.after_ns
        elif tried.result == "error" and (
            row.tries < service.settings.max_tries or _must_go_on(session, row)
        ):
            doubled = 2.0 ** min(row.tries - 1, _MOST_DOUBLINGS)
            longest = _LONGEST_MIRROR_BACKOFF if row.kind == MIRROR else _LONGEST_BACKOFF
            pause = min(longest, service.settings.retry_seconds * doubled)
            row.next_ns = max(now + nanoseconds(pause), tried.after_ns)  # a receiver may ask for longer
        else:
            row.state = tried.result if tried.result in _FINAL else "failed"
            row.finished_ns = now
        if row.kind == "stop":
            _audit(session, row, tried, now)
        if tried.facts is not None:
            _publish_stop_done(service, session, row, tried)
        failpoint("dispatch.writing", due)


def _must_go_on(session: Session, row: ActionRow) -> bool:
    """Whether an action is retried without limit. A stop is, while its attempt goes on.

    Nor is a tombstone on its way to the store: what was stopped stays stopped.
    """
    if row.kind not in ("stop", MIRROR):
        return False
    run = session.get_one(RunRow, row.run_id)
    if row.kind == MIRROR:
        return bool(ControlDocument.from_data(run.control).tombstone)
    return run.attempt == row.payload["attempt"] and run.state not in ENDED


def _audit(session: Session, row: ActionRow, tried: AttemptResult, now: int) -> None:
    """Each try of a stop, and how it ended, in the log that outlives the run."""
    run = session.get_one(RunRow, row.run_id)
    subject = Subject(run.project, run.run, str(row.payload["attempt"]))
    entry = {"number": row.tries, "outcome": tried.result, "stage": row.stage, "detail": tried.detail[:4000]}
    note(session, "tried", subject, "the service", now, entry)
    if row.state != "pending":
        ended = {
            "state": row.state,
            "tries": row.tries,
            "detail": tried.detail[:4000],
            "requested_ns": row.created_ns,
            **(tried.facts or {}),
        }
        note(session, "ended", subject, "the service", now, ended)


def _publish_stop_done(service: Service, session: Session, row: ActionRow, tried: AttemptResult) -> None:
    run = session.get_one(RunRow, row.run_id)
    now = read_clock(session)
    data = {
        **(tried.facts or {}),
        "attempt": row.payload["attempt"],
        "reason": row.payload["reason"],
        "cause": row.payload["cause"],
        "detail": tried.detail,
        "requested_ns": row.created_ns,
        "done_ns": now,
    }
    event = make_event("watchstep.stop.done", service.base_url, (run.project, run.run), now, data)
    add_event(session, run.id, event, now)
