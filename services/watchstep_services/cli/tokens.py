"""``watchstep tokens``: who may use a service's API.

Works on the service's database, so that the first token needs no other, or through the API of a service that is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from sqlalchemy import select

from watchstep.errors import ConfigError
from watchstep_services.cli.calling import call, service_of
from watchstep_services.cli.output import show, table
from watchstep_services.cli.serve import DEFAULT_STORE, settings_for
from watchstep_services.cli.service_options import Store
from watchstep_services.database.clock import read_clock
from watchstep_services.database.engine import Database, open_database
from watchstep_services.database.limits import Limits
from watchstep_services.database.models import Token
from watchstep_services.database.schema import upgrade
from watchstep_services.events import rfc3339
from watchstep_services.roles import ROLES
from watchstep_services.token_register import MAX_LIFETIME, of_project, revoke, state_of
from watchstep_services.tokens import create_token, id_of

app = typer.Typer(help="Tokens for the API.", no_args_is_help=True)

_MAKER = "command line"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHOWN = (
    "id",
    "name",
    "role",
    "project",
    "state",
    "created_ns",
    "created_by",
    "expires_ns",
    "revoked_ns",
    "last_used_ns",
)

ServiceOption = Annotated[
    str,
    typer.Option(
        "--service", help="URL of a service to ask, with WATCHSTEP_TOKEN; else its database is used."
    ),
]


def _lifetime(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= MAX_LIFETIME:
        raise typer.BadParameter("use a number and s, m, h or d, up to ten years, e.g. 90d")
    return seconds


@app.command("create")
def create(
    role: Annotated[str, typer.Option(help=f"What it may do: {', '.join(ROLES)}.")],
    project: Annotated[str | None, typer.Option(help="The only project that it is for; else all.")] = None,
    name: Annotated[str, typer.Option(help="Who or what uses it.")] = "",
    expires_in: Annotated[
        str, typer.Option(help="After so long it is worthless, e.g. 90d, 12h; never where left out.")
    ] = "",
    store: Store = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Make a token for the service of a store on this machine, or of WATCHSTEP_DATABASE_URL; it is printed once."""
    if role not in ROLES:
        raise typer.BadParameter(f"use one of {', '.join(ROLES)}", param_hint="--role")
    lifetime = _lifetime(expires_in) if expires_in else None
    if service:
        body: dict[str, Any] = {
            "role": role,
            "name": name or f"made by {_MAKER}",
            "lifetime_seconds": lifetime,
        }
        token, where = str(_ask("POST", service, project, "", body)["token"]), service
    else:
        with _database(store) as database:
            token = create_token(
                database, role, project, name=name, created_by=_MAKER, lifetime_seconds=lifetime
            )
            where = database.engine.url.render_as_string(hide_password=True)
    reach = "every project" if project is None else f"project {project}"
    typer.echo(f"{role} of {reach} in {where}, id {id_of(token)}; the token is shown once:", err=True)
    typer.echo(token)


@app.command("list")
def list_tokens(
    project: Annotated[str | None, typer.Option(help="Only those of this project.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    store: Store = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Show the tokens that there are, without their secrets."""
    rows = list(_rows_of_service(service, project) if service else _rows_of_database(project, store))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    shown = table("=id", "=name", "role", "project", "state", "expires", "last used", "made by")
    for row in rows:
        project_shown = row["project"] or "(all)"
        used, ends = _moment(row["last_used_ns"]), _moment(row["expires_ns"])
        shown.add_row(
            row["id"], row["name"], row["role"], project_shown, row["state"], ends, used, row["created_by"]
        )
    show(shown)


@app.command("revoke")
def revoke_token(
    token: Annotated[str, typer.Argument(help="Its id, or the token itself.")],
    project: Annotated[
        str | None, typer.Option(help="The project that it is for, to be asked as its admin.")
    ] = None,
    store: Store = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Make a token worthless, from its next request on."""
    public = id_of(token) if token.startswith(("wst_", "ws_")) else token
    if service:
        _ask("DELETE", service, project, f"/{quote(public, safe='')}", None)
    else:
        with _database(store) as database:
            revoke(database, public, project, _MAKER)
    typer.echo(f"token {public} is revoked")


def _ask(
    method: str, service: str, project: str | None, rest: str, body: dict[str, Any] | None
) -> dict[str, Any]:
    url, token = service_of("", service)
    place = f"{url}/v1/tokens" if project is None else f"{url}/v1/projects/{quote(project, safe='')}/tokens"
    return call(method, f"{place}{rest}", token, body)


def _rows_of_service(service: str, project: str | None) -> Iterator[dict[str, Any]]:
    rest = "?limit=1000"
    while rest:
        answer = _ask("GET", service, project, rest, None)
        yield from ({name: row[name] for name in _SHOWN} for row in answer["tokens"])
        following = answer["next_page_token"]
        rest = f"?limit=1000&page_token={following}" if following else ""


def _rows_of_database(project: str | None, store: str) -> Iterator[dict[str, Any]]:
    with _database(store) as database, database.read() as session:
        now = read_clock(session)
        statement = select(Token).where(*of_project(project)).order_by(Token.created_ns.desc(), Token.id)
        for row in session.execute(statement).scalars():
            held = {name: getattr(row, name) for name in _SHOWN if name != "state"}
            yield {name: held.get(name, state_of(row, now)) for name in _SHOWN}


def _moment(at_ns: int | None) -> str:
    return "-" if at_ns is None else f"{rfc3339(at_ns)[:16].replace('T', ' ')} UTC"


@contextmanager
def _database(store: str) -> Iterator[Database]:
    """The service's database, brought up to date.

    Raises:
        ConfigError: it does not answer, or it is a SQLite file that no service has made: a token in it would open nothing.
    """
    settings = settings_for(store, None)
    database = open_database(settings.resolved_database_url, Limits.of(settings))
    try:
        path = database.engine.url.database
        if database.engine.dialect.name == "sqlite" and path and not Path(path).is_file():
            raise ConfigError(
                f"database {path}: no such file",
                "name the store that the service watches by --store, or its database in WATCHSTEP_DATABASE_URL",
            )
        database.check()
        upgrade(database)
        yield database
    finally:
        database.close()
