"""``watchstep receivers``: files of receivers, tests, and keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from watchstep.errors import ConfigError
from watchstep_services.channels import receiver_file, webhook
from watchstep_services.channels.receiver_file import ReceiverFile
from watchstep_services.channels.routing import RouteNode
from watchstep_services.channels.secret_fields import read_secret
from watchstep_services.cli.calling import call, service_of
from watchstep_services.cli.service_options import DEFAULT_STORE
from watchstep_services.core.console import console, echo_own, show, table
from watchstep_services.db import sealing

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
    echo_own(sealing.new_key())


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
