"""``watchstep serve``: the whole service in one process."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from sqlalchemy import select

from watchstep.errors import ConfigError
from watchstep_services.channels.secret_fields import read_secret
from watchstep_services.cli.rule_words import after, does, named
from watchstep_services.cli.console_lines import ConsoleOutput
from watchstep_services.cli.service_options import DEFAULT_STORE
from watchstep_services.core.console import echo
from watchstep_services.core.settings import settings_for, warn_of_unknown
from watchstep_services.core.telemetry import exposition, logs, tracing
from watchstep_services.db.figures import DatabaseFigures
from watchstep_services.db.models import RuleConfigRow, RunRow, StopGrant
from watchstep_services.runs.lifecycle import ENDED

if TYPE_CHECKING:
    from watchstep_services.serve.embedded import EmbeddedService
from watchstep_services.core.collector import settle_collector
from watchstep_services.core.file_limit import raise_file_limit
from watchstep_services.service.context import Service

_TELL_SECONDS = 0.5


def serve(
    store: Annotated[
        str, typer.Option(envvar="WATCHSTEP_STORE", help="Folder or URL that holds the runs.")
    ] = DEFAULT_STORE,
    rules: Annotated[
        Path | None,
        typer.Option(envvar="WATCHSTEP_RULES_FILE", help="Your rule file, in place of the default rules."),
    ] = None,
    host: Annotated[str, typer.Option(envvar="WATCHSTEP_HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="WATCHSTEP_PORT", help="Port to listen on; 0 takes a free one.")
    ] = 8642,
    home: Annotated[
        Path | None,
        typer.Option(
            envvar="WATCHSTEP_HOME",
            help="Folder of the service itself; .watchstep in a local store, or in your home.",
        ),
    ] = None,
    receivers: Annotated[
        Path | None,
        typer.Option(
            envvar="WATCHSTEP_RECEIVERS_FILE",
            help="Your file of receivers and routes: who is told of alerts.",
        ),
    ] = None,
) -> None:
    """Watch a store: judge its runs while they go on, keep alerts, stop jobs."""
    # All of the API comes with it: seconds, which no help needs.
    from watchstep_services.serve.embedded import EmbeddedService

    settings = settings_for(store, home, rules_file=rules, receivers_file=receivers, host=host, port=port)
    logs.configure(settings.log, settings.log_level)
    logging.getLogger("uvicorn.error").setLevel(
        logging.WARNING
    )  # that it began and ended, the lines below say
    warn_of_unknown(os.environ)
    raise_file_limit()
    tracing.start("serve")
    with EmbeddedService(settings) as service, _figures(service):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: service.stop_waiting())
        settle_collector()
        teller = ConsoleOutput(service.database)
        echo(f"watchstep: watching {service.service.settings.store}")
        for line in (*_rules_of(service.service), *_receivers_of(service.service)):
            echo(f"watchstep: {line}")
        echo(f"watchstep: {service.url} (API at {service.url}/docs; Ctrl-C ends it)")
        while not service.wait(_TELL_SECONDS):
            _tell(teller)
        _tell(teller)
    tracing.stop()


@contextmanager
def _figures(service: EmbeddedService) -> Iterator[None]:
    end = exposition.serve(service.settings, exposition.registry(DatabaseFigures(service.database)))
    try:
        yield
    finally:
        end()


def _rules_of(service: Service) -> Iterator[str]:
    """By what runs are judged."""
    configs = service.owner_rules
    for config in configs:
        words = ", ".join([config.severity, f"after {after(config)}", *does(config)])
        yield f"rule {named(config)} ({words})"
        for warning in service.unknown_receivers(config):
            yield f"rule {config.name}: {warning}"
    if not configs:
        yield "the rule file has no rules: nothing judges but rules of runs and projects"
    yield f"may stop jobs: {', '.join(_may_stop(service)) or 'no rule'}"


def _may_stop(service: Service) -> Iterator[str]:
    """All rules that may stop a job now: the owner's or the default ones, and those that operators allowed."""
    whose = "default rule" if service.settings.rules_file is None else "of your rule file"
    yield from (f"{config.name} ({whose})" for config in service.owner_rules if config.stops)
    with service.database.read() as session:
        granted = session.execute(
            select(StopGrant.project, StopGrant.name).filter_by(revoked_ns=None).order_by(StopGrant.id)
        )
        yield from (f"{name} (allowed by an operator in project {project})" for project, name in granted)
        earlier = session.execute(
            select(RunRow.project, RunRow.run, RuleConfigRow.name)
            .join(RunRow, RunRow.id == RuleConfigRow.run_id)
            .where(RuleConfigRow.granted_stop, RuleConfigRow.origin != "owner", RunRow.state.not_in(ENDED))
        )
        yield from (
            f"{name} (allowed by an operator for run {project}/{run})" for project, run, name in earlier
        )


def _receivers_of(service: Service) -> Iterator[str]:
    """Who is told, and which secrets are missing."""
    for receiver in service.receiver_file.receivers:
        yield f"receiver {receiver.name} ({receiver.kind})"
        for field, secret in receiver.secrets().items():
            try:
                receiver.check_secret(field, read_secret(field, secret))
            except ConfigError as error:
                yield f"receiver {receiver.name}: {error.what}"


def _tell(teller: ConsoleOutput) -> None:
    for line in teller.new_lines():
        echo(line)
