"""All checks, in the order in which one wants to correct what they find."""

from __future__ import annotations

import os
from collections.abc import Iterator

from watchstep.errors import WatchstepError
from watchstep_services.checks.broker import check_broker
from watchstep_services.checks.database import check_database
from watchstep_services.checks.finding import CheckFinding, failed
from watchstep_services.checks.queues import check_queues
from watchstep_services.checks.stores import check_stores
from watchstep_services.core.settings import Settings, unknown_variables
from watchstep_services.core.telemetry import tracing
from watchstep_services.db.sealing import open_sealed_database
from watchstep_services.service.context import owner_receivers, owner_rules


def check_configuration(settings: Settings) -> Iterator[CheckFinding]:
    """Try everything that the service needs. No object and no row is left behind."""
    yield from _variables()
    yield from _files(settings)
    try:
        database = open_sealed_database(settings)
    except WatchstepError as error:
        yield failed("database", error)
        yield from _broker(settings)
        yield from check_stores(settings, None)
        return
    try:
        found = list(check_database(database, settings))
        yield from found
        yield from _broker(settings)
        yield from check_stores(settings, database if found[0].state == "ok" else None)
    finally:
        database.close()


def _broker(settings: Settings) -> Iterator[CheckFinding]:
    found = check_broker(settings)
    yield found
    if found.state == "ok":
        yield from check_queues(settings)


def _variables() -> Iterator[CheckFinding]:
    unknown = list(unknown_variables(os.environ))
    for name, meant in unknown:
        hint = (
            f"did you mean {meant}?"
            if meant
            else "remove it; docs/reference/settings.md has those that there are"
        )
        yield CheckFinding(f"variable {name}", "failed", "no such setting", hint)
    if not unknown:
        yield CheckFinding("settings", "ok", "every WATCHSTEP_ variable is known")
    asked = any(os.environ.get(name) for name in tracing.ENDPOINTS)
    if asked and not tracing.wanted():
        yield CheckFinding(
            "traces", "warning", "asked for, and not installed", "pip install 'watchstep[telemetry]'"
        )


def _files(settings: Settings) -> Iterator[CheckFinding]:
    try:
        rules = owner_rules(settings)
        yield CheckFinding("rules", "ok", f"{len(rules)}, from {settings.rules_file or 'the defaults'}")
    except WatchstepError as error:
        yield failed("rules", error)
    try:
        receivers = owner_receivers(settings)
        yield CheckFinding(
            "receivers", "ok", f"{len(receivers.names)}, from {settings.receivers_file or 'no file'}"
        )
    except WatchstepError as error:
        yield failed("receivers", error)
