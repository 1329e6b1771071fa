"""The console output of ``watchstep serve``: alerts with explanations, stops, failing rules, failing webhooks and receivers.

A rule that cannot be evaluated never raises its alert, and an alert whose receiver fails reaches nobody: both are reported.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from watchstep_rules.engine.judge import RuleHealth
from watchstep_services.cli.event_lines import lines_of
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import ActionRow, EventRow, RuleConfigRow, RuleStateRow, RunRow
from watchstep_services.notify.deliver import NOTIFY
from watchstep_services.service.judging import memory_of

_IN_ERROR = f'"health":"{RuleHealth.ERROR.value}"'


class _Ill(NamedTuple):
    run_id: int
    run: str
    rule: str


class RuleProblems:
    """Says each time that a rule config of a run comes into error, and that it is well again.

    Runs that had ended before it is made are left alone; of the others, what is in error already is said.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._ill: dict[tuple[int, str], _Ill] = {}
        with database.read() as session:
            rows = session.execute(select(RunRow.id, RunRow.ticks).where(RunRow.ended_ns.is_not(None))).all()
            self._ticks: dict[int, int] = {row.id: row.ticks for row in rows}

    def new_lines(self) -> list[str]:
        """Lines for what changed since the last call; only runs that were evaluated since are looked at."""
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
        for key, (ill, problem) in now.items():
            if key not in self._ill:
                self._ill[key] = ill
                lines.append(
                    f"watchstep: {ill.run}: rule {ill.rule} cannot be evaluated: {' '.join(problem.split())}"
                )
        for key, ill in list(self._ill.items()):
            if ill.run_id == run_id and key not in now:
                del self._ill[key]
                lines.append(f"watchstep: {ill.run}: rule {ill.rule} is evaluated again")
        return lines


def _in_error(session: Session, run_id: int) -> dict[tuple[int, str], tuple[_Ill, str]]:
    """Rule configs of the run's newest attempt that are in error, and why. The text is looked through, then read."""
    rows = session.execute(
        select(
            RuleConfigRow.id,
            RuleConfigRow.name,
            RunRow.project,
            RunRow.run,
            RunRow.attempt,
            RuleStateRow.memory,
        )
        .join(RunRow, RunRow.id == RuleConfigRow.run_id)
        .join(
            RuleStateRow,
            (RuleStateRow.config_id == RuleConfigRow.id) & (RuleStateRow.attempt == RunRow.attempt),
        )
        .where(RunRow.id == run_id, ~RuleConfigRow.origin.startswith("retired"))
        .where(RuleStateRow.memory.contains(_IN_ERROR, autoescape=True))
        .order_by(RuleConfigRow.id)
    ).all()
    found = {}
    for config_id, name, project, run, attempt, text in rows:
        memory = memory_of(text)
        if memory.health is RuleHealth.ERROR:
            found[config_id, attempt] = (_Ill(run_id, f"{project}/{run}", name), memory.problem)
    return found


TRIES = 3
"""So many failed tries are told, though more follow."""


class WebhookProblems:
    """Says of each webhook and notification that it has failed `TRIES` times, and that it is given up."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._told: set[tuple[int, str]] = set()
        with database.read() as session:
            self._since_ns = read_clock(session)

    def new_lines(self) -> list[str]:
        """Lines for what failed since the last call."""
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
                if (action.id, action.state) not in self._told:
                    self._told.add((action.id, action.state))
                    lines.append(f"watchstep: {project}/{run}: {_words(action)}")
        return lines


def _words(action: ActionRow) -> str:
    """Where to and why; of the address the host alone, for paths of webhooks are secrets."""
    why = action.outcome
    if action.kind == NOTIFY:
        what = f"receiver {action.payload['receiver']}"
    else:
        host = urlsplit(str(action.payload["url"])).hostname
        what, why = f"webhook to {host}", why.removeprefix(f"{host}: ")
    tries = f"{action.tries} tries" if action.tries > 1 else "1 try"
    goes_on = "given up" if action.state == "failed" else "it is tried again"
    return f"{what} failed, {tries}, {goes_on}: {' '.join(why.split())}"


class ConsoleOutput:
    """Says each event once, and what fails. Events that were there before it is made are not said."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._failing = (RuleProblems(database), WebhookProblems(database))
        with database.read() as session:
            self._last = session.execute(select(func.max(EventRow.number))).scalar_one() or 0

    def new_lines(self) -> list[str]:
        """Lines for what came since the last call."""
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
        for teller in self._failing:
            lines += teller.new_lines()
        return lines
