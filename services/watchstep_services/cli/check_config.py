"""``watchstep check-config``: whether the service would work as it is configured."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from watchstep_services.checks.configuration import check_configuration
from watchstep_services.cli.service_options import DEFAULT_STORE, Store
from watchstep_services.core.console import echo_json, show, table
from watchstep_services.core.settings import settings_for


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
