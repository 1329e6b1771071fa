"""The tables."""

from watchstep_services.db.models.access import Token
from watchstep_services.db.models.alert_life import (
    AlertGroup,
    GroupMember,
    Incident,
    Muted,
    Silence,
    Standing,
)
from watchstep_services.db.models.api_requests import ApiRequest, ProjectRule
from watchstep_services.db.models.backtests import Backtest, BacktestResult
from watchstep_services.db.models.base import NAME_LENGTH, Base, ClockMark
from watchstep_services.db.models.baselines import PinnedBaseline, RunSummaryRow
from watchstep_services.db.models.journal import Seal, Segment, Tick
from watchstep_services.db.models.outbox import Action, ActionTry, Event
from watchstep_services.db.models.projects import (
    BackendRow,
    JobHolder,
    Project,
    ProjectBackend,
    ProjectStore,
    StoreRow,
)
from watchstep_services.db.models.receivers import ReceiverRow, ReceiverSecret, RoutingTree
from watchstep_services.db.models.retention import RetentionPolicy, Upkeep
from watchstep_services.db.models.rules import Alert, FindingRow, Memory, RuleConfigRow
from watchstep_services.db.models.runs import Attempt, Job, Run
from watchstep_services.db.models.stops import AuditEntry, StopGrant

__all__ = [
    "NAME_LENGTH",
    "Action",
    "ActionTry",
    "Alert",
    "AlertGroup",
    "ApiRequest",
    "Attempt",
    "AuditEntry",
    "BackendRow",
    "Backtest",
    "BacktestResult",
    "Base",
    "ClockMark",
    "Event",
    "FindingRow",
    "GroupMember",
    "Incident",
    "Job",
    "JobHolder",
    "Memory",
    "Muted",
    "PinnedBaseline",
    "Project",
    "ProjectBackend",
    "ProjectRule",
    "ProjectStore",
    "ReceiverRow",
    "ReceiverSecret",
    "RetentionPolicy",
    "RoutingTree",
    "RuleConfigRow",
    "Run",
    "RunSummaryRow",
    "Seal",
    "Segment",
    "Silence",
    "Standing",
    "StopGrant",
    "StoreRow",
    "Tick",
    "Token",
    "Upkeep",
]
