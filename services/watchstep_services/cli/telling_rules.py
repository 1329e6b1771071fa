"""What ``watchstep serve`` says of rules that cannot be evaluated: an alert of theirs would never come."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from watchstep_rules.engine.judge import Health
from watchstep_services.database.engine import Database
from watchstep_services.database.models import Memory, RuleConfigRow, Run
from watchstep_services.evaluator.judging import memory_of

_IN_ERROR = f'"health":"{Health.ERROR.value}"'


class _Ill(NamedTuple):
    run_id: int
    run: str
    rule: str


class RuleTeller:
    """Says each time that a rule config of a run comes into error, and that it is well again.

    Runs that had ended before it is made are left alone; of the others, what is in error already is said.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._ill: dict[tuple[int, str], _Ill] = {}
        with database.read() as session:
            rows = session.execute(select(Run.id, Run.ticks).where(Run.ended_ns.is_not(None))).all()
            self._ticks: dict[int, int] = {row.id: row.ticks for row in rows}

    def new_lines(self) -> list[str]:
        """Lines for what changed since the last call; only runs that were evaluated since are looked at."""
        lines: list[str] = []
        with self._database.read() as session:
            rows = session.execute(select(Run.id, Run.ticks).order_by(Run.id)).all()
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
        select(RuleConfigRow.id, RuleConfigRow.name, Run.project, Run.run, Run.attempt, Memory.memory)
        .join(Run, Run.id == RuleConfigRow.run_id)
        .join(Memory, (Memory.config_id == RuleConfigRow.id) & (Memory.attempt == Run.attempt))
        .where(Run.id == run_id, ~RuleConfigRow.origin.startswith("retired"))
        .where(Memory.memory.contains(_IN_ERROR, autoescape=True))
        .order_by(RuleConfigRow.id)
    ).all()
    found = {}
    for config_id, name, project, run, attempt, text in rows:
        memory = memory_of(text)
        if memory.health is Health.ERROR:
            found[config_id, attempt] = (_Ill(run_id, f"{project}/{run}", name), memory.problem)
    return found
