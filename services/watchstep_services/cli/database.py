"""``watchstep database``: the schema of the service's database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from watchstep_services.database import schema
from watchstep_services.database.engine import Database, open_database
from watchstep_services.settings import load_settings

app = typer.Typer(
    help="The schema of the database of WATCHSTEP_DATABASE_URL or WATCHSTEP_HOME.", no_args_is_help=True
)


@app.command("status")
def status() -> None:
    """Which revision the database has, and which this version of Watchstep needs. Exit code 1 where they differ."""
    with _opened() as database:
        found = schema.status(database)
        typer.echo(f"database {database.shown_url}: {found}")
        raise typer.Exit(0 if found.is_current else 1)


@app.command("upgrade")
def upgrade(
    revision: Annotated[str, typer.Argument(help="How far; the newest that is known.")] = "head",
) -> None:
    """Bring the schema up to date. Several at once wait for each other; the first does it."""
    with _opened() as database:
        schema.upgrade(database, schema.checked_revision(revision))
        typer.echo(f"database {database.shown_url}: {schema.status(database)}")


@app.command("downgrade")
def downgrade(
    revision: Annotated[str, typer.Argument(help="To which revision; 'base' removes every table.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Go back to an earlier schema. What only later ones hold is lost. Stop the service first."""
    with _opened() as database:
        wanted = schema.checked_revision(revision)
        if not yes:
            typer.confirm(
                f"{database.shown_url}: go back to {wanted}, and lose what it cannot hold?", abort=True
            )
        schema.downgrade(database, wanted)
        typer.echo(f"database {database.shown_url}: {schema.status(database)}")


@contextmanager
def _opened() -> Iterator[Database]:
    database = open_database(load_settings().resolved_database_url)
    try:
        database.check()
        yield database
    finally:
        database.close()
