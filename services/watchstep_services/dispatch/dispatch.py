"""Dispatch: claim one due action of the outbox, try it with no transaction open, and record the result.

The module also contains the metrics, log fields and spans of a try, and the webhooks that a rule config names.
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
from watchstep_services.notify.directory import egress_policy_of
from watchstep_services.notify.flush import NOTIFY, try_notify
from watchstep_services.runs.control import MIRROR, try_mirror
from watchstep_services.runs.lifecycle import ENDED
from watchstep_services.runs.stops import Subject, note
from watchstep_services.service.context import Service

_LONGEST = 500

_log = logging.getLogger(__name__)


class TryObservation:
    """Telemetry of one try in progress."""

    def __init__(self, due: DueAction, span: tracing.Spanned) -> None:
        self._due = due
        self._span = span

    def finished(self, result: AttemptResult) -> None:
        """Record the result in metrics, the log and the span; a try that only polled is not recorded."""
        if result.result == "waiting":
            self._span.drop()
            return
        metrics.ACTION_TRIES.labels(self._due.kind, result.result).inc()
        if result.result == "done" and self._due.kind in {"webhook", "notify"} and self._due.after_unknown:
            metrics.DUPLICATES.labels(self._due.kind).inc()
        self._span.annotate(outcome=result.result, stage=result.stage)
        if result.result in {"error", "failed"}:
            self._span.fail(result.result)  # without the detail, which may quote the receiver
            _log.warning("%s not done: %s", self._due.kind, result.detail[:_LONGEST])
        else:
            _log.info("%s %s", self._due.kind, result.result)


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
    """Count a try with an action that another worker claimed before it was recorded."""
    metrics.LEASES_LOST.labels("action").inc()


def try_webhook(service: Service, due: DueAction) -> AttemptResult:
    """Post the event once. The receiver recognizes a repeated event by its id.

    Redirects are not followed, and addresses that are not public are refused, as for receivers. The request is not signed;
    requests to a receiver of kind ``webhook`` are.
    """
    event = due.payload["event"]
    body = json.dumps(event).encode()
    delivery = DeliveryContext(
        egress_policy_of(service.settings, due.project), service.settings.webhook_seconds, due.now_ns
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
"""Kinds of actions that notify receivers."""

_LONGEST_BACKOFF = 300.0
_LONGEST_MIRROR_BACKOFF = 30.0
"""Shorter, because a cluster may restart the job before the tombstone is on the store."""
_MOST_DOUBLINGS = 30
_FINAL = {"done", "skipped", "failed"}


def due_actions(service: Service, limit: int = 100) -> list[int]:
    """Ids of due actions: first actions on runs, then notifications, up to the limit of each, longest due first.

    Stops do not wait for notifications, however many receivers do not answer. The first notification of each project
    precedes the second of any project.
    """
    is_due = (ACTION_LEASE.is_free(),)
    on_runs = (
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
        return [*session.execute(on_runs).scalars(), *session.execute(posts_due).scalars()]


def posts_of(service: Service, action_ids: Collection[int]) -> dict[int, DeliveryKey]:
    """The receivers of actions, with one query; actions without a receiver are left out."""
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
    """The project of an action; empty if there is no such action."""
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

    A failed try is recorded and retried later, so that it does not block other actions.

    Returns:
        The result; None if the action is not due or another worker has claimed it.
    """
    failpoint("dispatch.claiming", action_id)
    due = _claim(service, action_id)
    if due is None:
        return None
    failpoint("dispatch.claimed", due)
    with observing_try(due) as observation:
        result = _try(service, due)
        observation.finished(result)
    failpoint("dispatch.sent", due)
    _record(service, due, result)
    failpoint("dispatch.recorded", due)
    return result


def _try(service: Service, due: DueAction) -> AttemptResult:
    try:
        return _KINDS[due.kind](service, due)
    except WatchstepError as error:
        return AttemptResult("error", f"{error.what} ({error.hint})", due.stage)
    except Exception as error:  # noqa: BLE001 - recorded with the action; it must not block other actions
        _log.exception("action %d (%s) failed", due.id, due.kind)
        return AttemptResult("error", f"{type(error).__name__}: {error}", due.stage)


