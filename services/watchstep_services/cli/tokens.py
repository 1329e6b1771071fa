"""``watchstep tokens``: creates, lists and revokes tokens of a service's API.

By default it uses the service's database, so that no token is needed to create the first one; with --service, the API.
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
from watchstep_services.auth import (
    LIFETIME_SECONDS,
    MAX_LIFETIME,
    ROLES,
    Role,
    RunTokenRequest,
    create_for_run,
    create_token,
    ends_ns,
    id_of,
    of_project,
    revoke,
    state_of,
)
from watchstep_services.cli.connection import DEFAULT_STORE, JsonOption, StoreOption, call, service_of
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
_CREATOR = "command line"
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_COLUMNS = (
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
    typer.Option("--service", help="URL of the service. Token: WATCHSTEP_TOKEN. Default: use its database."),
]

RunOption = Annotated[
    str, typer.Option("--run", help="Restrict the token to this run of --project, or of project default.")
]


def _lifetime(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_LIFETIME:
        raise typer.BadParameter("use a number and s, m, h or d, up to ten years, for example 90d")
    return seconds


@app.command("create")
def create(
    role: Annotated[str, typer.Option(help=f"Role: {', '.join(ROLES)}. Default with --run: recorder.")] = "",
    project: Annotated[
        str | None, typer.Option(help="Restrict the token to this project. Default: all projects.")
    ] = None,
    *,
    run: RunOption = "",
    name: Annotated[str, typer.Option(help="Name of the user or program of the token.")] = "",
    expires_in: Annotated[
        str,
        typer.Option(help="Lifetime, e.g. 90d or 12h. Default: unlimited; 90d with --run."),
    ] = "",
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Create a token for the service of a store on this machine, or of WATCHSTEP_DATABASE_URL. It is printed once.

    Examples:
        watchstep tokens create --role operator --project vision --expires-in 90d
        watchstep tokens create --project vision --run night-1
    """
    if run and role not in {"", "recorder"}:
        raise typer.BadParameter("a token of one run must have the role recorder", param_hint="--role")
    if not run and role not in ROLES:
        raise typer.BadParameter(f"use one of {', '.join(ROLES)}", param_hint="--role")
    lifetime = _lifetime(expires_in) if expires_in else LIFETIME_SECONDS if run else None
    requested = _TokenInput(role or "recorder", _TokenScope.of(project, run), name, lifetime)
    token, location = (
        _create_by_service(requested, service) if service else _create_in_database(requested, store)
    )
    role = f"{requested.role} of {requested.scope.shown}"
    echo(f"{role} in {location}, id {id_of(token)}; the token is shown once:", err=True)
    echo_own(token)


