"""``watchstep runs alerts``: what the service says of a run's alerts. They lie in its database, not in the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from watchstep.client import Client
from watchstep.errors import WatchstepError
from watchstep_rules.engine.explanation import Explanation
from watchstep_rules.engine.incident import IncidentSummary
from watchstep_rules.engine.judge import RuleHealth
from watchstep_rules.signals.ranges.deviations import Deviation
from watchstep_services.cli.calling import client_of
from watchstep_services.cli.service_options import DEFAULT_STORE
from watchstep_services.core.console import console, moment

_MAX_ONSETS = 5
"""Onsets whose deviations are shown: the service reads the store for each."""


def alerts(
    run: Annotated[str, typer.Argument(help="<project>/<run>.")],
    store: Annotated[
        str, typer.Option(envvar="WATCHSTEP_STORE", help="Folder or URL that holds the runs.")
    ] = DEFAULT_STORE,
    service: Annotated[
        str,
        typer.Option(
            envvar="WATCHSTEP_SERVICE", help="URL of the service; the one of the store if left out."
        ),
    ] = "",
) -> None:
    """Show a run's alerts, explained: those that fire first, then those that are over, the last changed first; and rules that cannot be evaluated. Token: WATCHSTEP_TOKEN."""
    project, _, name = run.rpartition("/")
    client = client_of(store, service, project or "default")
    found = [alert.raw for alert in client.alerts(name)]
    out = console()
    fired = [alert for alert in found if alert["details"] is not None]
    fired.sort(key=lambda alert: bool(alert["phase"] != "firing"))
    if not fired:
        out.print(f"{run}: no alert has fired")
    incidents = {alert["incident"]["id"]: alert["incident"] for alert in fired if alert["incident"]}
    for incident in incidents.values():
        if len(incident["alerts"]) > 1:
            for line in IncidentSummary.model_validate(incident).as_lines():
                out.print(line, highlight=False, soft_wrap=True)
    for alert in fired:
        details = alert["details"]
        quiet = f"; kept quiet by {details['inhibited_by']}" if details["inhibited_by"] else ""
        dry = "; dry run" if details["dry_run"] else ""
        title, *rest = Explanation.model_validate(details["explanation"]).as_lines()
        out.print(f"{title}{quiet}{dry} (attempt {alert['attempt']})", soft_wrap=True)
        for line in (*rest, *_taken_up(client, name, alert)):
            out.print(line, highlight=False, soft_wrap=True)
    for line in _deviations(client, name, fired):
        out.print(line, highlight=False, soft_wrap=True)
    for line in _not_evaluated([rule.raw for rule in client.rules(name)]):
        out.print(line, highlight=False, soft_wrap=True)


def _deviations(client: Client, run: str, fired: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The tensors that deviate at the first step of each incident, or of an alert without one."""
    onsets = dict.fromkeys(
        (
            alert["attempt"],
            alert["incident"]["first_step"] if alert["incident"] else alert["details"]["since_step"],
        )
        for alert in fired
    )
    for attempt, step in list(onsets)[:_MAX_ONSETS]:
        try:
            found = client.deviations(run, attempt, step)
        except WatchstepError as error:
            # Alerts are in the database; the statistics are in the store, which may be damaged, slow or gone.
            yield f"deviations at step {step} of attempt {attempt} could not be read: {error}"
            continue
        if found["deviations"]:
            yield f"deviations from the run's own usual ranges at step {step} (attempt {attempt}):"
        for deviation in found["deviations"]:
            yield f"  {Deviation.model_validate(deviation).as_line()}"


def _taken_up(client: Client, run: str, alert: Mapping[str, Any]) -> Iterator[str]:
    """Who has taken an alert that fires up, and until when nobody is told of it."""
    if alert["phase"] != "firing":
        return
    standing = client.standing(run, alert["fingerprint"])
    taken, silence = standing["acknowledgement"], standing["silence"]
    if taken is not None:
        said = f": {taken['comment']}" if taken["comment"] else ""
        yield f"  taken   acknowledged by {taken['who']}, {moment(taken['at_ns'])}{said}"
    if silence is not None:
        held = ", and stops are held back" if silence["holds_stop"] else ""
        until = f"until {moment(silence['ends_ns'])} by silence {silence['id']} of {silence['author']}"
        yield f"  silent  {until}{held}: {silence['reason']}"


def _not_evaluated(rules: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rules that say nothing because they cannot."""
    for rule in rules:
        if rule["health"] == RuleHealth.ERROR.value:
            yield f"error: rule {rule['name']} cannot be evaluated: {' '.join(rule['problem'].split())}"
        for other in rule.get("overrides", ()):
            yield f"rule {rule['name']}: the {rule['origin']}'s judges; the {other['origin']}'s of that name is overridden"
    without = [rule["name"] for rule in rules if rule["health"] == RuleHealth.NO_DATA.value]
    if without:
        yield f"no data: {', '.join(without)}"
