"""``watchstep receivers``: files of receivers, tests, and keys.

``watchstep silences``: for a while, nobody is told of alerts that match.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from watchstep.errors import ConfigError
from watchstep_services.channels import receiver_file, webhook
from watchstep_services.channels.receiver import read_secret
from watchstep_services.channels.receiver_file import ReceiverFile
from watchstep_services.channels.routing import RouteNode
from watchstep_services.cli.connection import DEFAULT_STORE, Project, Reason, Service, Store, call, service_of
from watchstep_services.core.console import console, echo_own, moment, show, table
from watchstep_services.db import encryption

receivers = typer.Typer(help="Receivers of alerts.", no_args_is_help=True, add_completion=False)

_Store = Annotated[str, typer.Option(envvar="WATCHSTEP_STORE", help="The store whose service is asked.")]
_Service = Annotated[
    str, typer.Option(envvar="WATCHSTEP_SERVICE", help="URL of the service; with WATCHSTEP_TOKEN.")
]


@receivers.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A file of receivers.", show_default=False)],
) -> None:
    """Say all that is wrong with a file of receivers, and what it comes to. Exit code 1 where it cannot be used."""
    out = console()
    text = receiver_file.text_of(file)
    read = receiver_file.check(text)
    if not isinstance(read, ReceiverFile):
        for fault in read:
            out.print(f"{file}:{fault.line}: error: {fault.text}", soft_wrap=True)
        raise typer.Exit(1)
    for number, words in _missing(read, text):
        out.print(f"{file}:{number}: warning: {words}", soft_wrap=True)
    shown = table("=RECEIVER", "KIND", "ROUTED")
    routed = read.route.receivers()
    for receiver in read.receivers:
        shown.add_row(receiver.name, receiver.kind, "yes" if receiver.name in routed else "by rules alone")
    show(shown)
    for line in _lines(read.route, 0):
        out.print(line, soft_wrap=True)


@receivers.command("test")
def send_test(
    name: Annotated[str, typer.Argument(help="The receiver.", show_default=False)],
    project: Annotated[str, typer.Option(envvar="WATCHSTEP_PROJECT", help="Whose receiver.")] = "default",
    store: _Store = DEFAULT_STORE,
    service: _Service = "",
    resolved: Annotated[bool, typer.Option(help="Send the end of an alert, not its beginning.")] = False,
) -> None:
    """Have a running service send a test, and say what came of it. Exit code 1 where it did not arrive."""
    url, token = service_of(store, service)
    place = f"{url}/v1/projects/{quote(project, safe='')}/receivers/{quote(name, safe='')}/test"
    answer = call("POST", place, token, {"status": "resolved" if resolved else "firing"})
    console().print(f"{name}: {answer['result']}: {answer['detail']}", soft_wrap=True)
    if answer["result"] != "done":
        raise typer.Exit(1)


@receivers.command("schema")
def schema() -> None:
    """Print the JSON schema of files of receivers, for editors."""
    echo_own(receiver_file.schema_text())


@receivers.command("new-key")
def new_key() -> None:
    """Make a key for WATCHSTEP_SECRET_KEY, which seals the secrets of receivers in the database."""
    echo_own(encryption.new_key())


@receivers.command("new-secret")
def new_secret() -> None:
    """Make a secret for a webhook to sign with."""
    echo_own(webhook.new_secret())


def _missing(read: ReceiverFile, text: str) -> list[tuple[int, str]]:
    found = []
    for receiver in read.receivers:
        for field, secret in receiver.secrets().items():
            try:
                receiver.check_secret(field, read_secret(field, secret))
            except ConfigError as error:
                line = receiver_file.line_of(text, receiver.name, field)
                found.append((line, f"{receiver.name}: {error.what}"))
    return sorted(found)


def _lines(node: RouteNode, depth: int) -> list[str]:
    said = " and ".join(node.matchers) or ("all alerts" if depth == 0 else "all others")
    told = f" -> {node.receiver}" if node.receiver else (" -> nobody" if depth == 0 else "")
    lines = [f"{'  ' * depth}{said}{told}{' (and on)' if node.go_on else ''}"]
    for child in node.routes:
        lines += _lines(child, depth + 1)
    return lines


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
