"""A service whose every piece of work the test starts itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import select

from tests.services.recording import PROJECT
from watchstep.format.layout import SegmentKey
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import MinimumDuration, RuleConfig, StopAction
from watchstep_services.core.settings import Settings, load_settings
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import (
    ActionRow,
    ActionTry,
    AlertRow,
    EventRow,
    FindingRow,
    RuleStateRow,
    RunRow,
    Segment,
    WatermarkRow,
)
from watchstep_services.db.records import hint, put_segment
from watchstep_services.dispatch.dispatch import dispatch
from watchstep_services.evaluation.evaluate import Evaluation, evaluate
from watchstep_services.runs.registration import register
from watchstep_services.service.caches import HistoryCache, RuleStateCache
from watchstep_services.service.context import Service

RULES = (
    RuleConfig(rule="non_finite_values", severity="critical", actions=(StopAction(),)),
    RuleConfig(rule="exploding_gradient", **{"for": MinimumDuration(steps=3)}),
)


def make_service(
    database: Database, store: Store, rules: Sequence[RuleConfig] = RULES, **settings: Any
) -> Service:
    """A service on a store, which waits for nothing and lists whenever it may."""
    quick = {"listing_seconds": 1e-9, "retry_seconds": 1e-6, "store_wait_seconds": 60.0}
    values = {"store": store.location, **quick, **settings}
    return Service(load_settings(**values), database, "http://service.test", tuple(rules))


@dataclass(frozen=True)
class Driven:
    """A service and short ways to look into it."""

    service: Service

    def with_settings(self, **settings: Any) -> Driven:
        """The same service with other settings."""
        changed: Settings = self.service.settings.model_copy(update=settings)
        return Driven(replace(self.service, settings=changed))

    def restarted(self) -> Driven:
        """The same service in a new process: nothing in memory."""
        return Driven(
            replace(
                self.service,
                histories=HistoryCache(),
                rule_states=RuleStateCache(),
            )
        )

    def register(self, run: str = "run-1", rules: Sequence[RuleConfig] = ()) -> int:
        """Register a run as a recorder would."""
        return register(self.service, PROJECT, run, tuple(rules), "recorder")

    def announce(self, run_id: int, *keys: SegmentKey) -> None:
        """Put segments into the inbox, as announcements do."""
        with self.service.database.write() as session:
            for key in keys:
                put_segment(session, run_id, key, read_clock(session))
            hint(session, run_id)

    def evaluate(self, run_id: int) -> Evaluation:
        """One evaluation."""
        return evaluate(self.service, run_id)

    def settle(self, run_id: int) -> None:
        """Evaluate until there is nothing to do at once."""
        while self.evaluate(run_id).more:
            pass

    def run(self, run_id: int) -> RunRow:
        """The run's row."""
        with self.service.database.read() as session:
            return session.get_one(RunRow, run_id)

    def segments(self, run_id: int) -> dict[tuple[str, int], str]:
        """(writer, seq) → state."""
        with self.service.database.read() as session:
            rows = session.execute(select(Segment).filter_by(run_id=run_id)).scalars()
            return {(row.writer, row.seq): row.state for row in rows}

    def watermarks(self, run_id: int) -> list[tuple[int, str]]:
        """(step, cause) of each advance of the watermark, in order."""
        with self.service.database.read() as session:
            rows = session.execute(
                select(WatermarkRow).filter_by(run_id=run_id).order_by(WatermarkRow.tick)
            ).scalars()
            return [(row.step, row.cause) for row in rows]

    def alerts(self, run_id: int) -> dict[str, tuple[str, int, dict[str, Any] | None]]:
        """Name of the rule config → (phase, since step, finding)."""
        with self.service.database.read() as session:
            rows = session.execute(select(AlertRow).filter_by(run_id=run_id)).scalars()
            return {row.name: (row.phase, row.since_step, row.finding) for row in rows}

    def findings(self) -> list[tuple[int, str, dict[str, Any]]]:
        """(rule config's id, attempt, finding) of all findings kept, in order."""
        with self.service.database.read() as session:
            rows = session.execute(select(FindingRow).order_by(FindingRow.config_id, FindingRow.id)).scalars()
            return [(row.config_id, row.attempt, row.finding) for row in rows]

    def memories(self) -> list[tuple[int, str, str, int]]:
        """All that rules remember."""
        with self.service.database.read() as session:
            rows = session.execute(
                select(RuleStateRow).order_by(RuleStateRow.config_id, RuleStateRow.attempt)
            ).scalars()
            return [(row.config_id, row.attempt, row.state, row.findings) for row in rows]

    def events(self, run_id: int) -> list[dict[str, Any]]:
        """All events, in order."""
        with self.service.database.read() as session:
            rows = session.execute(
                select(EventRow).filter_by(run_id=run_id).order_by(EventRow.number)
            ).scalars()
            return [row.event for row in rows]

    def event_types(self, run_id: int) -> list[str]:
        """Types of all events without the common prefix, in order."""
        return [event["type"].removeprefix("io.watchstep.") for event in self.events(run_id)]

    def actions(self, run_id: int) -> list[ActionRow]:
        """All actions, in order."""
        with self.service.database.read() as session:
            return list(
                session.execute(select(ActionRow).filter_by(run_id=run_id).order_by(ActionRow.id)).scalars()
            )

    def tries(self, action_id: int) -> list[tuple[str, str]]:
        """(outcome, detail) of each try of an action."""
        with self.service.database.read() as session:
            rows = session.execute(
                select(ActionTry).filter_by(action_id=action_id).order_by(ActionTry.number)
            ).scalars()
            return [(row.outcome, row.detail) for row in rows]

    def dispatched(self, action_id: int) -> ActionRow:
        """Try an action once, whenever it is due."""
        with self.service.database.write() as session:
            session.get_one(ActionRow, action_id).next_ns = 0
        dispatch(self.service, action_id)
        with self.service.database.read() as session:
            return session.get_one(ActionRow, action_id)

    def finish(self, action_id: int) -> ActionRow:
        """Try an action until it is over; between tries, its time is brought forward."""
        while True:
            dispatch(self.service, action_id)
            with self.service.database.write() as session:
                row = session.get_one(ActionRow, action_id)
                if row.state != "pending":
                    return row
                row.next_ns = 0
