"""``watchstep database``: the schema of the service's database.

``watchstep check-config``: whether the service would work as it is configured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from watchstep_services.checks import check_configuration
from watchstep_services.cli.connection import DEFAULT_STORE, Store
from watchstep_services.core.console import echo, echo_json, show, table
from watchstep_services.core.settings import settings_for
from watchstep_services.db import schema
from watchstep_services.db.encryption import open_encrypted_database
from watchstep_services.db.engine import Database

app = typer.Typer(
    help="The schema of the database of WATCHSTEP_DATABASE_URL, or of the service of a store on this machine.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command("status")
def status(store: Store = DEFAULT_STORE) -> None:
    """Which revision the database has, and which this version of Watchstep needs. Exit code 1 where they differ."""
    with _opened(store) as database:
        found = schema.status(database)
        echo(f"database {database.shown_url}: {found}")
        raise typer.Exit(0 if found.is_current else 1)


@app.command("upgrade")
def upgrade(
    revision: Annotated[str, typer.Argument(help="How far; the newest that is known.")] = "head",
    store: Store = DEFAULT_STORE,
) -> None:
    """Bring the schema up to date. Several at once wait for each other; the first does it."""
    with _opened(store) as database:
        schema.upgrade(database, schema.checked_revision(revision))
        echo(f"database {database.shown_url}: {schema.status(database)}")


@app.command("downgrade")
def downgrade(
    revision: Annotated[str, typer.Argument(help="To which revision; 'base' removes every table.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    store: Store = DEFAULT_STORE,
) -> None:
    """Go back to an earlier schema. What only later ones hold is lost. Stop the service first."""
    with _opened(store) as database:
        wanted = schema.checked_revision(revision)
        if not yes:
            typer.confirm(
                f"{database.shown_url}: go back to {wanted}, and lose what it cannot hold?", abort=True
            )
        schema.downgrade(database, wanted)
        echo(f"database {database.shown_url}: {schema.status(database)}")


@contextmanager
def _opened(store: str) -> Iterator[Database]:
    settings = settings_for(store, None)
    database = open_encrypted_database(settings)
    try:
        database.check()
        yield database
    finally:
        database.close()


def check_config(
    store: Store = DEFAULT_STORE,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Try every connection of the service: database, broker, stores. Exit code 1 where one does not work."""
    settings = settings_for(store, None)
    found = list(check_configuration(settings))
    failing = any(each.state == "failed" for each in found)
    if as_json:
        echo_json(json.dumps({"ok": not failing, "checks": [each.as_data() for each in found]}))
    else:
        shown = table("check", "state", "found", "hint")
        for each in found:
            shown.add_row(each.what, each.state, each.detail, each.hint)
        show(shown)
    raise typer.Exit(1 if failing else 0)
