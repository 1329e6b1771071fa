"""``watchstep tokens``: who may use a service's API.

Works on the service's database, so that the first token needs no other, or through the API of a service that is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast
from urllib.parse import quote

import typer
from sqlalchemy import select

from watchstep.errors import ConfigError
from watchstep_services.auth.token_register import (
    LIFETIME_SECONDS,
    MAX_LIFETIME,
    RunTokenRequest,
    create_for_run,
    of_project,
    revoke,
    state_of,
)
from watchstep_services.auth.tokens import ROLES, Role, create_token, ends_ns, id_of
from watchstep_services.cli.connection import DEFAULT_STORE, Store, call, service_of
from watchstep_services.core.console import echo, echo_json, echo_own, show, table
from watchstep_services.core.events import rfc3339
from watchstep_services.core.settings import settings_for
from watchstep_services.db.clock import read_clock
from watchstep_services.db.encryption import open_encrypted_database
from watchstep_services.db.engine import Database
from watchstep_services.db.models import Token
from watchstep_services.db.schema import upgrade

app = typer.Typer(help="Tokens for the API.", no_args_is_help=True, add_completion=False)

DEFAULT_PROJECT = "default"
_MAKER = "command line"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SHOWN = (
    "id",
    "name",
    "role",
    "project",
    "run",
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

RunOption = Annotated[
    str, typer.Option("--run", help="The only run that it is for, of --project or of project default.")
]


def _lifetime(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= MAX_LIFETIME:
        raise typer.BadParameter("use a number and s, m, h or d, up to ten years, e.g. 90d")
    return seconds


@app.command("create")
def create(
    role: Annotated[
        str, typer.Option(help=f"What it may do: {', '.join(ROLES)}; recorder where --run is given.")
    ] = "",
    project: Annotated[str | None, typer.Option(help="The only project that it is for; else all.")] = None,
    *,
    run: RunOption = "",
    name: Annotated[str, typer.Option(help="Who or what uses it.")] = "",
    expires_in: Annotated[
        str,
        typer.Option(
            help="After so long it is worthless, e.g. 90d, 12h; never where left out, and for a run after 90d."
        ),
    ] = "",
    store: Store = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Make a token for the service of a store on this machine, or of WATCHSTEP_DATABASE_URL; it is printed once."""
    if run and role not in {"", "recorder"}:
        raise typer.BadParameter("a token of one run is a recorder's", param_hint="--role")
    if not run and role not in ROLES:
        raise typer.BadParameter(f"use one of {', '.join(ROLES)}", param_hint="--role")
    lifetime = _lifetime(expires_in) if expires_in else LIFETIME_SECONDS if run else None
    asked = _Asked(role or "recorder", _Place.of(project, run), name, lifetime)
    token, where = _made_by_service(asked, service) if service else _made_in_database(asked, store)
    reach = f"{asked.role} of {asked.place.shown}"
    echo(f"{reach} in {where}, id {id_of(token)}; the token is shown once:", err=True)
    echo_own(token)


