"""``watchstep projects``, ``stores`` and ``backends``: registrations by administrators, through the API."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from watchstep.capture.document.document import config_of
from watchstep.capture.document.files import load_data
from watchstep.errors import StoreError
from watchstep_services.cli.connection import DEFAULT_STORE, JsonOption, call, service_of
from watchstep_services.core.console import echo, moment, show, show_json, table

projects = typer.Typer(
    help="Projects: the store of their runs, and the backends of their jobs.",
    no_args_is_help=True,
    add_completion=False,
)
stores = typer.Typer(help="Stores that projects can use.", no_args_is_help=True, add_completion=False)
backends = typer.Typer(help="Backends that jobs may run on.", no_args_is_help=True, add_completion=False)

ServiceUrl = Annotated[str, typer.Option("--service", envvar="WATCHSTEP_SERVICE", help="URL of the service. Token: WATCHSTEP_TOKEN, of an administrator. Default: the profile's.")]  # fmt: skip
LocalStore = Annotated[
    str, typer.Option("--local", help="Store of a service on this machine, instead of --service.")
]
Name = Annotated[str, typer.Argument(help="Name.")]
_PAGE = 1000
_NEVER_WRAPPED = ("name", "store", "url", "location", "role_arn")


@stores.command("list")
def list_stores(
    service: ServiceUrl = "", local: LocalStore = DEFAULT_STORE, as_json: JsonOption = False
) -> None:
    """List the registered stores.

    Examples:
        watchstep stores list
        watchstep stores list --json
    """
    _show(_all("stores", service, local), as_json, "name", "url", "role_arn", "version")


@stores.command("add")
def add_store(  # noqa: PLR0917 - the options of a command
    name: Name,
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix, gs://…, az://… or a folder.")],
    role: Annotated[str, typer.Option(help="ARN of the AWS role to assume.")] = "",
    external_id: Annotated[str, typer.Option(help="External id to assume the role with.")] = "",
    region: Annotated[str, typer.Option(help="Region of the bucket.")] = "",
    endpoint: Annotated[str, typer.Option(help="URL of an S3-compatible service.")] = "",
    check: Annotated[bool, typer.Option(help="Check the store first.")] = True,
    service: ServiceUrl = "",
    local: LocalStore = DEFAULT_STORE,
) -> None:
    """Register a store.

    Examples:
        watchstep stores add lab s3://bucket/runs --role arn:aws:iam::123456789012:role/watchstep
    """
    body = {
        "name": name, "url": url, "role_arn": role, "external_id": external_id, "region": region, "endpoint": endpoint,
        "check": check,
    }  # fmt: skip
    _call("POST", "stores", service, local, body)
    echo(f"store {name} is registered: {url}")


@stores.command("check")
def check_store(
    name: Name, service: ServiceUrl = "", local: LocalStore = DEFAULT_STORE, as_json: JsonOption = False
) -> None:
    """Check a store: assume its role, then list, write, read, create and delete. Exit code 2 if a step fails.

    Examples:
        watchstep stores check lab
        watchstep stores check lab --json
    """
    result = _call("POST", f"stores/{quote(name, safe='')}/check", service, local)
    if as_json:
        show_json(result)
        raise typer.Exit(0 if all(step["ok"] for step in result["steps"]) else 2)
    for step in result["steps"]:
        echo(f"{step['name']:12} {'ok' if step['ok'] else step['detail']}")
    failed = next((step for step in result["steps"] if not step["ok"]), None)
    if failed is not None:
        raise StoreError(f"store {name}: {failed['name']}: {failed['detail']}", failed["hint"])


@stores.command("remove")
def remove_store(name: Name, service: ServiceUrl = "", local: LocalStore = DEFAULT_STORE) -> None:
    """Remove the registration of a store that no project uses. Its content is not changed.

    Examples:
        watchstep stores remove lab
    """
    _call("DELETE", f"stores/{quote(name, safe='')}", service, local)


@backends.command("list")
def list_backends(
    service: ServiceUrl = "", local: LocalStore = DEFAULT_STORE, as_json: JsonOption = False
) -> None:
    """List the registered backends.

    Examples:
        watchstep backends list
        watchstep backends list --json
    """
    _show(_all("backends", service, local), as_json, "name", "kind", "version")


@backends.command("add")
def add_backend(
    name: Name,
    kind: Annotated[str, typer.Argument(help="Kind of the backend, e.g. local.")],
    service: ServiceUrl = "",
    local: LocalStore = DEFAULT_STORE,
) -> None:
    """Register a backend.

    Examples:
        watchstep backends add cluster slurm
    """
    _call("POST", "backends", service, local, {"name": name, "kind": kind})
    echo(f"backend {name} is registered")


@backends.command("remove")
def remove_backend(name: Name, service: ServiceUrl = "", local: LocalStore = DEFAULT_STORE) -> None:
    """Remove the registration of a backend that has no running jobs.

    Examples:
        watchstep backends remove cluster
    """
    _call("DELETE", f"backends/{quote(name, safe='')}", service, local)


@projects.command("list")
def list_projects(
    service: ServiceUrl = "", local: LocalStore = DEFAULT_STORE, as_json: JsonOption = False
) -> None:
    """List the projects.

    Examples:
        watchstep projects list
        watchstep projects list --json
    """
    _show(_all("projects", service, local), as_json, "name", "store", "location", "backends", "archived_ns")


@projects.command("create")
def create_project(
    name: Name,
    store: Annotated[str, typer.Option(help="Name of a registered store.")],
    prefix: Annotated[str, typer.Option(help="Prefix in the store.")] = "",
    backend: Annotated[
        list[str] | None, typer.Option(help="Name of a registered backend. Repeat for several.")
    ] = None,
    service: ServiceUrl = "",
    local: LocalStore = DEFAULT_STORE,
) -> None:
    """Create a project on a registered store.

    Examples:
        watchstep projects create vision --store lab --backend cluster
    """
    body = {"name": name, "store": store, "prefix": prefix, "backends": backend or []}
    project = _call("POST", "projects", service, local, body)
    echo(f"project {name} is created: {project['location']}/{name}")


@projects.command("archive")
def archive_project(name: Name, service: ServiceUrl = "", local: LocalStore = DEFAULT_STORE) -> None:
    """Archive a project: it accepts no new runs, and can still be read.

    Examples:
        watchstep projects archive vision
    """
    _call("PATCH", f"projects/{quote(name, safe='')}", service, local, {"archived": True})


@projects.command("capture")
def show_capture(
    name: Name, service: ServiceUrl = "", local: LocalStore = DEFAULT_STORE, as_json: JsonOption = False
) -> None:
    """Show the capture document of a project: what its runs record unless the program or its launch sets it.

    Examples:
        watchstep projects capture vision
        watchstep projects capture vision --json
    """
    stored = _call("GET", f"projects/{quote(name, safe='')}/capture", service, local)
    if as_json:
        show_json(stored)
    elif stored["document"] is None:
        echo(f"project {name} has no capture document: its runs record with the built-in configuration")
    else:
        echo(f"set {moment(stored['changed_ns'])} by {stored['changed_by']}")
        echo(json.dumps(stored["document"], indent=2))


@projects.command("set-capture")
def set_capture(
    name: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Capture file, YAML or JSON.")],
    service: ServiceUrl = "",
    local: LocalStore = DEFAULT_STORE,
) -> None:
    """Set the capture document of a project, for launches whose program and launcher set no configuration.

    Examples:
        watchstep projects set-capture vision capture.yaml
    """
    document = load_data(file)
    config_of(document, f"capture file {file}")
    _call("PUT", f"projects/{quote(name, safe='')}/capture", service, local, document or {})
    echo(f"project {name} has a new capture document, which applies to later launches")


@projects.command("remove-capture")
def remove_capture(name: Name, service: ServiceUrl = "", local: LocalStore = DEFAULT_STORE) -> None:
    """Remove the capture document of a project: later launches record with the built-in configuration.

    Examples:
        watchstep projects remove-capture vision
    """
    _call("DELETE", f"projects/{quote(name, safe='')}/capture", service, local)
    echo(f"project {name} has no capture document")


def _call(
    method: str, path: str, service: str, local: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    url, token = service_of(local, service)
    return call(method, f"{url}/v1/{path}", token, body)


def _all(kind: str, service: str, local: str) -> Iterable[dict[str, Any]]:
    """Yield the items of all pages of a list."""
    query: dict[str, Any] = {"limit": _PAGE}
    while True:
        page = _call("GET", f"{kind}?{urlencode(query)}", service, local)
        yield from page[kind]
        if not page.get("next_page_token"):
            return
        query["page_token"] = page["next_page_token"]


def _show(rows: Iterable[dict[str, Any]], as_json: bool, *columns: str) -> None:
    if as_json:
        show_json(list(rows))
        return
    output = table(*(_head(column) for column in columns))
    for row in rows:
        output.add_row(*(_text(row[column]) for column in columns))
    show(output)


def _head(column: str) -> str:
    marker = "=" if column in _NEVER_WRAPPED else ""
    return f"{marker}{column.removesuffix('_ns').upper()}"


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)
