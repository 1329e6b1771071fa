"""A notification in words: a title and a text, by the receiver's own templates or by default.

A template is text with ``{field}`` in it, looked up by name and nothing else (`watchstep_rules.config.message_template`): no code, no
loops, no attributes, so that it is as long as its fields and takes no longer than they do. What is repeated for each alert is a
template of its own, whose lines stand for ``{alerts}`` in the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from watchstep_rules.config import message_template
from watchstep_services.channels.notification import Notification, NotifiedAlert

MOST_TITLE = 250
MOST_TEXT = 20_000
MOST_ALERTS = 50
"""Alerts that are written out; the rest are counted."""

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
    "against": "the value, and what it was held against",
    "since": "since when",
    "causes": "what usually causes it",
    "try": "what to try",
    "acknowledged_by": "who has taken it up",
}
"""What may stand in the template of one alert, beside ``{label.NAME}``; in title and text it is of the first alert."""

FIELDS: dict[str, str] = {
    "project": "the project",
    "run": "the run's id; empty where the alerts are of several runs",
    "run_url": "the run's address on the API, which asks for a token and answers in JSON",
    "command": "what shows the alerts in a terminal",
    "status": "firing or resolved",
    "STATUS": "FIRING or RESOLVED",
    "count": "how many alerts",
    "firing": "how many of them fire",
    "repeat": "how many times it was told before with nothing new",
    "more": "', and N more' where there are others beside the first, else nothing",
    **ALERT_FIELDS,
}
"""What may stand in a title."""

TEXT_FIELDS = {
    **FIELDS,
    "alerts": "each alert, by the template for one",
    "incidents": "each incident of several alerts: what the likeliest cause is, what to check first, what speaks against",
}
"""What may stand in a text."""

DEFAULT_TITLE = "[{STATUS}] {name} ({severity}) {project}/{run}{more}"
DEFAULT_TEXT = "{incidents}\n\n{alerts}\n\n{command}\n{run_url}"
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
    """A title's template, as it is.

    Raises:
        ValueError: a field is not known.
    """
    return _checked(text, FIELDS)


def check_text(text: str) -> str:
    """A text's template, as it is.

    Raises:
        ValueError: a field is not known.
    """
    return _checked(text, TEXT_FIELDS)


def check_alert(text: str) -> str:
    """The template for one alert, as it is.

    Raises:
        ValueError: a field is not known.
    """
    return _checked(text, ALERT_FIELDS)


def word(notification: Notification, templates: Templates) -> tuple[str, str]:
    """Title and text. The title has one line; neither has control characters."""
    shared = _values(notification)
    title = message_template.fill(templates.title or DEFAULT_TITLE, shared, MOST_TITLE)
    alert = templates.alert or DEFAULT_ALERT
    told = [message_template.fill(alert, _of_alert(one)) for one in notification.alerts[:MOST_ALERTS]]
    left = len(notification.alerts) - len(told)
    told += [f"and {left} more"] if left else []
    values = {
        **shared,
        "alerts": "\n\n".join(told)[:MOST_TEXT],
        "incidents": _incidents(notification)[:MOST_TEXT],
    }
    text = message_template.fill(templates.text or DEFAULT_TEXT, values, MOST_TEXT)
    return " ".join(_plain(title).split()), _plain(text).strip()


def _checked(text: str, fields: Mapping[str, str]) -> str:
    message_template.check(text, None, fields)
    return text


def _values(notification: Notification) -> dict[str, str]:
    first = notification.alerts[0]
    more = len(notification.alerts) - 1
    return {
        **_of_alert(first),
        "project": notification.project,
        "run": notification.run,
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
    """The incidents of several alerts that a notification is about."""
    incidents = {
        alert.incident.id: alert.incident for alert in notification.alerts if alert.incident is not None
    }
    return "\n\n".join("\n".join(alert.as_lines()) for alert in incidents.values() if len(alert.alerts) > 1)


def _of_alert(alert: NotifiedAlert) -> dict[str, str]:
    fields = {
        "name": alert.name,
        "rule": alert.rule,
        "severity": alert.severity,
        "phase": alert.phase,
        "attempt": alert.attempt,
        "step": str(alert.step),
        "message": alert.message,
        "title": f"{alert.name} ({alert.severity}) {alert.phase} at step {alert.step}",
        "acknowledged_by": alert.acknowledged_by or "-",
        **{message_template.LABEL + name: value for name, value in alert.labels.items()},
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


def _plain(text: str) -> str:
    return _CONTROL.sub(" ", text)
