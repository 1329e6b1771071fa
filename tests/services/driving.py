"""A service whose every piece of work the test starts itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sqlalchemy import Select, event, select, update

from tests.services.recording import PROJECT, Recording, Value, healthy
from watchstep.format.layout import SegmentKey
from watchstep.store.store import Store
from watchstep_launch.backend import JobHandle
from watchstep_rules.config.rule_config import MinimumDuration, RuleConfig, StopAction
from watchstep_services.core.settings import Settings, load_settings
from watchstep_services.db.clock import read_clock
from watchstep_services.db.engine import Database
from watchstep_services.db.models import (
    ActionRow,
    ActionTry,
    AlertRow,
    BoundJobRow,
    EventRow,
    FindingRow,
    RuleStateRow,
    RunRow,
    Segment,
    WatermarkRow,
)
from watchstep_services.db.records import hint, put_segments
from watchstep_services.dispatch.dispatch import dispatch
from watchstep_services.evaluation.evaluate import Evaluation, evaluate
from watchstep_services.runs import attempts
from watchstep_services.runs.discovery import discover
from watchstep_services.runs.registration import register
from watchstep_services.service.caches import HistoryCache, RuleStateCache
from watchstep_services.service.context import Service
from watchstep_services.service.listings import ListingTimes

T = TypeVar("T")
PREFIX = "io.watchstep."
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
    # A listing that takes long, as on a busy machine, is followed by a pause in which tests would wait.
    times = ListingTimes(most=0)
    return Service(
        load_settings(**values), database, "http://service.test", tuple(rules), listing_times=times
    )


@contextmanager
def statements(database: Database) -> Iterator[list[str]]:
    """The statements that a database executes meanwhile."""
    executed: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        executed.append(statement)

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        yield executed
    finally:
        event.remove(database.engine, "before_cursor_execute", note)


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
            put_segments(session, run_id, keys, read_clock(session))
            hint(session, run_id)

    @property
    def store(self) -> Store:
        """The store that the service was made for."""
        return Store.open(self.service.settings.store)

    def recording(self, run: str = "run-1", attempt: str = "a1", project: str = PROJECT) -> Recording:
        """A run on the service's store, of which nothing is written."""
        return Recording(self.store, run, attempt, project)

    def begin(self, rules: Sequence[RuleConfig] = (), **begin: Any) -> tuple[Recording, int]:
        """Begin and register a run; returns its id as well."""
        recording = self.recording().begin(**begin)
        return recording, self.register(rules=rules)

    def record(
        self, value: Value = healthy, last: int = 7, rules: Sequence[RuleConfig] = (), **begin: Any
    ) -> tuple[Recording, int]:
        """Begin and register a run, and judge its first segment; returns the run's id as well."""
        recording, run_id = self.begin(rules, **begin)
        self.judge(run_id, recording.write(0, 0, last, value))
        return recording, run_id

    def judge(self, run_id: int, *keys: SegmentKey) -> None:
        """Announce segments, and evaluate until there is nothing to do at once."""
        self.announce(run_id, *keys)
        self.settle(run_id)

    def bind(self, run_id: int, job: JobHandle) -> None:
        """Bind a job to the first attempt, as if an operator had."""
        with self.service.database.write() as session:
            attempts.ensure(session, run_id, "a1")
            bound = BoundJobRow(
                run_id=run_id, attempt="a1", backend=job.backend, job_id=job.id, bound_by="operator"
            )
            bound.identity = dict(job.identity)
            session.add(bound)

    def evaluate(self, run_id: int) -> Evaluation:
        """One evaluation."""
        return evaluate(self.service, run_id)

    def settle(self, run_id: int) -> None:
        """Evaluate until there is nothing to do at once."""
        while self.evaluate(run_id).more:
            pass

    def discover(self, run_id: int) -> None:
        """List what is on the store, and evaluate until there is nothing to do at once."""
        discover(self.service, run_id)
        self.settle(run_id)

    def one(self, query: Select[T]) -> T:
        """The only result of a query."""
        with self.service.database.read() as session:
            return session.execute(query).scalar_one()

    def all(self, query: Select[T]) -> list[T]:
        """All results of a query."""
        with self.service.database.read() as session:
            return list(session.execute(query).scalars())

    def get(self, table: type[T], key: Any) -> T:
        """The row with a key."""
        with self.service.database.read() as session:
            return session.get_one(table, key)

    def change(self, table: type[Any], key: Any = None, /, **values: Any) -> None:
        """Set columns of the row with a key, or of all rows."""
        with self.service.database.write() as session:
            if key is None:
                session.execute(update(table).values(values))
                return
            row = session.get_one(table, key)
            for name, value in values.items():
                setattr(row, name, value)

    def run(self, run_id: int) -> RunRow:
        """The run's row."""
        return self.get(RunRow, run_id)

    def segments(self, run_id: int) -> dict[tuple[str, int], str]:
        """(writer, seq) → state."""
        return {
            (row.writer, row.seq): row.state for row in self.all(select(Segment).filter_by(run_id=run_id))
        }

    def watermarks(self, run_id: int) -> list[tuple[int, str]]:
        """(step, cause) of each advance of the watermark, in order."""
        rows = self.all(select(WatermarkRow).filter_by(run_id=run_id).order_by(WatermarkRow.tick))
        return [(row.step, row.cause) for row in rows]

    def alerts(self, run_id: int) -> dict[str, tuple[str, int, dict[str, Any] | None]]:
        """Name of the rule config → (phase, since step, finding)."""
        rows = self.all(select(AlertRow).filter_by(run_id=run_id))
        return {row.name: (row.phase, row.since_step, row.finding) for row in rows}

    def findings(self) -> list[tuple[int, str, dict[str, Any]]]:
        """(rule config's id, attempt, finding) of all findings kept, in order."""
        rows = self.all(select(FindingRow).order_by(FindingRow.config_id, FindingRow.id))
        return [(row.config_id, row.attempt, row.finding) for row in rows]

    def memories(self) -> list[tuple[int, str, str, int]]:
        """All that rules remember."""
        rows = self.all(select(RuleStateRow).order_by(RuleStateRow.config_id, RuleStateRow.attempt))
        return [(row.config_id, row.attempt, row.state, row.findings) for row in rows]

    def events(self, run_id: int, kind: str = "") -> list[dict[str, Any]]:
        """All events, or those of a type without the common prefix, in order."""
        events = [
            row.event for row in self.all(select(EventRow).filter_by(run_id=run_id).order_by(EventRow.number))
        ]
        return [event for event in events if kind in ("", event["type"].removeprefix(PREFIX))]

    def event_types(self, run_id: int) -> list[str]:
        """Types of all events without the common prefix, in order."""
        return [event["type"].removeprefix(PREFIX) for event in self.events(run_id)]

    def actions(self, run_id: int, kind: str = "") -> list[ActionRow]:
        """All actions, or those of a kind, in order."""
        actions = self.all(select(ActionRow).filter_by(run_id=run_id).order_by(ActionRow.id))
        return [action for action in actions if kind in ("", action.kind)]

    def tries(self, action_id: int) -> list[tuple[str, str]]:
        """(outcome, detail) of each try of an action."""
        rows = self.all(select(ActionTry).filter_by(action_id=action_id).order_by(ActionTry.number))
        return [(row.outcome, row.detail) for row in rows]

    def dispatched(self, action_id: int) -> ActionRow:
        """Try an action once, whenever it is due."""
        self.change(ActionRow, action_id, next_ns=0)
        dispatch(self.service, action_id)
        return self.get(ActionRow, action_id)

    def finish(self, action_id: int) -> ActionRow:
        """Try an action until it is over; between tries, its time is brought forward."""
        while True:
            dispatch(self.service, action_id)
            with self.service.database.write() as session:
                row = session.get_one(ActionRow, action_id)
                if row.state != "pending":
                    return row
                row.next_ns = 0
