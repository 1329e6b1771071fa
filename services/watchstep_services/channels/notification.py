"""Notifications: a group of alerts as data that the outbox can hold, and as a CloudEvent 1.0 in structured mode."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from watchstep.errors import FormatError
from watchstep_rules.engine.incident import Explanation, IncidentSummary, phase_words
from watchstep_services.core.events import project_url, rfc3339, run_url

Status = Literal["firing", "resolved"]

OWN_LABELS = ("project", "run", "name", "rule", "severity")
"""Labels that every alert has. A rule config's own labels cannot replace them."""


def alert_labels(own: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    """The labels of an alert, which routes, silences and inhibition look at.

    Args:
        own: a value for each of `OWN_LABELS`.
        labels: the rule config's.
    """
    return {**labels, **{name: own[name] for name in OWN_LABELS}}


@dataclass(frozen=True, kw_only=True)
class NotifiedAlert:
    """One alert of a notification, as it stood when the notification was made.

    Attributes:
        name: the rule config's.
        rule: the rule's.
        severity: the rule config's.
        phase: ``firing`` or ``resolved``.
        attempt: of the run.
        step: at which it came into this phase.
        labels: as `alert_labels` makes them.
        message: one line or a few, for people.
        explanation: what was seen, where, and what usually causes it; None where nothing is held.
        fingerprint: the same for the same alert, whatever its phase.
        since_ns: since when its findings follow each other.
        fired_ns: when it fired.
        resolved_ns: when it was resolved; None while it fires.
        event_id: of the CloudEvent of its last change.
        acknowledged_by: who has taken it up; empty for nobody.
        incident: which incident it belongs to; None for none.
        url: the alert's page; empty if the service has no public URL.
    """

    name: str
    rule: str
    severity: str
    phase: str
    attempt: str
    step: int
    labels: Mapping[str, str]
    message: str
    explanation: Explanation | None = None
    fingerprint: str
    since_ns: int
    fired_ns: int | None = None
    resolved_ns: int | None = None
    event_id: str = ""
    acknowledged_by: str = ""
    incident: IncidentSummary | None = None
    url: str = ""

    @property
    def phase_words(self) -> str:
        """Its phase in words: ``firing: bad from step 253``, or ``resolved at step 300``."""
        bad_from = self.step if self.explanation is None else self.explanation.since_step
        return phase_words(self.phase, bad_from, self.step)


@dataclass(frozen=True, kw_only=True)
class Notification:
    """What one receiver is told at once.

    Attributes:
        id: stable over all tries; one that comes twice carries the same. At most 128 letters, digits, ``-``, ``_``, ``.``, ``:``.
        project: whose alerts.
        run: whose alerts; empty where they are of several runs.
        run_url: the run's page, or the project's where they are of several runs; empty if the service has no public URL.
        service_url: URL of the API, without a slash at its end.
        status: ``firing`` while any of the alerts fires.
        group_key: of the group, stable as long as it lives: the same for its first, repeated and last notification.
        group_labels: what the alerts of the group have in common by the route's ``group_by``.
        alerts: at least one, those that fire first.
        at_ns: when it was made, in nanoseconds since the epoch.
        repeat: how many times the group has been told before with nothing new in it; 0 for news.
    """

    id: str
    project: str
    run: str
    run_url: str
    service_url: str = ""
    status: Status
    group_key: str
    group_labels: Mapping[str, str] = field(default_factory=dict)
    alerts: tuple[NotifiedAlert, ...]
    at_ns: int
    repeat: int = 0

    def as_data(self) -> dict[str, Any]:
        """JSON-ready; `from_data` reads it back."""
        data: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return data

    @classmethod
    def from_data(cls, data: Any) -> Notification:
        """Read what `as_data` wrote.

        Raises:
            FormatError: it is something else.
        """
        try:
            return _ADAPTER.validate_python(data)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise FormatError(
                f"notification: {place}: {first['msg']}", "this is a fault of Watchstep; please report it"
            ) from error

    @property
    def url(self) -> str:
        """The page of the alert if there is only one, otherwise that of the run or the project; empty without a public URL."""
        return self.alerts[0].url if len(self.alerts) == 1 and self.alerts[0].url else self.run_url

    @property
    def page(self) -> str:
        """What ``url`` leads to: ``alert``, ``run`` or ``runs``."""
        if len(self.alerts) == 1 and self.alerts[0].url:
            return "alert"
        return "run" if self.run_url.rpartition("/")[0].endswith("/runs") else "runs"

    @property
    def source(self) -> str:
        """What the events are about, as an address on the API; it identifies the run, and is no link for people."""
        if self.run:
            return run_url(self.service_url, self.project, self.run)
        return project_url(self.service_url, self.project)

    @property
    def command(self) -> str:
        """What shows the alerts in a terminal, also where no page can be reached."""
        service = shlex.quote(self.service_url)
        if self.run:
            return f"watchstep runs alerts {self.project}/{self.run} --service {service}"
        return f"watchstep runs list --project {self.project} --service {service}"

    @property
    def firing(self) -> tuple[NotifiedAlert, ...]:
        """The alerts that fire."""
        return tuple(alert for alert in self.alerts if alert.phase == "firing")


_ADAPTER: TypeAdapter[Notification] = TypeAdapter(Notification)


def as_cloud_event(notification: Notification, title: str, text: str) -> dict[str, Any]:
    """The event, JSON-ready. Its id is the notification's: what comes twice carries the same."""
    subject = f"{notification.project}/{notification.run}" if notification.run else notification.project
    return {
        "specversion": "1.0",
        "id": notification.id,
        "source": notification.source,
        "type": f"io.watchstep.notification.{notification.status}",
        "subject": subject,
        "time": rfc3339(notification.at_ns),
        "datacontenttype": "application/json",
        "data": {**notification.as_data(), "title": title, "text": text},
    }


def within(event: dict[str, Any], limit: int) -> bytes:
    """The event in JSON, in so many bytes at most: explanations go first, then the last alerts, which are counted."""
    body = _encode(event)
    if len(body) <= limit:
        return body
    alerts = [{**alert, "explanation": None} for alert in event["data"]["alerts"]]
    kept = len(alerts)
    while len(body) > limit and kept:
        data = {**event["data"], "alerts": alerts[:kept], "left_out": len(alerts) - kept, "text": ""}
        body = _encode({**event, "data": data})
        kept = kept * 3 // 4
    return body


def _encode(event: dict[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")
