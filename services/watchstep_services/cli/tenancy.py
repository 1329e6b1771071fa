"""``watchstep projects``, ``stores`` and ``backends``: what admins register, through the API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from watchstep.errors import StoreError
from watchstep_services.cli.connection import DEFAULT_STORE, call, service_of
from watchstep_services.core.console import echo, show, table

projects = typer.Typer(
    help="Projects: where their runs lie, and where their jobs may run.",
    no_args_is_help=True,
    add_completion=False,
)
stores = typer.Typer(help="Stores that projects can be put on.", no_args_is_help=True, add_completion=False)
backends = typer.Typer(help="Backends that jobs may run on.", no_args_is_help=True, add_completion=False)

At = Annotated[str, typer.Option("--service", envvar="WATCHSTEP_SERVICE", help="URL of the service; with an admin's WATCHSTEP_TOKEN.")]  # fmt: skip
On = Annotated[str, typer.Option("--local", help="Or the store of the service that runs on this machine.")]
Name = Annotated[str, typer.Argument(help="Its name.")]
_MOST = 1000
_COPIED = ("name", "store", "url", "location", "role_arn")


@stores.command("list")
def list_stores(service: At = "", local: On = DEFAULT_STORE) -> None:
    """List the registered stores."""
    _show(_all("stores", service, local), "name", "url", "role_arn", "version")


@stores.command("add")
def add_store(  # noqa: PLR0917 - the options of a command
    name: Name,
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix, gs://…, az://… or a folder.")],
    role: Annotated[str, typer.Option(help="ARN of the AWS role by which it is reached.")] = "",
    external_id: Annotated[str, typer.Option(help="Shown when the role is taken.")] = "",
    region: Annotated[str, typer.Option(help="Of the bucket.")] = "",
    endpoint: Annotated[str, typer.Option(help="Of a service that speaks S3.")] = "",
    check: Annotated[bool, typer.Option(help="Try it first.")] = True,
    service: At = "",
    local: On = DEFAULT_STORE,
) -> None:
    """Register a store."""
    body = {
        "name": name, "url": url, "role_arn": role, "external_id": external_id, "region": region, "endpoint": endpoint,
        "check": check,
    }  # fmt: skip
    _call("POST", "stores", service, local, body)
    echo(f"store {name} is registered: {url}")


@stores.command("check")
def check_store(name: Name, service: At = "", local: On = DEFAULT_STORE) -> None:
    """Try a store: take its role, list, write, read, create, delete."""
    tried = _call("POST", f"stores/{quote(name, safe='')}/check", service, local)
    for step in tried["steps"]:
        echo(f"{step['name']:12} {'ok' if step['ok'] else step['detail']}")
    wrong = next((step for step in tried["steps"] if not step["ok"]), None)
    if wrong is not None:
        raise StoreError(f"store {name}: {wrong['name']}: {wrong['detail']}", wrong["hint"])


@stores.command("remove")
def remove_store(name: Name, service: At = "", local: On = DEFAULT_STORE) -> None:
    """Forget a store that no project uses; nothing on it is touched."""
    _call("DELETE", f"stores/{quote(name, safe='')}", service, local)


@backends.command("list")
def list_backends(service: At = "", local: On = DEFAULT_STORE) -> None:
    """List the registered backends."""
    _show(_all("backends", service, local), "name", "kind", "version")


@backends.command("add")
def add_backend(
    name: Name,
    kind: Annotated[str, typer.Argument(help="What runs there, e.g. local.")],
    service: At = "",
    local: On = DEFAULT_STORE,
) -> None:
    """Register a backend."""
    _call("POST", "backends", service, local, {"name": name, "kind": kind})
    echo(f"backend {name} is registered")


@backends.command("remove")
def remove_backend(name: Name, service: At = "", local: On = DEFAULT_STORE) -> None:
    """Forget a backend without running jobs."""
    _call("DELETE", f"backends/{quote(name, safe='')}", service, local)


@projects.command("list")
def list_projects(service: At = "", local: On = DEFAULT_STORE) -> None:
    """List the projects."""
    _show(_all("projects", service, local), "name", "store", "location", "backends", "archived_ns")


@projects.command("create")
def create_project(
    name: Name,
    store: Annotated[str, typer.Option(help="A registered store.")],
    prefix: Annotated[str, typer.Option(help="Below the store.")] = "",
    backend: Annotated[list[str] | None, typer.Option(help="A registered backend; again for more.")] = None,
    service: At = "",
    local: On = DEFAULT_STORE,
) -> None:
    """Make a project on a registered store."""
    body = {"name": name, "store": store, "prefix": prefix, "backends": backend or []}
    made = _call("POST", "projects", service, local, body)
    echo(f"project {name} lies at {made['location']}/{name}")


@projects.command("archive")
def archive_project(name: Name, service: At = "", local: On = DEFAULT_STORE) -> None:
    """Take no new runs into a project; it can still be read."""
    _call("PATCH", f"projects/{quote(name, safe='')}", service, local, {"archived": True})


def _call(
    method: str, path: str, service: str, local: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    url, token = service_of(local, service)
    return call(method, f"{url}/v1/{path}", token, body)


def _all(kind: str, service: str, local: str) -> Iterable[dict[str, Any]]:
    """Every page of a list."""
    query: dict[str, Any] = {"limit": _MOST}
    while True:
        page = _call("GET", f"{kind}?{urlencode(query)}", service, local)
        yield from page[kind]
        if not page.get("next_page_token"):
            return
        query["page_token"] = page["next_page_token"]


def _show(rows: Iterable[dict[str, Any]], *columns: str) -> None:
    shown = table(*(_head(column) for column in columns))
    for row in rows:
        shown.add_row(*(_text(row[column]) for column in columns))
    show(shown)


def _head(column: str) -> str:
    copied = "=" if column in _COPIED else ""
    return f"{copied}{column.removesuffix('_ns').upper()}"


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)
