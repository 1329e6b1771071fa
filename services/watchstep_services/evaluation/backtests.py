"""Backtests in the service: requested through the API, and evaluated one run at a time by any free worker.

One run is one unit of work, so that a backtest of many runs does not delay live runs. A worker's death is detected by the
expired lease; results that were recorded before remain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep.errors import ConfigError, NotFoundError
from watchstep.format.layout import check_name
from watchstep.reading.budget import OverBudgetError
from watchstep_rules.backtest.backtest import (
    Failed,
    Replayed,
    Task,
    judge_run,
    result_as_data,
    result_from_data,
)
from watchstep_rules.backtest.sweep import Variation, parse_sweep, variations
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_rules.custom.sandbox.pool import on_behalf_of
from watchstep_services.core.redaction import without_addresses
from watchstep_services.core.settings import nanoseconds
from watchstep_services.core.store_location import StorePlace
from watchstep_services.db.clock import read_clock
from watchstep_services.db.lease import BACKTEST_LEASE
from watchstep_services.db.models import AlertInstanceRow, Backtest, BacktestResult, RunRow
from watchstep_services.service.context import Service

MOST_RUNS = 1000
MOST_PATTERNS = 20
_LEASE_SECONDS = 600.0
"""A worker that has not released a run by then is taken to be dead."""

_RUN_SECONDS = 480.0
"""Limit for one run, so that a large run does not keep the backtests of other projects waiting, and ends before its lease."""

_MOST_TRIES = 3
"""Workers that may die with a run before it is left out."""

_FINDINGS = 20


@dataclass(frozen=True)
class BacktestProgress:
    """Progress of a backtest.

    Attributes:
        id: its number.
        state: ``waiting``, ``running`` or ``done``.
        runs: names of the runs.
        results: results of the first runs.
        variations: variations of its sweeps.
    """

    id: int
    state: str
    runs: tuple[str, ...]
    results: tuple[Replayed | Failed, ...]
    variations: tuple[Variation, ...]


def request_backtest(
    service: Service, project: str, runs: Sequence[str], configs: Sequence[RuleConfig], sweeps: Sequence[str]
) -> int:
    """Request a backtest; return its number.

    Args:
        service: the service.
        project: project of the runs; only runs that are registered with the service are evaluated.
        runs: names, or patterns with ``*``, ``?`` and ``[...]``.
        configs: the rules.
        sweeps: in the syntax of `watchstep_rules.backtest.sweep.parse_sweep`.

    Raises:
        NotFoundError: no run has such a name.
        RuleError: a sweep cannot be done.
        ConfigError: there are too many runs.
    """
    check_name("project", project)
    variations(configs, [parse_sweep(text, configs) for text in sweeps])
    chosen = _matching(service, project, runs)
    with service.database.write() as session:
        row = Backtest(
            project=project,
            runs=chosen,
            rules=[config.as_data() for config in configs],
            sweeps=list(sweeps),
            created_ns=read_clock(session),
        )
        session.add(row)
        session.flush()
        number = row.id
    service.notifier.backtest_due(number)
    return number


def _matching(service: Service, project: str, runs: Sequence[str]) -> list[str]:
    """Names of the requested runs of a project. They are matched outside of transactions, because it may take long.

    Raises:
        NotFoundError: no run has such a name.
        ConfigError: there are too many runs or patterns.
    """
    with service.database.read() as session:
        names = (
            session.execute(select(RunRow.run).filter_by(project=project).order_by(RunRow.run))
            .scalars()
            .all()
        )
    patterns = [name for name in dict.fromkeys(runs) if any(character in name for character in "*?[")]
    if len(patterns) > MOST_PATTERNS:
        raise ConfigError(
            f"{len(patterns)} patterns; the limit is {MOST_PATTERNS}", "use fewer patterns, or full names"
        )
    chosen = set(names).intersection(runs)
    missing = set(runs) - set(patterns) - chosen
    for pattern in patterns:
        matching = [run for run in names if fnmatchcase(run, pattern)]
        chosen.update(matching)
        if not matching:
            missing.add(pattern)
    for name in runs:
        if name in missing:
            raise NotFoundError(
                f"run {project}/{name}: not found", "list the project's runs to see their names"
            )
    if len(chosen) > MOST_RUNS:
        raise ConfigError(f"{len(chosen)} runs; the limit is {MOST_RUNS}", "name fewer runs")
    return sorted(chosen)


def due_backtests(service: Service) -> tuple[int, ...]:
    """Unfinished backtests without a current claim."""
    with service.database.read() as session:
        return tuple(
            session.execute(
                select(Backtest.id).where(BACKTEST_LEASE.is_free()).order_by(Backtest.id)
            ).scalars()
        )


def judge_next(service: Service, number: int) -> bool:
    """Evaluate the next run of a backtest; return whether more remain. Does nothing if another worker has claimed it."""
    claimed = _claim(service, number)
    if claimed is None:
        return False
    row, place = claimed
    run = row.runs[row.next]
    result: Replayed | Failed
    if place is None:
        result = Failed(run, f"run {row.project}/{run}: not found", "it was deleted meanwhile")
    elif row.tries > _MOST_TRIES:
        result = Failed(
            service.stores.of_run(place, run).location,
            f"run {row.project}/{run}: {_MOST_TRIES} workers died while evaluating it",
            "give workers more memory",
        )
    else:
        store = service.stores.of_run(place, run)
        with on_behalf_of(row.project):
            result = judge_run(store.location, _task(row), store, _limits(service))
        if service.stopping.is_set():
            _give_back(service, row)  # it may have ended early
            return False
    return _note(service, row, result)


def _limits(service: Service) -> Callable[[], None]:
    """A function that ends the backtest of a run, by an exception, once it takes too long or the process ends."""
    until = time.monotonic() + _RUN_SECONDS

    def check() -> None:
        service.check_running()
        if time.monotonic() > until:
            raise OverBudgetError(
                f"the backtest takes more than {_RUN_SECONDS:g} s",
                "use fewer rules and variations, or run it without the service: watchstep rules backtest",
            )

    return check


def _give_back(service: Service, row: Backtest) -> None:
    """Leave the run to another worker at once."""
    with service.database.write() as session:
        BACKTEST_LEASE.release(session, row.id, row.claims, tries=row.tries - 1)


def read_progress(service: Service, project: str, number: int) -> BacktestProgress:
    """Progress and results of a backtest.

    Raises:
        NotFoundError: the project has none of this number.
    """
    with service.database.read() as session:
        row = session.get(Backtest, number)
        if row is None or row.project != project:
            raise NotFoundError(f"backtest {number} of {project}: not found", "request a backtest first")
        documents = session.execute(
            select(BacktestResult.result).filter_by(backtest_id=number).order_by(BacktestResult.place)
        ).scalars()
        answers = _answers(session, project, row.runs)
        results = tuple(
            replace(result, was_right=answers.get(result.outcome.run, {}))
            if isinstance(result, Replayed)
            else result
            for result in map(result_from_data, documents)
        )
    state = row.state if row.next == 0 or row.state == "done" else "running"
    return BacktestProgress(number, state, tuple(row.runs), results, _task(row).variations)


def _answers(session: Session, project: str, runs: Sequence[str]) -> dict[str, dict[str, str]]:
    """The answers of people to whether alerts were right, by run and rule config."""
    answered = (
        select(RunRow.run, AlertInstanceRow.name, AlertInstanceRow.was_right)
        .join(RunRow, RunRow.id == AlertInstanceRow.run_id)
        .where(RunRow.project == project, RunRow.run.in_(runs), AlertInstanceRow.was_right != "")
    )
    answers: dict[str, dict[str, str]] = {}
    for run, name, answer in session.execute(answered):
        answers.setdefault(run, {})[name] = answer
    return answers


def _claim(service: Service, number: int) -> tuple[Backtest, StorePlace | None] | None:
    """A claimed backtest, and the location of its next run; None if the run was deleted."""
    with service.database.write() as session:
        if (
            BACKTEST_LEASE.claim(session, number, nanoseconds(_LEASE_SECONDS), tries=Backtest.tries + 1)
            is None
        ):
            return None
        row = session.get_one(Backtest, number)
        named = select(RunRow).filter_by(project=row.project, run=row.runs[row.next])
        run = session.execute(named).scalar_one_or_none()
        return row, None if run is None else run.place


def _task(row: Backtest) -> Task:
    configs = tuple(RuleConfig.model_validate(data) for data in row.rules)
    return Task(configs, tuple(variations(configs, [parse_sweep(text, configs) for text in row.sweeps])))


def _note(service: Service, row: Backtest, result: Replayed | Failed) -> bool:
    more = row.next + 1 < len(row.runs)
    with service.database.write() as session:
        now = read_clock(session)
        state, finished_ns = ("running", None) if more else ("done", now)
        released = BACKTEST_LEASE.release(
            session, row.id, row.claims, next=row.next + 1, tries=0, state=state, finished_ns=finished_ns
        )
        if not released:
            return False  # another worker has claimed it
        # Results trigger no notifications, so webhook addresses are left out.
        document = without_addresses(result_as_data(result, _FINDINGS))
        session.add(BacktestResult(backtest_id=row.id, place=row.next, result=document))
    return more
