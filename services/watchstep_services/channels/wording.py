"""Rendering of notifications: a title and a text, by the receiver's templates or the default ones.

A template is text with ``{field}`` placeholders, which are looked up by name (`watchstep_rules.config.rule_config`). It has no
code, loops or attributes, so its length and time are bounded by its fields. The text for each alert is a template of its own, and
replaces ``{alerts}`` in the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from watchstep_rules.config import rule_config
from watchstep_services.channels.notification import Notification, NotifiedAlert

MOST_TITLE = 250
MOST_TEXT = 20_000
MOST_ALERTS = 50
"""Limit of alerts in the text; the rest are counted."""

ALERT_FIELDS: dict[str, str] = {
    "name": "the rule config's name",
    "rule": "the rule",
    "severity": "the rule config's severity",
    "phase": "firing or resolved",
    "attempt": "the attempt",
    "step": "the step of the change",
    "message": "the rule config's own message, or the finding's",
    "title": "rule, severity and step in one line",
    "seen": "what was seen",
    "where": "the tensor, its module, the rank",
    "against": "the value, and the value that it was compared with",
    "since": "since when",
    "causes": "what usually causes it",
    "try": "what to try",
    "acknowledged_by": "who has acknowledged it",
    "alert_url": "the alert's page; empty if the service has no public URL",
}
"""Fields of the template for one alert, in addition to ``{label.NAME}``; in title and text they are the first alert's."""

FIELDS: dict[str, str] = {
    "project": "the project",
    "run": "the run's id; empty if the alerts are of several runs",
    "url": "the page of the alert, or of the run if there are several alerts; empty if the service has no public URL",
    "run_url": "the page of the run, or of the project if the alerts are of several runs; empty if the service has no public URL",
    "command": "a command that shows the alerts in a terminal",
    "status": "firing or resolved",
    "STATUS": "FIRING or RESOLVED",
    "count": "the number of alerts",
    "firing": "the number of firing alerts",
    "repeat": "the number of earlier notifications without changes",
    "more": "', and N more' if there are other alerts than the first, otherwise empty",
    **ALERT_FIELDS,
}
"""Fields of a title."""

TEXT_FIELDS = {
    **FIELDS,
    "alerts": "all alerts, each by the template for one",
    "incidents": "each incident of several alerts: the likeliest cause, what to check first, which rules did not fire",
}
"""Fields of a text."""

DEFAULT_TITLE = "[{STATUS}] {name} ({severity}) {project}/{run}{more}"
DEFAULT_TEXT = "{incidents}\n\n{alerts}\n\n{command}\n{url}"
DEFAULT_ALERT = (
    "{title}\n  message {message}\n  seen    {seen}\n  where   {where}\n  against {against}\n  since   {since}\n"
    "  usually {causes}\n  try     {try}"
)


@dataclass(frozen=True)
class Templates:
    """A receiver's own templates; None for the default."""

    title: str | None = None
    text: str | None = None
    alert: str | None = None


def check_title(text: str) -> str:
    """Check a title's template; return it.

    Raises:
        ValueError: a field is unknown.
    """
    return _checked(text, FIELDS)


def check_text(text: str) -> str:
    """Check a text's template; return it.

    Raises:
        ValueError: a field is unknown.
    """
    return _checked(text, TEXT_FIELDS)


def check_alert(text: str) -> str:
    """Check the template for one alert; return it.

    Raises:
        ValueError: a field is unknown.
    """
    return _checked(text, ALERT_FIELDS)


def render(notification: Notification, templates: Templates) -> tuple[str, str]:
    """Render title and text. The title has one line; neither has control characters."""
    shared = _values(notification)
    title = rule_config.fill(templates.title or DEFAULT_TITLE, shared, MOST_TITLE)
    alert_template = templates.alert or DEFAULT_ALERT
    alerts = [
        rule_config.fill(alert_template, _of_alert(alert)) for alert in notification.alerts[:MOST_ALERTS]
    ]
    left = len(notification.alerts) - len(alerts)
    alerts += [f"and {left} more"] if left else []
    values = {
        **shared,
        "alerts": "\n\n".join(alerts)[:MOST_TEXT],
        "incidents": _incidents(notification)[:MOST_TEXT],
    }
    text = rule_config.fill(templates.text or DEFAULT_TEXT, values, MOST_TEXT)
    return " ".join(plain(title).split()), plain(text).strip()


def _checked(text: str, fields: Mapping[str, str]) -> str:
    rule_config.check(text, None, fields)
    return text


def _values(notification: Notification) -> dict[str, str]:
    first = notification.alerts[0]
    more = len(notification.alerts) - 1
    return {
        **_of_alert(first),
        "project": notification.project,
        "run": notification.run,
        "url": notification.url,
        "run_url": notification.run_url,
        "command": notification.command,
        "status": notification.status,
        "STATUS": notification.status.upper(),
        "count": str(len(notification.alerts)),
        "firing": str(len(notification.firing)),
        "repeat": str(notification.repeat),
        "more": f", and {more} more" if more else "",
    }


def _incidents(notification: Notification) -> str:
    """Render the incidents with several alerts."""
    incidents = {
        alert.incident.id: alert.incident for alert in notification.alerts if alert.incident is not None
    }
    return "\n\n".join(
        "\n".join(incident.as_lines()) for incident in incidents.values() if len(incident.alerts) > 1
    )


def _of_alert(alert: NotifiedAlert) -> dict[str, str]:
    fields = {
        "name": alert.name,
        "rule": alert.rule,
        "severity": alert.severity,
        "phase": alert.phase,
        "attempt": alert.attempt,
        "step": str(alert.step),
        "message": alert.message,
        "title": f"{alert.name} ({alert.severity}) {alert.phase_words}",
        "acknowledged_by": alert.acknowledged_by or "-",
        "alert_url": alert.url,
        **{rule_config.LABEL + name: value for name, value in alert.labels.items()},
    }
    if alert.explanation is not None:
        explained = alert.explanation
        fields |= {
            "title": explained.title,
            "seen": explained.seen,
            "where": explained.where,
            "against": explained.against,
            "since": explained.since,
            "causes": " ".join(explained.usual_causes) or "-",
            "try": " ".join(explained.what_to_try) or "-",
        }
    return fields


_CONTROL = re.compile(
    r"[^\S\n]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """A text whose control characters, other than line breaks, are spaces."""
    return _CONTROL.sub(" ", text)
