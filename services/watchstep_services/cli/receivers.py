"""``watchstep receivers`` and ``watchstep silences``: who is notified of alerts, and when notifications are suppressed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from watchstep.errors import ConfigError
from watchstep_services.channels import receiver_file, webhook
from watchstep_services.channels.receiver import read_secret
from watchstep_services.channels.receiver_file import ReceiverFile, ReceiverFileProblem
from watchstep_services.channels.routing import RouteNode
from watchstep_services.cli.connection import (
    DEFAULT_STORE,
    JsonOption,
    ProjectOption,
    ReasonOption,
    ServiceOption,
    StoreOption,
    call,
    default_project,
    service_of,
)
from watchstep_services.core.console import console, echo_own, moment, show, show_json, table
from watchstep_services.db import encryption

receivers = typer.Typer(help="Receivers of alerts.", no_args_is_help=True, add_completion=False)


@receivers.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="Receivers file.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Report all errors of a receivers file, its receivers and its routing tree. Exit code 1 if it cannot be used.

    Examples:
        watchstep receivers check receivers.yaml
        watchstep receivers check receivers.yaml --json
    """
    out = console()
    text = receiver_file.text_of(file)
    read = receiver_file.check(text)
    if as_json:
        show_json(_check_as_data(read, text))
        raise typer.Exit(0 if isinstance(read, ReceiverFile) else 1)
    if not isinstance(read, ReceiverFile):
        for problem in read:
            out.print(f"{file}:{problem.line}: error: {problem.text}", soft_wrap=True)
        raise typer.Exit(1)
    for number, warning in _missing_secrets(read, text):
        out.print(f"{file}:{number}: warning: {warning}", soft_wrap=True)
    rows = table("=RECEIVER", "KIND", "ROUTED")
    routed = read.route.receivers()
    for receiver in read.receivers:
        rows.add_row(receiver.name, receiver.kind, "yes" if receiver.name in routed else "by rules only")
    show(rows)
    for line in _route_lines(read.route, 0):
        out.print(line, soft_wrap=True)


def _check_as_data(read: ReceiverFile | list[ReceiverFileProblem], text: str) -> dict[str, Any]:
    if not isinstance(read, ReceiverFile):
        problems = [{"line": problem.line, "level": "error", "text": problem.text} for problem in read]
        return {"ok": False, "problems": problems, "receivers": []}
    routed = read.route.receivers()
    return {
        "ok": True,
        "problems": [
            {"line": line, "level": "warning", "text": warning}
            for line, warning in _missing_secrets(read, text)
        ],
        "receivers": [
            {"name": receiver.name, "kind": receiver.kind, "routed": receiver.name in routed}
            for receiver in read.receivers
        ],
    }


@receivers.command("test")
def send_test(
    name: Annotated[str, typer.Argument(help="Name of the receiver.", show_default=False)],
    project: ProjectOption = "",
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    resolved: Annotated[bool, typer.Option(help="Send a resolved alert instead of a firing one.")] = False,
) -> None:
    """Send a test notification from a running service. Exit code 1 if it is not delivered.

    Examples:
        watchstep receivers test on-call --project vision
        watchstep receivers test on-call --resolved
    """
    url, token = service_of(store, service)
    test_url = f"{url}/v1/projects/{quote(project or default_project(), safe='')}/receivers/{quote(name, safe='')}/test"
    answer = call("POST", test_url, token, {"status": "resolved" if resolved else "firing"})
    console().print(f"{name}: {answer['result']}: {answer['detail']}", soft_wrap=True)
    if answer["result"] != "done":
        raise typer.Exit(1)


@receivers.command("schema")
def schema() -> None:
    """Print the JSON schema of receivers files, for editors.

    Examples:
        watchstep receivers schema > receivers.schema.json
    """
    echo_own(receiver_file.schema_text())


@receivers.command("new-key")
def new_key() -> None:
    """Generate a key for WATCHSTEP_SECRET_KEY, which encrypts the secrets of receivers in the database.

    Examples:
        export WATCHSTEP_SECRET_KEY=$(watchstep receivers new-key)
    """
    echo_own(encryption.new_key())


@receivers.command("new-secret")
def new_secret() -> None:
    """Generate a secret that signs the requests of a webhook.

    Examples:
        watchstep receivers new-secret
    """
    echo_own(webhook.new_secret())


def _missing_secrets(read: ReceiverFile, text: str) -> list[tuple[int, str]]:
    warnings = []
    for receiver in read.receivers:
        for field, secret in receiver.secrets().items():
            try:
                receiver.check_secret(field, read_secret(field, secret))
            except ConfigError as error:
                line = receiver_file.line_of(text, receiver.name, field)
                warnings.append((line, f"{receiver.name}: {error.what}"))
    return sorted(warnings)


