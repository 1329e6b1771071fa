"""``watchstep database``, for the schema of the service's database, and ``watchstep check-config``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from watchstep_services.checks import check_configuration
from watchstep_services.cli.connection import DEFAULT_STORE, JsonOption, StoreOption
from watchstep_services.core.console import echo, echo_json, show, show_json, table
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
def status(store: StoreOption = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Show the schema revision of the database, and the revision that this version needs. Exit code 1 if they differ.

    Examples:
        watchstep database status
        watchstep database status --json
    """
    with _opened(store) as database:
        state = schema.status(database)
        if as_json:
            show_json({"database": database.shown_url, "status": str(state), "current": state.is_current})
        else:
            echo(f"database {database.shown_url}: {state}")
        raise typer.Exit(0 if state.is_current else 1)


@app.command("upgrade")
def upgrade(
    revision: Annotated[str, typer.Argument(help="Target revision. Default: the newest.")] = "head",
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Upgrade the schema. Concurrent upgrades wait for the first one.

    Examples:
        watchstep database upgrade
    """
    with _opened(store) as database:
        schema.upgrade(database, schema.checked_revision(revision))
        echo(f"database {database.shown_url}: {schema.status(database)}")


@app.command("downgrade")
def downgrade(
    revision: Annotated[str, typer.Argument(help="Target revision; 'base' removes every table.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Downgrade the schema. Data that only later revisions contain is lost. Stop the service first.

    Examples:
        watchstep database downgrade 0019 --yes
    """
    with _opened(store) as database:
        target = schema.checked_revision(revision)
        if not yes:
            typer.confirm(
                f"{database.shown_url}: downgrade to {target}, and lose data of later revisions?",
                abort=True,
            )
        schema.downgrade(database, target)
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
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Check a capture file, or without one the configuration of the service: connects to database, broker and stores. Exit code 1 if a check fails.

    Examples:
        watchstep check-config capture.yaml
        watchstep check-config --store s3://bucket/runs
        watchstep check-config --json
    """
    settings = settings_for(store, None)
    results = list(check_configuration(settings))
    failing = any(result.state == "failed" for result in results)
    if as_json:
        echo_json(json.dumps({"ok": not failing, "checks": [result.as_data() for result in results]}))
    else:
        rows = table("check", "state", "result", "hint")
        for result in results:
            rows.add_row(result.what, result.state, result.detail, result.hint)
        show(rows)
    raise typer.Exit(1 if failing else 0)
