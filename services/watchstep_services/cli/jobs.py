"""``watchstep attach`` and ``watchstep watch``, for machines without the service's packages.

``attach`` has a job that others launched judged and stopped. ``watch`` shows a run until it has ended.

``watchstep run`` and ``watchstep sync``, for help and completion: the SDK runs both by itself, before it loads this package.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
import yaml

from watchstep.capture.service.location import find_service
from watchstep.client import Client
from watchstep.errors import ConfigError, ServiceError
from watchstep.platform.terminal_text import printable
from watchstep.store.store import checked_scheme
from watchstep.wrapper.run_command import parser as run_options
from watchstep.wrapper.store_commands import migrate_parser, sync_parser
from watchstep_launch.backend import Backend
from watchstep_launch.backend_registry import open_backend
from watchstep_launch.job import ENDED, Job
from watchstep_launch.view.run_status import RunWatcher
from watchstep_launch.view.show import Showing, kind_of
from watchstep_rules.rule_files import rule_file

DEFAULT_STORE = "watchstep-runs"

StoreOption = Annotated[
    str, typer.Option(envvar="WATCHSTEP_STORE", help="Folder or URL that holds runs named without one.")
]
ServiceOption = Annotated[
    str,
    typer.Option(
        envvar="WATCHSTEP_SERVICE",
        help="URL of the service; the one of the store, or one that is started beside it, if left out.",
    ),
]


def attach(  # noqa: PLR0917 - the options of a command
    run: Annotated[
        str, typer.Option(help="The run that the job records: its whole URL, or <project>/<run>.")
    ],
    job: Annotated[str, typer.Option(help="The job: local:PID, slurm:ID, ray:ID, command:ID.")],
    rules: Annotated[Path | None, typer.Option(help="A rule file; its 'stop' may end the job.")] = None,
    backend: Annotated[
        Path | None,
        typer.Option(help="YAML file with the backend's settings, where they are not its defaults."),
    ] = None,
    backend_name: Annotated[
        str, typer.Option(help="Under which the service knows the backend; its kind if left out.")
    ] = "",
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    watch: Annotated[bool, typer.Option("--watch", help="Show how it goes, until it has ended.")] = False,
) -> None:
    """Have a job that was launched by other means judged by rules, and stopped by them. Safe to repeat. Token: WATCHSTEP_TOKEN, of an operator."""
    configs = () if rules is None else rule_file.load(rules)
    made = None if backend is None else _backend(job.partition(":")[0], backend)
    attached = Job.attach(
        _url(run, store), job, configs, backend=made, backend_name=backend_name, service=service
    )
    record = attached.record
    typer.echo(printable(f"{record.project}/{record.run}: attempt {record.attempt} is job {job}"))
    for config in configs:
        typer.echo(printable(f"  rule {config.name}{' may stop it' if config.stops else ''}"))
    if watch:
        attached.wait()


def _url(run: str, store: str) -> str:
    parts = run.strip("/").split("/")
    if len(parts) > 2 or run.startswith(("/", "~")):
        return run
    return "/".join([store.rstrip("/"), *(parts if len(parts) == 2 else ("default", run))])


def _backend(kind: str, file: Path) -> Backend:
    try:
        held = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"backend file {file}: cannot be read ({error})", "give a YAML file") from error
    if not isinstance(held, dict):
        raise ConfigError(f"backend file {file}: holds no settings", f"give the settings of kind {kind!r}")
    return open_backend(kind, held)


_LOOK_SECONDS = 0.5


def watch(
    run: Annotated[str, typer.Argument(help="The run's id, or <project>/<run>.")],
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    lines: Annotated[bool, typer.Option("--lines", help="A line for each event, in a terminal too.")] = False,
) -> None:
    """Show how a run goes: steps, losses, rules, alerts and stops, until it has ended or Ctrl-C. Token: WATCHSTEP_TOKEN."""
    project, _, name = run.strip("/").rpartition("/")
    url = store if checked_scheme(store) else Path(store).expanduser().absolute().as_uri()
    found = find_service(service, url)
    if found is None:
        raise ServiceError(
            f"no service runs for {store}",
            "start 'watchstep serve' on it, or give --service and WATCHSTEP_TOKEN",
        )
    client = Client(found.operator.url, found.operator.token, project or "default")
    client.run(name)  # whether there is such a run
    watcher = RunWatcher(lambda: client, client.project, name)
    try:
        with Showing(watcher, kind_of(False if lines else None)) as showing:
            while watcher.sight.state not in ENDED:
                showing.turn()
                time.sleep(_LOOK_SECONDS)
            showing.turn(last=True)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


app = typer.Typer(
    name="watchstep", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.command("attach")(attach)
app.command("watch")(watch)


@app.callback()
def _options() -> None:
    """Watches training jobs from the inside: records, judges while they run, stops, explains."""


run = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
sync = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
migrate_store = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@run.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _run(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] -- PROGRAM …")] = None,
) -> None:
    """Start a program so that it records itself, with no change to it."""
    run_options().parse_args(arguments or ["--help"])


@sync.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _sync(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[FOLDER]")] = None,
) -> None:
    """Upload what recorders left on this machine when their store could not be reached. Safe to repeat."""
    sync_parser().parse_args(arguments or ["--help"])


@migrate_store.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _migrate_store(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] STORE")] = None,
) -> None:
    """Rewrite runs that an earlier version recorded with the names that this version reads. Safe to repeat."""
    migrate_parser().parse_args(arguments or ["--help"])
