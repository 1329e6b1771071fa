"""The tables."""

from watchstep_services.database.models.access import Token
from watchstep_services.database.models.backtests import Backtest, BacktestResult
from watchstep_services.database.models.base import NAME_LENGTH, Base
from watchstep_services.database.models.journal import Seal, Segment, Tick
from watchstep_services.database.models.outbox import Action, ActionTry, Event
from watchstep_services.database.models.projects import Project
from watchstep_services.database.models.rules import Alert, FindingRow, Memory, RuleConfigRow
from watchstep_services.database.models.runs import Attempt, Job, Run

__all__ = [
    "NAME_LENGTH",
    "Action",
    "ActionTry",
    "Alert",
    "Attempt",
    "Backtest",
    "BacktestResult",
    "Base",
    "Event",
    "FindingRow",
    "Job",
    "Memory",
    "Project",
    "RuleConfigRow",
    "Run",
    "Seal",
    "Segment",
    "Tick",
    "Token",
]
