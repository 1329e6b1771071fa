"""``watchstep rules allow-stop`` and its likes: which rules may stop jobs of a project."""

from __future__ import annotations

from typing import Annotated

import typer

from watchstep.errors import NotFoundError
from watchstep_services.cli.calling import call, service_of
from watchstep_services.cli.service_options import DEFAULT_STORE, Project, Reason, Service, Store
from watchstep_services.core.console import console, moment, show, table

RuleName = Annotated[str, typer.Argument(metavar="RULE", help="The rule config's name.")]


def allow_stop(
    rule: RuleName,
    reason: Reason,
    *,
    project: Project = "default",
    run: Annotated[str, typer.Option(help="As it is in this run; needed where runs differ.")] = "",
    digest: Annotated[str, typer.Option(help="Or the beginning of its digest.")] = "",
    store: Store = DEFAULT_STORE,
    service: Service = "",
) -> None:
    """Let a rule stop jobs of a project, exactly as it is now. Token: WATCHSTEP_TOKEN."""
    url, token = service_of(store, service)
    body = {"rule": rule, "reason": reason, "run": run, "digest": digest}
    made = call("POST", f"{url}/v1/projects/{project}/stop-grants", token, body)
    console().print(
        f"{rule} may stop jobs of {project}: grant {made['id']}, digest {made['digest'][:12]}, {made['judges']['params']}", soft_wrap=True,
    )  # fmt: skip


def revoke_stop(
    rule: RuleName,
    reason: Reason,
    *,
    project: Project = "default",
    digest: Annotated[str, typer.Option(help="Only the one with this beginning of its digest.")] = "",
    store: Store = DEFAULT_STORE,
    service: Service = "",
) -> None:
    """Let a rule stop jobs of a project no longer. Token: WATCHSTEP_TOKEN."""
    url, token = service_of(store, service)
    place = f"{url}/v1/projects/{project}/stop-grants"
    grants = call("GET", f"{place}?active=true&limit=1000", token)["grants"]
    mine = [one for one in grants if one["name"] == rule and one["digest"].startswith(digest)]
    if not mine:
        raise NotFoundError(
            f"rule {rule!r} of project {project}: it has not been allowed to stop",
            "'watchstep rules stop-grants' lists those that have",
        )
    for grant in mine:
        call("POST", f"{place}/{grant['id']}/revoke", token, {"reason": reason})
        console().print(f"{rule} stops jobs of {project} no longer: grant {grant['id']}")


def stop_grants(project: Project = "default", store: Store = DEFAULT_STORE, service: Service = "") -> None:
    """List which rules were allowed to stop jobs of a project, by whom and why. Token: WATCHSTEP_TOKEN."""
    url, token = service_of(store, service)
    shown = table(">ID", "=RULE", "=DIGEST", "SINCE", "BY", "WHY", "REVOKED")
    for one in call("GET", f"{url}/v1/projects/{project}/stop-grants?limit=1000", token)["grants"]:
        ended = f"{moment(one['revoked_ns'])}: {one['revoked_reason']}" if one["revoked_ns"] else ""
        shown.add_row(
            str(one["id"]), one["name"], one["digest"][:12], moment(one["granted_ns"]), one["granted_by"],
            one["reason"], ended,
        )  # fmt: skip
    show(shown)