def _route_lines(node: RouteNode, depth: int) -> list[str]:
    condition = " and ".join(node.matchers) or ("all alerts" if depth == 0 else "all others")
    target = f" -> {node.receiver}" if node.receiver else (" -> no receiver" if depth == 0 else "")
    lines = [f"{'  ' * depth}{condition}{target}{' (continue)' if node.continues else ''}"]
    for child in node.routes:
        lines += _route_lines(child, depth + 1)
    return lines


silences = typer.Typer(
    help="Silences: alerts that nobody is notified of for a while.",
    no_args_is_help=True,
    add_completion=False,
)

Matchers = Annotated[
    list[str],
    typer.Argument(
        metavar="MATCHER…", help="LABEL=VALUE with =, !=, =~ or !~. All must match. Example: run=night-1."
    ),
]


@silences.command("create")
def create(
    matchers: Matchers,
    reason: ReasonOption,
    *,
    hours: Annotated[float, typer.Option(min=0.0, help="Duration in hours.")] = 2.0,
    starts: Annotated[str, typer.Option(help="Start time, RFC 3339. Default: now.")] = "",
    suppresses_stop: Annotated[bool, typer.Option("--suppress-stop", help="Also suppress stops.")] = False,
    project: ProjectOption = "",
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Create a silence. Rules still stop jobs unless --suppress-stop is given. Token: WATCHSTEP_TOKEN.

    Examples:
        watchstep silences create run=night-1 --reason "known data issue" --hours 8
        watchstep silences create 'name=~loss_.*' --reason maintenance --suppress-stop
    """
    url, token = service_of(store, service)
    body: dict[str, Any] = {
        "matchers": matchers,
        "reason": reason,
        "duration_seconds": hours * 3600,
        "starts": starts or None,
        "suppresses_stop": suppresses_stop,
    }
    silence = call("POST", f"{url}/v1/projects/{project or default_project()}/silences", token, body)
    console().print(f"silence {silence['id']}, until {moment(silence['ends_ns'])}")


@silences.command("list")
def list_silences(
    every: Annotated[bool, typer.Option("--all", help="Include expired silences.")] = False,
    project: ProjectOption = "",
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    as_json: JsonOption = False,
) -> None:
    """List the silences of a project, newest first. Token: WATCHSTEP_TOKEN.

    Examples:
        watchstep silences list --project vision
        watchstep silences list --all --json
    """
    url, token = service_of(store, service)
    silences = call("GET", f"{url}/v1/projects/{project or default_project()}/silences?limit=1000", token)[
        "silences"
    ]
    selected = [silence for silence in silences if every or silence["state"] != "expired"]
    if as_json:
        show_json(selected)
        return
    rows = table(">ID", "STATE", "MATCHERS", "UNTIL", "STOPS", "AUTHOR", "REASON")
    for silence in selected:
        rows.add_row(
            str(silence["id"]), silence["state"], ", ".join(silence["matchers"]), moment(silence["ends_ns"]),
            "suppressed" if silence["suppresses_stop"] else "", silence["author"], silence["reason"],
        )  # fmt: skip
    show(rows)


@silences.command("expire")
def expire(
    number: Annotated[int, typer.Argument(metavar="ID", help="Id of the silence.")],
    project: ProjectOption = "",
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Expire a silence now: alerts that still fire are notified. Token: WATCHSTEP_TOKEN.

    Examples:
        watchstep silences expire 17 --project vision
    """
    url, token = service_of(store, service)
    call("DELETE", f"{url}/v1/projects/{project or default_project()}/silences/{number}", token)
    console().print(f"silence {number} has expired")


@silences.command("preview")
def preview(
    matchers: Matchers,
    project: ProjectOption = "",
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the firing alerts that a silence would match. Token: WATCHSTEP_TOKEN.

    Examples:
        watchstep silences preview run=night-1
    """
    url, token = service_of(store, service)
    preview_url = f"{url}/v1/projects/{project or default_project()}/silences/preview"
    alerts = call("POST", preview_url, token, {"matchers": matchers})["alerts"]
    if as_json:
        show_json(alerts)
        return
    rows = table("=RUN", "=RULE", "SEVERITY", "SINCE", "MESSAGE")
    for alert in alerts:
        labels = alert["labels"]
        rows.add_row(
            alert["run"], labels["name"], labels["severity"], moment(alert["fired_ns"]), alert["message"]
        )
    show(rows)
