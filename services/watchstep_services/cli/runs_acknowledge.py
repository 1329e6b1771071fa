"""``watchstep runs acknowledge``: somebody has taken an alert up."""

from __future__ import annotations

from typing import Annotated

import typer

from watchstep.errors import NotFoundError
from watchstep_services.cli.calling import call, service_of
from watchstep_services.cli.service_options import DEFAULT_STORE, Service, Store
from watchstep_services.core.console import console


def acknowledge(
    run: Annotated[str, typer.Argument(help="<project>/<run>.")],
    rule: Annotated[str, typer.Argument(metavar="RULE", help="The rule config's name.")],
    comment: Annotated[str, typer.Option(help="For the others.")] = "",
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Take it back.")] = False,
    store: Store = DEFAULT_STORE,
    service: Service = "",
) -> None:
    """Take an alert that fires up: it is not repeated until it is over. Token: WATCHSTEP_TOKEN."""
    project, _, name = run.rpartition("/")
    url, token = service_of(store, service)
    place = f"{url}/v1/projects/{project or 'default'}/runs/{name}/alerts"
    found = {
        alert["fingerprint"]
        for alert in call("GET", f"{place}?limit=1000", token)["alerts"]
        if alert["name"] == rule and alert["phase"] == "firing"
    }
    if not found:
        raise NotFoundError(
            f"alert {rule!r} of {run}: it does not fire", "'watchstep runs alerts' shows those that do"
        )
    for fingerprint in sorted(found):
        where = f"{place}/{fingerprint}/acknowledgement"
        if withdraw:
            call("DELETE", where, token)
        else:
            call("PUT", where, token, {"comment": comment})
    console().print(f"{rule} of {run}: {'repeated again' if withdraw else 'acknowledged'}")
