"""What ``watchstep serve`` says in its terminal while runs go on: alerts with their explanations, stops, failures."""

from __future__ import annotations

from sqlalchemy import func, select

from watchstep_services.cli.event_lines import lines_of
from watchstep_services.cli.telling_rules import RuleTeller
from watchstep_services.cli.telling_webhooks import WebhookTeller
from watchstep_services.database.engine import Database
from watchstep_services.database.models import Event


class Teller:
    """Says each event once, and what fails. Events that were there before it is made are not said."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._failing = (RuleTeller(database), WebhookTeller(database))
        with database.read() as session:
            self._last = session.execute(select(func.max(Event.number))).scalar_one() or 0

    def new_lines(self) -> list[str]:
        """Lines for what came since the last call."""
        with self._database.read() as session:
            rows = session.execute(
                select(Event.number, Event.event).where(Event.number > self._last).order_by(Event.number)
            ).all()
        lines: list[str] = []
        for number, event in rows:
            self._last = number
            lines += lines_of(event)
        for teller in self._failing:
            lines += teller.new_lines()
        return lines
