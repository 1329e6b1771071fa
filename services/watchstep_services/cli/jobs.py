"""``watchstep attach`` and ``watchstep watch``, which run without the service's packages, and the commands of the SDK.

The SDK itself executes ``run``, ``sync``, ``trace``, ``report``, ``samples``, ``skip-list``, ``replay``, ``explain``, ``bundles``, ``diff`` and ``audit``. Their definitions here provide help and shell completion.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
import yaml

from watchstep.errors import ConfigError
from watchstep.platform.terminal_text import printable
from watchstep.wrapper.audit.audit_command import parser as audit_parser
from watchstep.wrapper.diff_command import parser as diff_parser
from watchstep.wrapper.explain_command import parser as explain_parser
from watchstep.wrapper.replay_command import bundles_parser
from watchstep.wrapper.replay_command import parser as replay_parser
from watchstep.wrapper.report_command import parser as report_parser
from watchstep.wrapper.run_command import parser as run_options
from watchstep.wrapper.samples_command import samples_parser, skip_list_parser
from watchstep.wrapper.store_commands import sync_parser
from watchstep.wrapper.trace_command import parser as trace_parser
from watchstep_launch.backend import Backend, open_backend
from watchstep_launch.job import ENDED, Job
from watchstep_launch.view.run_status import RunWatcher
from watchstep_launch.view.show import Showing, kind_of
from watchstep_rules.rule_files import rule_file
from watchstep_services.cli.connection import DEFAULT_STORE, StoreOption, client_of, split_run
from watchstep_services.core.console import echo_json

ServiceOption = Annotated[
    str,
    typer.Option(
        envvar="WATCHSTEP_SERVICE",
        help="URL of the service. Default: the profile's, or the service of the store, which 'attach' starts if none runs.",
    ),
]


def attach(  # noqa: PLR0917 - the options of a command
    run: Annotated[str, typer.Option(help="Run that the job records: its URL, or <project>/<run>.")],
    job: Annotated[str, typer.Option(help="Job: local:PID, slurm:ID, ray:ID or command:ID.")],
    rules: Annotated[Path | None, typer.Option(help="Rule file. Rules with 'stop' may end the job.")] = None,
    backend: Annotated[
        Path | None,
        typer.Option(help="YAML file with the settings of the backend."),
    ] = None,
    backend_name: Annotated[
        str, typer.Option(help="Name of the backend in the service. Default: its kind.")
    ] = "",
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the progress of the run until it ends.")
    ] = False,
) -> None:
    """Attach rules to a job that was launched by other means, so that they can stop it. Safe to repeat. Token: WATCHSTEP_TOKEN, of an operator.

    Examples:
        watchstep attach --run vision/night-1 --job slurm:4711 --rules rules.yaml
        watchstep attach --run s3://bucket/runs/vision/night-1 --job local:12345 --watch
    """
    configs = () if rules is None else rule_file.load(rules)
    opened_backend = None if backend is None else _backend(job.partition(":")[0], backend)
    attached = Job.attach(
        _url(run, store), job, configs, backend=opened_backend, backend_name=backend_name, service=service
    )
    record = attached.record
    typer.echo(printable(f"{record.project}/{record.run}: attempt {record.attempt} is job {job}"))
    for config in configs:
        granted = (
            f" may stop it, and other jobs of project {record.project}, until revoked with "
            f"'watchstep rules revoke-stop {config.name} --project {record.project} --reason WHY'"
        )
        typer.echo(printable(f"  rule {config.name}{granted if config.stops else ''}"))
    if watch:
        attached.wait()


def _url(run: str, store: str) -> str:
    parts = run.strip("/").split("/")
    if len(parts) > 2 or run.startswith(("/", "~")):
        return run
    return "/".join([store.rstrip("/"), *(parts if len(parts) == 2 else ("default", run))])


def _backend(kind: str, file: Path) -> Backend:
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"backend file {file}: cannot be read ({error})", "use a YAML file") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"backend file {file}: contains no settings", f"add the settings of kind {kind!r}")
    return open_backend(kind, settings)


_POLL_SECONDS = 0.5
_JSON_POLL_SECONDS = 2.0


def watch(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="<project>/<run>, or <run> in the default project.")
    ],
    store: StoreOption = DEFAULT_STORE,
    service: ServiceOption = "",
    lines: Annotated[
        bool, typer.Option("--lines", help="Print one line for each event, in a terminal too.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each event as one line of JSON, a CloudEvent.")
    ] = False,
) -> None:
    """Show the progress of a run until it ends: steps, losses, rules, alerts and stops. Token: WATCHSTEP_TOKEN.

    Examples:
        watchstep watch vision/night-1
        watchstep --profile lab watch night-1 --lines
        watchstep watch vision/night-1 --json
    """
    project, name = split_run(run.strip("/"))
    client = client_of(store, service, project)
    client.run(name)  # raises NotFoundError if there is no such run
    watcher = RunWatcher(lambda: client, client.project, name)
    try:
        if as_json:
            _print_events(watcher)
            return
        with Showing(watcher, kind_of(False if lines else None)) as showing:
            while watcher.status.state not in ENDED:
                showing.turn()
                time.sleep(_POLL_SECONDS)
            showing.turn(last=True)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _print_events(watcher: RunWatcher) -> None:
    while True:
        had_ended = watcher.status.state in ENDED  # at the poll before, so that the last poll follows the end
        events = watcher.poll()  # one page
        for event in events:
            echo_json(json.dumps(event.raw))
        if had_ended and not events:
            return
        if not events:
            time.sleep(_JSON_POLL_SECONDS)


app = typer.Typer(
    name="watchstep", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.command("attach")(attach)
app.command("watch")(watch)


@app.callback()
def _options() -> None:
    """Watch training jobs from the inside: record them, evaluate rules while they run, stop and explain them."""


run = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
sync = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
trace = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
report = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
replay = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
explain = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
bundles = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
diff = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
audit = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
samples = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
skip_list = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@run.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _run(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] -- PROGRAM …")] = None,
) -> None:
    """Run a program that records itself, without a change to its code.

    Examples:
        watchstep run -- python train.py
        watchstep run --store s3://bucket/runs -- torchrun --nproc-per-node 8 train.py
    """
    run_options().parse_args(arguments or ["--help"])


@sync.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _sync(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[FOLDER]")] = None,
) -> None:
    """Upload segments that recorders kept on this machine while their store was unreachable. Safe to repeat.

    Examples:
        watchstep sync
    """
    sync_parser().parse_args(arguments or ["--help"])


@samples.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _samples(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] RUN")] = None,
) -> None:
    """Show which samples a step was trained on, or which steps' samples are on the store.

    Examples:
        watchstep samples my-run
        watchstep samples my-run --step 1200
    """
    samples_parser().parse_args(arguments or ["--help"])


@skip_list.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _skip_list(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] RUN")] = None,
) -> None:
    """Write the samples of some steps to a file that a sampler leaves out when the training resumes.

    Examples:
        watchstep skip-list my-run --step 1200 -o skip.json
        watchstep skip-list my-run --steps 1195:1200 -o skip.json
    """
    skip_list_parser().parse_args(arguments or ["--help"])


@replay.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _replay(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="BUNDLE --program FILE.py")] = None,
) -> None:
    """Compute a bundled training step again, and name its first bad operation. Exit code 1 if it is not reproduced.

    Examples:
        watchstep replay runs/default/my-run --program train.py
        watchstep replay s3://bucket/runs/default/my-run --step 5000 --program train.py:replay --precision fp64
    """
    replay_parser().parse_args(arguments or ["--help"])


@explain.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _explain(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="BUNDLE -- PROGRAM …")] = None,
) -> None:
    """Start a program again, compute a bundled step in its own loop, and name the first bad operation. Exit code 1 if it was not computed.

    Examples:
        watchstep explain runs/default/my-run -- python train.py
    """
    explain_parser().parse_args(arguments or ["--help"])


@bundles.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _bundles(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="RUN_OR_BUNDLE")] = None,
) -> None:
    """List the bundles of a run, or show what a bundle contains and lacks.

    Examples:
        watchstep bundles runs/default/my-run
        watchstep bundles 5000-gate.safetensors --json
    """
    bundles_parser().parse_args(arguments or ["--help"])


@trace.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _trace(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] TRACE")] = None,
) -> None:
    """Name the first bad operation of a trace, with its source line. Exit code 1 if there is one.

    Examples:
        watchstep trace step-100.trace
        watchstep trace --operations 100:120 step-100.trace
        watchstep trace --step 5000 s3://bucket/runs/default/my-run
        watchstep trace tensorflow-dump/
    """
    trace_parser().parse_args(arguments or ["--help"])


@report.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _report(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] RUN")] = None,
) -> None:
    """Write what happened to a run as one HTML file that needs no server and no network.

    Examples:
        watchstep report default/my-run -o report.html
        watchstep report s3://bucket/runs/default/my-run
        watchstep report runs/default/my-run --no-service
    """
    report_parser().parse_args(arguments or ["--help"])


@diff.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _diff(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] RUN_A RUN_B")] = None,
) -> None:
    """Show the first step and tensor at which two runs differ, and with traces the first operation. Exit code 1 if they differ.

    Examples:
        watchstep diff night-1 night-2
        watchstep diff night-1 night-2 --exact
        watchstep diff night-1 night-2 --tolerance float32=1e-6 --traces a.trace b.trace
    """
    diff_parser().parse_args(arguments or ["--help"])


@audit.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
def _audit(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[OPTIONS] -- PROGRAM …")] = None,
) -> None:
    """Run a program twice, and report what is not deterministic. Exit code 1 if the runs differ.

    Examples:
        watchstep audit -- python train.py
        watchstep audit --steps 10 --seed 0 -- torchrun --nproc-per-node 2 train.py
    """
    audit_parser().parse_args(arguments or ["--help"])