@app.command("list")
def list_tokens(
    project: Annotated[str | None, typer.Option(help="Only those of this project.")] = None,
    run: RunOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    store: Store = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Show the tokens that there are, without their secrets."""
    place = _Place.of(project, run)
    rows = list(_rows_of_service(service, place) if service else _rows_of_database(place, store))
    if as_json:
        echo_json(json.dumps(rows, indent=2))
        return
    shown = table("=id", "=name", "role", "project", "state", "expires", "last used", "made by")
    for row in rows:
        project_shown = f"{row['project']}/{row['run']}" if row["run"] else row["project"] or "(all)"
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
    run: RunOption = "",
    keep_made: Annotated[
        bool,
        typer.Option(
            "--keep-made", help="Leave the tokens of runs that it made: their jobs go on with them."
        ),
    ] = False,
    store: Store = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Make a token worthless, from its next request on, and the tokens of single runs that it made."""
    public = id_of(token) if token.startswith(("wst_", "ws_")) else token
    place = _Place.of(project, run)
    if service:
        kept = "?keep_made=true" if keep_made and not run else ""
        answer = _ask("DELETE", service, place, f"/{quote(public, safe='')}{kept}", None)
        made = answer.get("made", ())  # which an older service does not say
    else:
        with _database(store) as database:
            done = revoke(database, public, place.project, _MAKER, run=place.run, keep_made=keep_made)
            made = done.made
    echo(f"token {public} is revoked" + (f", and {len(made)} of runs that it made" if made else ""))


@dataclass(frozen=True)
class _Place:
    """Which tokens: all, of one project, or of one run."""

    project: str | None
    run: str | None = None

    @classmethod
    def of(cls, project: str | None, run: str) -> _Place:
        return cls(project or DEFAULT_PROJECT, run) if run else cls(project)

    @property
    def shown(self) -> str:
        if self.project is None:
            return "every project"
        return f"project {self.project}" if self.run is None else f"run {self.project}/{self.run}"

    @property
    def path(self) -> str:
        if self.project is None:
            return "/v1/tokens"
        run = "" if self.run is None else f"/runs/{quote(self.run, safe='')}"
        return f"/v1/projects/{quote(self.project, safe='')}{run}/tokens"


@dataclass(frozen=True)
class _Asked:
    """A token to make."""

    role: str
    place: _Place
    name: str
    lifetime: int | None


def _made_by_service(asked: _Asked, service: str) -> tuple[str, str]:
    """The token, and where it was made."""
    body = {"name": asked.name or f"made by {_MAKER}", "lifetime_seconds": asked.lifetime}
    if asked.place.run is None:  # else it is a recorder's anyway
        body["role"] = asked.role
    return str(_ask("POST", service, asked.place, "", body)["token"]), service


def _made_in_database(asked: _Asked, store: str) -> tuple[str, str]:
    """As of a service; the one who may write to its database may all."""
    place = asked.place
    with _database(store) as database:
        if place.project is not None and place.run is not None and asked.lifetime is not None:
            request = RunTokenRequest(place.project, place.run, asked.name, asked.lifetime)
            token = create_for_run(database, request, _MAKER)
        else:
            token = create_token(
                database,
                cast("Role", asked.role),
                place.project,
                name=asked.name,
                created_by=_MAKER,
                lifetime_seconds=asked.lifetime,
            )
        return token, database.engine.url.render_as_string(hide_password=True)


def _ask(method: str, service: str, place: _Place, rest: str, body: dict[str, Any] | None) -> dict[str, Any]:
    url, token = service_of("", service)
    return call(method, f"{url}{place.path}{rest}", token, body)


def _rows_of_service(service: str, place: _Place) -> Iterator[dict[str, Any]]:
    rest = "?limit=1000"
    while rest:
        answer = _ask("GET", service, place, rest, None)
        yield from ({name: row.get(name) for name in _SHOWN} for row in answer["tokens"])
        following = answer["next_page_token"]
        rest = f"?limit=1000&page_token={following}" if following else ""


def _rows_of_database(place: _Place, store: str) -> Iterator[dict[str, Any]]:
    with _database(store) as database, database.read() as session:
        now = read_clock(session)
        statement = (
            select(Token)
            .where(*of_project(place.project, place.run))
            .order_by(Token.created_ns.desc(), Token.id)
        )
        for row in session.execute(statement).scalars():
            told = {"state": state_of(row, now), "expires_ns": ends_ns(row)}
            yield {name: told[name] if name in told else getattr(row, name) for name in _SHOWN}


def _moment(at_ns: int | None) -> str:
    return "-" if at_ns is None else f"{rfc3339(at_ns)[:16].replace('T', ' ')} UTC"


@contextmanager
def _database(store: str) -> Iterator[Database]:
    """The service's database, brought up to date.

    Raises:
        ConfigError: it does not answer, or it is a SQLite file that no service has made: a token in it would open nothing.
    """
    settings = settings_for(store, None)
    database = open_encrypted_database(settings)
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
