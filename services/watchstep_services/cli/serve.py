"""``watchstep serve``: the whole service in one process, and its console output.

The output contains alerts with explanations, stops, and failures of rules, webhooks and receivers. Failures are reported because a rule
that cannot be evaluated never raises an alert, and an alert is lost if its receiver fails.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple
from urllib.parse import urlsplit

import typer
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError
from watchstep_rules.config.defaults import DEFAULT_RULES
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.engine.judge import RuleHealth
from watchstep_services.channels.receiver import read_secret
from watchstep_services.cli.connection import DEFAULT_STORE, StoreOption
from watchstep_services.cli.rules import actions_of, fires_after, name_of
from watchstep_services.cli.runs.events import lines_of
from watchstep_services.core.console import echo
from watchstep_services.core.process import raise_file_limit, settle_collector
from watchstep_services.core.settings import settings_for, warn_of_unknown
from watchstep_services.core.telemetry import logs, metrics, tracing
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.metrics import DatabaseFigures
from watchstep_services.db.models import ActionRow, EventRow, RuleConfigRow, RuleStateRow, RunRow, StopGrant
from watchstep_services.notify.flush import NOTIFY
from watchstep_services.runs.lifecycle import ENDED
from watchstep_services.service.context import Service
from watchstep_services.service.judging import memory_of

if TYPE_CHECKING:
    from watchstep_services.serve.embedded import EmbeddedService


_PRINT_SECONDS = 0.5


def serve(
    store: StoreOption = DEFAULT_STORE,
    rules: Annotated[
        Path | None,
        typer.Option(envvar="WATCHSTEP_RULES_FILE", help="Rule file, instead of the default rules."),
    ] = None,
    host: Annotated[str, typer.Option(envvar="WATCHSTEP_HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="WATCHSTEP_PORT", help="Port to listen on; 0 selects a free port.")
    ] = 8642,
    home: Annotated[
        Path | None,
        typer.Option(
            envvar="WATCHSTEP_HOME",
            help="Folder of the database and the service note. Default: .watchstep in a local store, else in the home folder.",
        ),
    ] = None,
    receivers: Annotated[
        Path | None,
        typer.Option(
            envvar="WATCHSTEP_RECEIVERS_FILE",
            help="Receivers file: receivers of alerts and their routes.",
        ),
    ] = None,
) -> None:
    """Run the service for a store: evaluate its runs while they record, manage alerts, stop jobs.

    Examples:
        watchstep serve
        watchstep serve --store s3://bucket/runs --rules rules.yaml --port 8642
    """
    # Imports the whole API, which takes seconds that the help does not need.
    from watchstep_services.serve.embedded import EmbeddedService

    settings = settings_for(store, home, rules_file=rules, receivers_file=receivers, host=host, port=port)
    logs.configure(settings.log, settings.log_level)
    # The lines below report the start and the end.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    warn_of_unknown(os.environ)
    raise_file_limit()
    tracing.start("serve")
    with EmbeddedService(settings) as service, _figures(service):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: service.stop_waiting())
        settle_collector()
        output = ConsoleOutput(service.database)
        echo(f"watchstep: watching {service.service.settings.store}")
        for line in (*_rule_lines(service.service), *_receiver_lines(service.service)):
            echo(f"watchstep: {line}")
        echo(f"watchstep: {service.url} (API at {service.url}/docs; press Ctrl-C to end)")
        if sys.stdout.isatty():  # no log contains the token
            echo(f"watchstep: open {service.page_link}")
            echo(
                "watchstep: the link logs in as an administrator for 12 hours, also after a restart; do not share it"
            )
        while not service.wait(_PRINT_SECONDS):
            _print_new_lines(output)
        _print_new_lines(output)
    tracing.stop()


@contextmanager
def _figures(service: EmbeddedService) -> Iterator[None]:
    end = metrics.serve(service.settings, metrics.registry(DatabaseFigures(service.database)))
    try:
        yield
    finally:
        end()


def _rule_lines(service: Service) -> Iterator[str]:
    """Yield the owner's rules, and the rules that may stop jobs."""
    configs = service.owner_rules
    for config in configs:
        actions = ", ".join([config.severity, f"after {fires_after(config)}", *actions_of(config)])
        yield f"rule {name_of(config)} ({actions})"
        for warning in service.unknown_receivers(config):
            yield f"rule {config.name}: {warning}"
    if not configs:
        yield "the rule file has no rules: only rules of runs and projects are evaluated"
    yield f"may stop jobs: {', '.join(_may_stop(service)) or 'no rule'}"


