"""``watchstep serve``: the whole service in one process."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from watchstep.store import checked_scheme
from watchstep_services.scheduler.embedded import EmbeddedService
from watchstep_services.settings import Settings, load_settings

DEFAULT_STORE = "watchstep-runs"


def serve(
    store: Annotated[
        str, typer.Option(envvar="WATCHSTEP_STORE", help="Folder or URL that holds the runs.")
    ] = DEFAULT_STORE,
    rules: Annotated[Path | None, typer.Option(help="Your rule file. Only its rules may stop jobs.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8642,
    home: Annotated[
        Path | None,
        typer.Option(help="Folder of the service itself; .watchstep in a local store, or in your home."),
    ] = None,
) -> None:
    """Watch a store: judge its runs while they go on, keep alerts, stop jobs."""
    settings = settings_for(store, home, rules_file=rules, host=host, port=port)
    with EmbeddedService(settings) as service:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: service.stop_waiting())
        typer.echo(f"watchstep: watching {service.service.settings.store}")
        for config in service.service.owner_rules:
            stops = ", stops the job" if config.stops else ""
            typer.echo(
                f"watchstep: rule {config.name} ({config.severity}, after {config.hold.steps} steps{stops})"
            )
        if not any(config.stops for config in service.service.owner_rules):
            typer.echo("watchstep: none of your rules stops a job")
        typer.echo(f"watchstep: {service.url} (API at {service.url}/docs; Ctrl-C ends it)")
        service.wait()


def settings_for(store: str, home: Path | None, **values: Any) -> Settings:
    """Settings of an embedded service for a store; its home is in the store where that is a folder.

    Raises:
        ConfigError: a value cannot be used.
    """
    if home is not None:
        values["home"] = home
    elif not checked_scheme(store):
        values["home"] = Path(store).expanduser().absolute() / ".watchstep"
    return load_settings(store=store, **values)
