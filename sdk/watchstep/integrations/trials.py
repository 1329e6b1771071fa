"""Why a trial of a sweep was given up, in the form that every sweep records."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from watchstep.client import Client
from watchstep.errors import NotFoundError, ServiceError
from watchstep.format.control import RULE_REASON
from watchstep.hook import Hook
from watchstep.platform.transport import ServiceAddress

_INVALID_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")

_log = logging.getLogger("watchstep")


@dataclass(frozen=True)
class Reason:
    """Why a trial is given up.

    Attributes:
        run: the trial's run.
        rule: the rule config that fired; empty if a person stopped the run.
        step: the step of the finding.
        message: the finding as text.
        link: the service's URL of its alerts, or the run's URL without a service.
    """

    run: str
    rule: str
    step: int
    message: str
    link: str

    def as_data(self) -> dict[str, Any]:
        """The fields by the names that a sweep uses: ``watchstep_run`` and so on."""
        return {f"watchstep_{name}": value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return f"{self.rule}: bad from step {self.step}: {self.message}" if self.rule else self.message


def run_name(sweep: str, trial: str) -> str:
    """Return the run id of a trial, with invalid characters replaced."""
    return _INVALID_CHARACTERS.sub("-", f"{sweep}-{trial}").strip(".-")


def of_stop(hook: Hook) -> Reason | None:
    """Return why a hook's training was stopped by the service or its guard; None if it was not."""
    stop = hook.stopped
    if stop is None:
        return None
    match = RULE_REASON.fullmatch(stop.reason)
    if match is None:
        return Reason(hook.run, "", stop.step, stop.reason, link_of(hook))
    return Reason(hook.run, match["rule"], int(match["step"]), match["message"], link_of(hook))


def of_guard(hook: Hook) -> Reason | None:
    """Return the first firing alert of a hook's guard; None if there is none."""
    firing: dict[str, int] = hook.health.get("guard", {}).get("firing", {})
    if not firing:
        return None
    rule, step = min(firing.items(), key=lambda entry: entry[1])
    return Reason(hook.run, rule, step, f"fires since step {step}", link_of(hook))


def of_service(client: Client, run: str, severities: Sequence[str], link: str) -> Reason | None:
    """Return a firing alert of a run in the service; None if there is none, or the service does not answer."""
    try:
        alert = next(client.alerts(run, phases=["firing"], severities=severities), None)
    except NotFoundError:
        return None  # not registered yet
    except ServiceError as error:
        _log.warning("watchstep: alerts of %s are unknown: %s", run, error.what)
        return None
    if alert is None:
        return None
    finding = alert.finding or {}
    message = str(finding.get("message", "fires"))
    return Reason(run, alert.name, int(finding.get("step", alert.since_step)), message, link)


def link_of(hook: Hook) -> str:
    """Return the URL of the alerts of a hook's run."""
    address = ServiceAddress.from_environment()
    if address is None:
        return hook.run_url
    return alerts_url(address.url, hook.project, hook.run)


def alerts_url(service: str, project: str, run: str) -> str:
    """Return the service's URL of a run's alerts."""
    return f"{service.rstrip('/')}/v1/projects/{project}/runs/{run}/alerts"