def _may_stop(service: Service) -> Iterator[str]:
    """Yield all rules that may stop a job: the owner's or the default ones, and those that operators allowed."""
    has_file = service.settings.rules_file is not None
    yield from (
        f"{config.name} ({source_of(config, has_file=has_file)})"
        for config in service.owner_rules
        if config.stops
    )
    with service.database.read() as session:
        grants = session.execute(
            select(StopGrant.project, StopGrant.name).filter_by(revoked_ns=None).order_by(StopGrant.id)
        )
        yield from (f"{name} (allowed by an operator in project {project})" for project, name in grants)
        run_grants = session.execute(
            select(RunRow.project, RunRow.run, RuleConfigRow.name)
            .join(RunRow, RunRow.id == RuleConfigRow.run_id)
            .where(RuleConfigRow.granted_stop, RuleConfigRow.origin != "owner", RunRow.state.not_in(ENDED))
        )
        yield from (
            f"{name} (allowed by an operator for run {project}/{run})" for project, run, name in run_grants
        )


def source_of(config: RuleConfig, *, has_file: bool) -> str:
    """Return where a rule config of the owner comes from.

    The rule file is not read again, because it may be a pipe. A rule config that the file includes by ``extends: defaults`` and does
    not override equals a default rule config, except for its ``inhibits``: the section ``inhibit`` of the file adds to them.
    """
    unchanged = any(config.model_copy(update={"inhibits": each.inhibits}) == each for each in DEFAULT_RULES)
    return "default rule" if unchanged or not has_file else "of your rule file"


def _receiver_lines(service: Service) -> Iterator[str]:
    """Yield the owner's receivers, and problems with their secrets."""
    for receiver in service.receiver_file.receivers:
        yield f"receiver {receiver.name} ({receiver.kind})"
        for field, secret in receiver.secrets().items():
            try:
                receiver.check_secret(field, read_secret(field, secret))
            except ConfigError as error:
                yield f"receiver {receiver.name}: {error.what}"


def _print_new_lines(output: ConsoleOutput) -> None:
    for line in output.new_lines():
        echo(line)


_IN_ERROR = f'"health":"{RuleHealth.ERROR.value}"'


class _FailedRule(NamedTuple):
    run_id: int
    run: str
    rule: str