@app.command("list")
def list_tokens(
    project: Annotated[str | None, typer.Option(help="Only tokens of this project.")] = None,
    run: RunOption = "",
    as_json: JsonOption = False,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """List tokens, without their secrets.

    Examples:
        watchstep tokens list --project vision
        watchstep tokens list --json
    """
    scope = _TokenScope.of(project, run)
    rows = list(_rows_of_service(service, scope) if service else _rows_of_database(scope, store))
    if as_json:
        echo_json(json.dumps(rows, indent=2))
        return
    output = table("=id", "=name", "role", "project", "state", "expires", "last used", "created by")
    for row in rows:
        project_shown = f"{row['project']}/{row['run']}" if row["run"] else row["project"] or "(all)"
        used, expires = _moment(row["last_used_ns"]), _moment(row["expires_ns"])
        output.add_row(
            row["id"], row["name"], row["role"], project_shown, row["state"], expires, used, row["created_by"]
        )
    show(output)


@app.command("revoke")
def revoke_token(
    token: Annotated[str, typer.Argument(help="Id of the token, or the token itself.")],
    project: Annotated[
        str | None,
        typer.Option(
            help="Project of the token; required with the token of an administrator of one project."
        ),
    ] = None,
    run: RunOption = "",
    keep_created: Annotated[
        bool,
        typer.Option(
            "--keep-created", help="Keep the run tokens that the token created, so that their jobs continue."
        ),
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
) -> None:
    """Revoke a token, effective from its next request, and the run tokens that it created.

    Examples:
        watchstep tokens revoke wst_0123456789abcdef
        watchstep tokens revoke wst_0123456789abcdef --keep-created
    """
    public = id_of(token) if token.startswith(("wst_", "ws_")) else token
    scope = _TokenScope.of(project, run)
    if service:
        query = "?keep_created=true" if keep_created and not run else ""
        answer = _request("DELETE", service, scope, f"/{quote(public, safe='')}{query}", None)
        run_tokens = answer["run_tokens"]
    else:
        with _database(store) as database:
            result = revoke(
                database, public, scope.project, _CREATOR, run=scope.run, keep_created=keep_created
            )
            run_tokens = result.run_tokens
    echo(
        f"token {public} is revoked"
        + (f"; run tokens revoked with it: {len(run_tokens)}" if run_tokens else "")
    )


@dataclass(frozen=True)
class _TokenScope:
    """Scope of tokens: all projects, one project, or one run."""

    project: str | None
    run: str | None = None

    @classmethod
    def of(cls, project: str | None, run: str) -> _TokenScope:
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
class _TokenInput:
    """A token to create."""

    role: str
    scope: _TokenScope
    name: str
    lifetime: int | None


def _create_by_service(requested: _TokenInput, service: str) -> tuple[str, str]:
    """Create a token through the API. Returns it and the URL of the service."""
    body = {"name": requested.name or f"created by {_CREATOR}", "lifetime_seconds": requested.lifetime}
    if requested.scope.run is None:  # a token of one run always has the role recorder
        body["role"] = requested.role
    return str(_request("POST", service, requested.scope, "", body)["token"]), service


def _create_in_database(requested: _TokenInput, store: str) -> tuple[str, str]:
    """Create a token in the database, where no role limits it. Returns it and the URL of the database."""
    scope = requested.scope
    with _database(store) as database:
        if scope.project is not None and scope.run is not None and requested.lifetime is not None:
            request = RunTokenRequest(scope.project, scope.run, requested.name, requested.lifetime)
            token = create_for_run(database, request, _CREATOR)
        else:
            token = create_token(
                database,
                cast("Role", requested.role),
                scope.project,
                name=requested.name,
                created_by=_CREATOR,
                lifetime_seconds=requested.lifetime,
            )
        return token, database.engine.url.render_as_string(hide_password=True)


def _request(
    method: str, service: str, scope: _TokenScope, rest: str, body: dict[str, Any] | None
) -> dict[str, Any]:
    url, token = service_of("", service)
    return call(method, f"{url}{scope.path}{rest}", token, body)


def _rows_of_service(service: str, scope: _TokenScope) -> Iterator[dict[str, Any]]:
    rest = "?limit=1000"
    while rest:
        answer = _request("GET", service, scope, rest, None)
        yield from ({name: row.get(name) for name in _COLUMNS} for row in answer["tokens"])
        next_page = answer["next_page_token"]
        rest = f"?limit=1000&page_token={next_page}" if next_page else ""


def _rows_of_database(scope: _TokenScope, store: str) -> Iterator[dict[str, Any]]:
    with _database(store) as database, database.read() as session:
        now = read_clock(session)
        statement = (
            select(Token)
            .where(*of_project(scope.project, scope.run))
            .order_by(Token.created_ns.desc(), Token.id)
        )
        for row in session.execute(statement).scalars():
            computed = {"state": state_of(row, now), "expires_ns": ends_ns(row)}
            yield {name: computed[name] if name in computed else getattr(row, name) for name in _COLUMNS}


def _moment(at_ns: int | None) -> str:
    return "-" if at_ns is None else f"{rfc3339(at_ns)[:16].replace('T', ' ')} UTC"


@contextmanager
def _database(store: str) -> Iterator[Database]:
    """Open the service's database, with an up-to-date schema.

    Raises:
        ConfigError: the database does not respond, or is a SQLite file that does not exist, so that no service uses it.
    """
    settings = settings_for(store, None)
    database = open_encrypted_database(settings)
    try:
        path = database.engine.url.database
        if database.engine.dialect.name == "sqlite" and path and not Path(path).is_file():
            raise ConfigError(
                f"database {path}: no such file",
                "set --store to the store that the service watches, or WATCHSTEP_DATABASE_URL to its database",
            )
        database.check()
        upgrade(database)
        yield database
    finally:
        database.close()
