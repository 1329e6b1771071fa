"""``watchstep attach``: have a job that others launched judged and stopped. It needs none of the service's packages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from watchstep.errors import ConfigError
from watchstep.platform.terminal_text import printable
from watchstep_launch.backend import Backend
from watchstep_launch.backend_registry import open_backend
from watchstep_launch.job import Job
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
