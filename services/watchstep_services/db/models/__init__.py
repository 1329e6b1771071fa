"""The tables."""

from watchstep_services.db.models.access import Token
from watchstep_services.db.models.alert_life import (
    AlertGroup,
    AlertInstanceRow,
    GroupMember,
    Incident,
    Muted,
    Silence,
)
from watchstep_services.db.models.api_requests import ApiRequest, ProjectRule
from watchstep_services.db.models.backtests import Backtest, BacktestResult
from watchstep_services.db.models.base import NAME_LENGTH, Base, ClockMark
from watchstep_services.db.models.baselines import PinnedBaseline, RunSummaryRow
from watchstep_services.db.models.journal import Segment, TickRow, WatermarkRow
from watchstep_services.db.models.outbox import ActionRow, ActionTry, EventRow
from watchstep_services.db.models.projects import (
    BackendRow,
    JobOwner,
    Project,
    ProjectBackend,
    ProjectStore,
    StoreRow,
)
from watchstep_services.db.models.receivers import ReceiverRow, ReceiverSecret, RoutingTree
from watchstep_services.db.models.retention import RetentionPolicy, Upkeep
from watchstep_services.db.models.rules import AlertRow, FindingRow, RuleConfigRow, RuleStateRow
from watchstep_services.db.models.runs import Attempt, BoundJobRow, RunRow
from watchstep_services.db.models.stops import AuditEntry, StopGrant

__all__ = [
    "NAME_LENGTH",
    "ActionRow",
    "ActionTry",
    "AlertGroup",
    "AlertInstanceRow",
    "AlertRow",
    "ApiRequest",
    "Attempt",
    "AuditEntry",
    "BackendRow",
    "Backtest",
    "BacktestResult",
    "Base",
    "BoundJobRow",
    "ClockMark",
    "EventRow",
    "FindingRow",
    "GroupMember",
    "Incident",
    "JobOwner",
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
    "RuleStateRow",
    "RunRow",
    "RunSummaryRow",
    "Segment",
    "Silence",
    "StopGrant",
    "StoreRow",
    "TickRow",
    "Token",
    "Upkeep",
    "WatermarkRow",
]