def _claim(service: Service, action_id: int) -> DueAction | None:
    settings = service.settings
    post_seconds = settings.lease_seconds + settings.webhook_seconds + settings.picture_seconds
    lease = case(
        (ActionRow.kind.in_(POSTS), nanoseconds(post_seconds)),
        else_=nanoseconds(settings.lease_seconds),
    )
    with service.database.write() as session:
        # The action is not due again until the try is recorded or, if this process dies, its lease expires.
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


def _record(service: Service, due: DueAction, result: AttemptResult) -> None:
    with service.database.write() as session:
        row = ACTION_LEASE.lock(session, due.id, due.claims)
        if row is None or row.state != "pending":
            count_lost_lease()
            return  # the lease expired and another worker has claimed the action
        now = read_clock(session)
        if result.result == "waiting":
            row.next_ns = result.after_ns
            return
        row.tries += 1
        session.add(
            ActionTry(
                action_id=row.id,
                number=row.tries,
                at_ns=now,
                outcome=result.result,
                detail=result.detail[:4000],
            )
        )
        row.outcome = result.detail[:4000]
        # A failed try has not advanced the stage; a stage that it committed itself remains.
        if result.stage != row.stage and (result.result != "error" or result.stage != due.stage):
            row.stage, row.stage_since_ns = int(result.stage), now
        if result.result == "advanced":
            row.next_ns = result.after_ns
        elif result.result == "error" and (
            row.tries < service.settings.max_tries or _must_go_on(session, row)
        ):
            doubled = 2.0 ** min(row.tries - 1, _MOST_DOUBLINGS)
            longest = _LONGEST_MIRROR_BACKOFF if row.kind == MIRROR else _LONGEST_BACKOFF
            pause = min(longest, service.settings.retry_seconds * doubled)
            row.next_ns = max(
                now + nanoseconds(pause), result.after_ns
            )  # a receiver may request a longer pause
        else:
            row.state = result.result if result.result in _FINAL else "failed"
            row.finished_ns = now
        if row.kind == "stop":
            _audit(session, row, result, now)
        if result.facts is not None:
            _publish_stop_done(service, session, row, result)
        failpoint("dispatch.writing", due)


def _must_go_on(session: Session, row: ActionRow) -> bool:
    """Whether an action is retried without limit: a stop while its attempt runs, and a tombstone that is not on the store.

    Without the tombstone, a stopped run could start again.
    """
    if row.kind not in ("stop", MIRROR):
        return False
    run = session.get_one(RunRow, row.run_id)
    if row.kind == MIRROR:
        return bool(ControlDocument.from_data(run.control).tombstone)
    return run.attempt == row.payload["attempt"] and run.state not in ENDED


def _audit(session: Session, row: ActionRow, result: AttemptResult, now: int) -> None:
    """Record each try of a stop, and its end, in the audit log, which outlives the run."""
    run = session.get_one(RunRow, row.run_id)
    subject = Subject(run.project, run.run, str(row.payload["attempt"]))
    entry = {
        "number": row.tries,
        "outcome": result.result,
        "stage": row.stage,
        "detail": result.detail[:4000],
    }
    note(session, "tried", subject, "the service", now, entry)
    if row.state != "pending":
        ended = {
            "state": row.state,
            "tries": row.tries,
            "detail": result.detail[:4000],
            "requested_ns": row.created_ns,
            **(result.facts or {}),
        }
        note(session, "ended", subject, "the service", now, ended)


def _publish_stop_done(service: Service, session: Session, row: ActionRow, result: AttemptResult) -> None:
    run = session.get_one(RunRow, row.run_id)
    now = read_clock(session)
    data = {
        **(result.facts or {}),
        "attempt": row.payload["attempt"],
        "reason": row.payload["reason"],
        "cause": row.payload["cause"],
        "detail": result.detail,
        "requested_ns": row.created_ns,
        "done_ns": now,
    }
    event = make_event("io.watchstep.stop.done", service.base_url, (run.project, run.run), now, data)
    add_event(session, run.id, event, now)
