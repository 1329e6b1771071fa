"""What ``watchstep serve`` says of webhooks and receivers that fail: nobody is told of the alert behind them."""

from __future__ import annotations

from urllib.parse import urlsplit

from sqlalchemy import select

from watchstep_services.database.clock import read_clock
from watchstep_services.database.engine import Database
from watchstep_services.database.models import Action, Run
from watchstep_services.dispatcher.receivers.deliver import NOTIFY

TRIES = 3
"""So many failed tries are told, though more follow."""


class WebhookTeller:
    """Says of each webhook and notification that it has failed `TRIES` times, and that it is given up."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._told: set[tuple[int, str]] = set()
        with database.read() as session:
            self._since_ns = read_clock(session)

    def new_lines(self) -> list[str]:
        """Lines for what failed since the last call."""
        trying = (Action.state == "pending") & (Action.tries >= TRIES)
        given_up = (Action.state == "failed") & (Action.finished_ns >= self._since_ns)
        with self._database.read() as session:
            rows = session.execute(
                select(Action, Run.project, Run.run)
                .join(Run, Run.id == Action.run_id)
                .where(Action.kind.in_(("webhook", NOTIFY)), trying | given_up)
                .order_by(Action.id)
            ).all()
            lines = []
            for action, project, run in rows:
                if (action.id, action.state) not in self._told:
                    self._told.add((action.id, action.state))
                    lines.append(f"watchstep: {project}/{run}: {_words(action)}")
        return lines


def _words(action: Action) -> str:
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