class RuleProblems:
    """Reports when a rule config of a run fails, and when it is evaluated again.

    Ignores runs that ended before its creation. For other runs it also reports rule configs that already fail.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._failed: dict[tuple[int, str], _FailedRule] = {}
        with database.read() as session:
            rows = session.execute(select(RunRow.id, RunRow.ticks).where(RunRow.ended_ns.is_not(None))).all()
            self._ticks: dict[int, int] = {row.id: row.ticks for row in rows}

    def new_lines(self) -> list[str]:
        """Return lines for changes since the last call. Only runs that were evaluated since then are checked."""
        lines: list[str] = []
        with self._database.read() as session:
            rows = session.execute(select(RunRow.id, RunRow.ticks).order_by(RunRow.id)).all()
            for run_id in [run_id for run_id, ticks in rows if ticks != self._ticks.get(run_id, 0)]:
                lines += self._of_run(session, run_id)
            self._ticks.update((run_id, ticks) for run_id, ticks in rows)
        return lines

    def _of_run(self, session: Session, run_id: int) -> list[str]:
        now = _in_error(session, run_id)
        lines = []
        for key, (failed, problem) in now.items():
            if key not in self._failed:
                self._failed[key] = failed
                lines.append(
                    f"watchstep: {failed.run}: rule {failed.rule} cannot be evaluated: {' '.join(problem.split())}"
                )
        for key, failed in list(self._failed.items()):
            if failed.run_id == run_id and key not in now:
                del self._failed[key]
                lines.append(f"watchstep: {failed.run}: rule {failed.rule} is evaluated again")
        return lines


def _in_error(session: Session, run_id: int) -> dict[tuple[int, str], tuple[_FailedRule, str]]:
    """Return the failed rule configs of the run's newest attempt with their problems.

    The query filters by text before states are decoded.
    """
    rows = session.execute(
        select(
            RuleConfigRow.id,
            RuleConfigRow.name,
            RunRow.project,
            RunRow.run,
            RunRow.attempt,
            RuleStateRow.state,
        )
        .join(RunRow, RunRow.id == RuleConfigRow.run_id)
        .join(
            RuleStateRow,
            (RuleStateRow.config_id == RuleConfigRow.id) & (RuleStateRow.attempt == RunRow.attempt),
        )
        .where(RunRow.id == run_id, ~RuleConfigRow.origin.startswith("retired"))
        .where(RuleStateRow.state.contains(_IN_ERROR, autoescape=True))
        .order_by(RuleConfigRow.id)
    ).all()
    failed = {}
    for config_id, name, project, run, attempt, text in rows:
        memory = memory_of(text)
        if memory.health is RuleHealth.ERROR:
            failed[config_id, attempt] = (_FailedRule(run_id, f"{project}/{run}", name), memory.problem)
    return failed


TRIES = 3
"""Number of failed attempts after which a failure is reported, although more attempts follow."""


class WebhookProblems:
    """Reports webhooks and notifications that have failed `TRIES` times, and those that are given up."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reported: set[tuple[int, str]] = set()
        with database.read() as session:
            self._since_ns = read_clock(session)

    def new_lines(self) -> list[str]:
        """Return lines for failures since the last call."""
        trying = (ActionRow.state == "pending") & (ActionRow.tries >= TRIES)
        given_up = (ActionRow.state == "failed") & (ActionRow.finished_ns >= self._since_ns)
        with self._database.read() as session:
            rows = session.execute(
                select(ActionRow, RunRow.project, RunRow.run)
                .join(RunRow, RunRow.id == ActionRow.run_id)
                .where(ActionRow.kind.in_(("webhook", NOTIFY)), trying | given_up)
                .order_by(ActionRow.id)
            ).all()
            lines = []
            for action, project, run in rows:
                if (action.id, action.state) not in self._reported:
                    self._reported.add((action.id, action.state))
                    lines.append(f"watchstep: {project}/{run}: {_failure_text(action)}")
        return lines


def _failure_text(action: ActionRow) -> str:
    """Return target and reason. Only the host of a webhook is shown, because its path may be a secret."""
    reason = action.outcome
    if action.kind == NOTIFY:
        target = f"receiver {action.payload['receiver']}"
    else:
        host = urlsplit(str(action.payload["url"])).hostname
        target, reason = f"webhook to {host}", reason.removeprefix(f"{host}: ")
    tries = f"{action.tries} tries" if action.tries > 1 else "1 try"
    state = "given up" if action.state == "failed" else "it is tried again"
    return f"{target} failed, {tries}, {state}: {' '.join(reason.split())}"


class ConsoleOutput:
    """Reports each event once, and failures. Ignores events from before its creation."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._failing = (RuleProblems(database), WebhookProblems(database))
        with database.read() as session:
            self._last = session.execute(select(func.max(EventRow.number))).scalar_one() or 0

    def new_lines(self) -> list[str]:
        """Return lines for events and failures since the last call."""
        with self._database.read() as session:
            rows = session.execute(
                select(EventRow.number, EventRow.event)
                .where(EventRow.number > self._last)
                .order_by(EventRow.number)
            ).all()
        lines: list[str] = []
        for number, event in rows:
            self._last = number
            lines += lines_of(event)
        for problems in self._failing:
            lines += problems.new_lines()
        return lines
