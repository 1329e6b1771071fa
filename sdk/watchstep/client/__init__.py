"""A client of the service: runs, alerts, event streams, rules, queries. ``watchstep.Client(url, token)``."""

from watchstep.client.client import Client
from watchstep.client.documents import (
    Action,
    Alert,
    Event,
    RuleStatus,
    RunInfo,
    RunState,
    RunToken,
    SnapshotInfo,
    Stop,
)

__all__ = [
    "Action",
    "Alert",
    "Client",
    "Event",
    "RuleStatus",
    "RunInfo",
    "RunState",
    "RunToken",
    "SnapshotInfo",
    "Stop",
]
