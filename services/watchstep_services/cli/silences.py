"""``watchstep silences``: for a while, nobody is told of alerts that match."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from watchstep_services.cli.calling import call, service_of
from watchstep_services.cli.service_options import DEFAULT_STORE, Project, Reason, Service, Store
from watchstep_services.core.console import console, moment, show, table

silences = typer.Typer(
    help="Silences: alerts that nobody is notified of for a while.",
    no_args_is_help=True,
    add_completion=False,
)

Matchers = Annotated[
    list[str],
    typer.Argument(
        metavar="MATCHER…", help="LABEL=VALUE with =, !=, =~ or !~; all must hold. E.g. run=night-1."
    ),
]


@silences.command("create")
def create(
    matchers: Matchers,
    reason: Reason,
    *,
    hours: Annotated[float, typer.Option(min=0.0, help="For how long.")] = 2.0,
    starts: Annotated[str, typer.Option(help="RFC 3339; now if left out.")] = "",
    holds_stop: Annotated[bool, typer.Option("--holds-stop", help="Hold back stops, too.")] = False,
    project: Project = "default",
    store: Store = DEFAULT_STORE,
    service: Service = "",
) -> None:
    """Begin a silence. Jobs are still stopped unless --holds-stop is given. Token: WATCHSTEP_TOKEN."""
    url, token = service_of(store, service)
    body: dict[str, Any] = {
        "matchers": matchers,
        "reason": reason,
        "duration_seconds": hours * 3600,
        "starts": starts or None,
        "holds_stop": holds_stop,
    }
    made = call("POST", f"{url}/v1/projects/{project}/silences", token, body)
    console().print(f"silence {made['id']}, until {moment(made['ends_ns'])}")


@silences.command("list")
def list_silences(
    every: Annotated[bool, typer.Option("--all", help="Those that have ended, too.")] = False,
    project: Project = "default",
    store: Store = DEFAULT_STORE,
    service: Service = "",
) -> None:
    """List a project's silences, the newest first. Token: WATCHSTEP_TOKEN."""
    url, token = service_of(store, service)
    shown = table(">ID", "STATE", "MATCHERS", "UNTIL", "STOPS", "BY", "WHY")
    for one in call("GET", f"{url}/v1/projects/{project}/silences?limit=1000", token)["silences"]:
        if every or one["state"] != "expired":
            shown.add_row(
                str(one["id"]), one["state"], ", ".join(one["matchers"]), moment(one["ends_ns"]),
                "held back" if one["holds_stop"] else "", one["author"], one["reason"],
            )  # fmt: skip
    show(shown)


@silences.command("expire")
def expire(
    number: Annotated[int, typer.Argument(metavar="ID", help="The silence's id.")],
    project: Project = "default",
    store: Store = DEFAULT_STORE,
    service: Service = "",
) -> None:
    """End a silence now; what still fires is told. Token: WATCHSTEP_TOKEN."""
    url, token = service_of(store, service)
    call("DELETE", f"{url}/v1/projects/{project}/silences/{number}", token)
    console().print(f"silence {number} has ended")


@silences.command("preview")
def preview(
    matchers: Matchers,
    project: Project = "default",
    store: Store = DEFAULT_STORE,
    service: Service = "",
) -> None:
    """Show which alerts that fire now a silence would hold back. Token: WATCHSTEP_TOKEN."""
    url, token = service_of(store, service)
    found = call("POST", f"{url}/v1/projects/{project}/silences/preview", token, {"matchers": matchers})
    shown = table("=RUN", "=RULE", "SEVERITY", "SINCE", "SAYS")
    for one in found["alerts"]:
        labels = one["labels"]
        shown.add_row(one["run"], labels["name"], labels["severity"], moment(one["fired_ns"]), one["message"])
    show(shown)
