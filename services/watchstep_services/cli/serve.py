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

from watchstep.errors import ConfigError
from watchstep_services import exposition, logs, tracing
from watchstep_services.cli import rule_words
from watchstep_services.cli.service_options import DEFAULT_STORE
from watchstep_services.cli.telling import Teller
from watchstep_services.database_figures import DatabaseFigures
from watchstep_services.dispatcher.receivers.secret_fields import read_secret
from watchstep_services.embedded_settings import settings_for
from watchstep_services.unknown_variables import warn_of_unknown

if TYPE_CHECKING:
    from watchstep_services.scheduler.embedded import EmbeddedService
    from watchstep_services.service import Service

_TELL_SECONDS = 0.5


def serve(
    store: Annotated[
        str, typer.Option(envvar="WATCHSTEP_STORE", help="Folder or URL that holds the runs.")
    ] = DEFAULT_STORE,
    rules: Annotated[
        Path | None,
        typer.Option(envvar="WATCHSTEP_RULES_FILE", help="Your rule file. Only its rules may stop jobs."),
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
    from watchstep_services.scheduler.embedded import EmbeddedService

    settings = settings_for(store, home, rules_file=rules, receivers_file=receivers, host=host, port=port)
    logs.configure(settings.log, settings.log_level)
    logging.getLogger("uvicorn.error").setLevel(
        logging.WARNING
    )  # that it began and ended, the lines below say
    warn_of_unknown(os.environ)
    tracing.start("serve")
    with EmbeddedService(settings) as service, _figures(service):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: service.stop_waiting())
        teller = Teller(service.database)
        typer.echo(f"watchstep: watching {service.service.settings.store}")
        for line in (*_rules_of(service.service), *_receivers_of(service.service)):
            typer.echo(f"watchstep: {line}")
        typer.echo(f"watchstep: {service.url} (API at {service.url}/docs; Ctrl-C ends it)")
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
        words = ", ".join([config.severity, f"after {rule_words.after(config)}", *rule_words.does(config)])
        yield f"rule {rule_words.named(config)} ({words})"
        for warning in service.unknown_receivers(config):
            yield f"rule {config.name}: {warning}"
    if not configs:
        yield "the rule file has no rules: nothing judges but what recorders ask for"
    elif not any(config.stops for config in configs):
        yield "none of your rules stops a job"


def _receivers_of(service: Service) -> Iterator[str]:
    """Who is told, and which secrets are missing."""
    for receiver in service.receiver_file.receivers:
        yield f"receiver {receiver.name} ({receiver.kind})"
        for field, secret in receiver.secrets().items():
            try:
                receiver.check_secret(field, read_secret(field, secret))
            except ConfigError as error:
                yield f"receiver {receiver.name}: {error.what}"


def _tell(teller: Teller) -> None:
    for line in teller.new_lines():
        typer.echo(line)
