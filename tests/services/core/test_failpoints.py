"""A process that dies at any point of the service's work, and what another finds: everything once, and nothing lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from sqlalchemy import event, select, update

from tests.service_fixtures import DATABASES
from tests.services.announcing import announcing
from tests.services.channels.http_server import HttpServer, http_server
from tests.services.driving import Driven, make_service
from tests.services.postgres import Postgres
from tests.services.recording import PROJECT, Recording, nan_from
from tests.services.stoppable import Stoppable
from watchstep.format.control import ControlDocument
from watchstep.reading.run_documents import read_part
from watchstep.store.store import Store
from watchstep_launch.backend import JobHandle, JobStatus
from watchstep_rules.config.rule_config import RuleConfig, StopAction, WebhookAction
from watchstep_services.api.routes.announcements import announce
from watchstep_services.api.schemas.models import AnnouncementInput
from watchstep_services.core.failpoints import POINTS, failpoint, listening
from watchstep_services.db.engine import Database, open_database
from watchstep_services.db.models import ActionRow, Attempt, RunRow
from watchstep_services.db.schema import upgrade
from watchstep_services.dispatch.dispatch import dispatch
from watchstep_services.evaluation.evaluate import evaluate
from watchstep_services.runs.claim import claim
from watchstep_services.runs.lifecycle import advance_run
from watchstep_services.scheduler.sweep import sweep

_HANDED_OUT_BY_CELERY = {"sweep.found", "sweep.handed_out"}
_ONLY_PAUSED = {"evaluate.fenced"}
_ONLY_IDLE = {"evaluate.released"}  # nothing was found, and nothing is held any more
DIED_AT = [point for point in POINTS if point not in _HANDED_OUT_BY_CELERY | _ONLY_PAUSED | _ONLY_IDLE]


class Died(BaseException):
    """The process is gone: nothing that handles errors may catch it."""


@dataclass
class CountedJob(Stoppable):
    """A backend with one job; ``effective`` counts the calls that ended it."""

    gone: bool = False
    effective: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    def status(self, job: JobHandle) -> JobStatus:
        del job
        return JobStatus("ended", -15) if self.gone else JobStatus("running")

    def stop(self, job: JobHandle) -> JobStatus:
        self.calls["stop"] += 1
        self.effective += not self.gone
        self.gone = True
        return self.status(job)

    kill = stop


@dataclass
class Mortal:
    """A service of which each process dies when it reaches a point, for the first so many times."""

    driven: Driven
    run_id: int
    point: str
    deaths: int
    died: int = 0
    dead: bool = False
    reached: Counter[str] = field(default_factory=Counter)

    def __call__(self, name: str, subject: object) -> None:
        del subject
        self.reached[name] += 1
        if name == self.point and self.died < self.deaths:
            self.died += 1
            self.dead = True
            raise Died

    def do(self, work: Callable[[], object]) -> None:
        """Work as one process does; if it dies, the next finds what it left, after its leases."""
        try:
            work()
        except Died:
            self.dead = False
            self.driven = self.driven.restarted()
            with self.driven.service.database.write() as session:
                session.execute(update(RunRow).filter_by(id=self.run_id).values(lease_until_ns=0))
                session.execute(
                    update(ActionRow).filter_by(run_id=self.run_id, state="pending").values(next_ns=0)
                )

    def go_on(self) -> None:
        """One round of everything that is due."""
        found: list[Any] = []
        # time goes by: the run is looked at, messages are lost
        self.driven.change(RunRow, self.run_id, poll_ns=0, poll_interval_ns=0, listed_ns=0, requested_ns=0)
        self.do(lambda: found.append(sweep(self.driven.service)))
        for work in found:
            for run_id in work.runs:
                self.do(lambda run_id=run_id: self._evaluate(run_id))  # type: ignore[misc]
        for action in self._pending():
            self.driven.change(ActionRow, action.id, next_ns=0)
            self.do(lambda action=action: dispatch(self.driven.service, action.id))  # type: ignore[misc]

    def _evaluate(self, run_id: int) -> None:
        if evaluate(self.driven.service, run_id).outcome == "committed":
            advance_run(self.driven.service, run_id)

    def _pending(self) -> list[ActionRow]:
        return [action for action in self.driven.actions(self.run_id) if action.state == "pending"]

    def at_rest(self) -> bool:
        run, attempt = self.driven.run(self.run_id), self.attempt()
        behind = attempt.journaled < attempt.ticks
        return run.state == "stopped" and not self._pending() and not behind

    def attempt(self) -> Attempt:
        return self.driven.one(select(Attempt).filter_by(run_id=self.run_id))


@contextmanager
def no_transaction_when_dead(database: Database, mortal: Mortal) -> Iterator[None]:
    """What runs on in a dead process while its stack is unwound must not reach the database."""

    def refuse(_connection: object) -> None:
        if mortal.dead:
            raise Died

    event.listen(database.engine, "begin", refuse)
    try:
        yield
    finally:
        event.remove(database.engine, "begin", refuse)


@dataclass(frozen=True)
class Place:
    """A database of one kind and a store, for all lives of this module: each is a run of its own."""

    database: Database
    store: Store
    receiver: HttpServer


@pytest.fixture(scope="module", params=DATABASES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("points")
    with ExitStack() as stack:
        url = f"sqlite:///{folder / 'service.sqlite'}"
        if request.param == "postgresql":
            server: Postgres = request.getfixturevalue("postgres")
            url = stack.enter_context(server.new_database())
        database = open_database(url)
        stack.callback(database.close)
        upgrade(database)
        yield Place(database, Store.open(folder / "store", create=True), stack.enter_context(http_server()))


def lived(place: Place, point: str, deaths: int) -> tuple[Mortal, CountedJob]:
    """A run with a bad step, from its first announcement to its end."""
    database, run = place.database, f"dies-at-{point or 'nothing'}"
    tell = WebhookAction(url=place.receiver.url)
    rules = (
        RuleConfig(rule="non_finite_values", actions=(StopAction(), tell)),
        RuleConfig(rule="non_finite_values", name="again", actions=(StopAction(),)),
    )
    job = CountedJob()
    service = make_service(database, place.store, rules, grace_seconds=0.0, allowed_addresses="loopback")
    driven = Driven(replace(service, backends={"counted": job}))
    recording = Recording(place.store, run).begin(on_stop="raise")
    run_id = driven.register(run)
    driven.bind(run_id, JobHandle("counted", run, {}))
    mortal = Mortal(driven, run_id, point, deaths)
    with listening(mortal), no_transaction_when_dead(database, mortal):
        for seq in range(3):
            key = recording.write(seq, 4 * seq, 4 * seq + 3, nan_from(9))
            if seq != 1:  # one that nobody announces
                body = AnnouncementInput.model_validate(announcing(key))
                mortal.do(lambda body=body: announce(PROJECT, run, body, mortal.driven.service))  # type: ignore[misc]
            mortal.go_on()
        for _ in range(60):
            if mortal.at_rest():
                break
            mortal.go_on()
    return mortal, job


# PostgreSQL differs in transactions and locks, which every fourth point shows; all of them wait for a release.
@pytest.mark.parametrize(
    ("place", "point"),
    [
        *(("sqlite", point) for point in DIED_AT),
        *(
            pytest.param("postgresql", point, marks=pytest.mark.release if number % 4 else pytest.mark.ci)
            for number, point in enumerate(DIED_AT)
        ),
    ],
    indirect=["place"],
)
def test_whoever_dies_at_a_point_loses_and_doubles_nothing(place: Place, point: str) -> None:
    mortal, job = lived(place, point, deaths=2)
    driven, run_id = mortal.driven, mortal.run_id
    assert mortal.died >= 1, "nobody reached the point"
    assert mortal.at_rest()
    assert Counter(driven.event_types(run_id)) == {
        "run.started": 1, "alert.firing": 2, "stop.requested": 1, "stop.done": 1, "run.ended": 1
    }  # fmt: skip
    assert {name: alert[:2] for name, alert in driven.alerts(run_id).items()} == {
        "non_finite_values": ("firing", 9), "again": ("firing", 9)
    }  # fmt: skip
    assert set(driven.segments(run_id).values()) == {"read"}
    assert (job.gone, job.effective) == (True, 1)
    _somebody_was_told(mortal, place.receiver)
    run_store = place.store.child(f"{PROJECT}/{driven.run(run_id).run}/")
    control = ControlDocument.decode(run_store.get("control.json"))
    assert control.as_data() == ControlDocument.from_data(driven.run(run_id).control).as_data()
    parts = [read_part(run_store, "a1", number) for number in range(mortal.attempt().journal_parts)]
    ticks = [evaluation.tick for part in parts for evaluation in part.evaluations]
    assert ticks == list(range(driven.run(run_id).ticks))


def _somebody_was_told(mortal: Mortal, receiver: HttpServer) -> None:
    """Of the alert with a webhook at least once, however often; of the other never."""
    firing = mortal.driven.events(mortal.run_id, "alert.firing")
    told = {event["id"] for event in receiver.events}
    assert [event["id"] in told for event in firing] == [
        bool(event["data"]["rule_config"]["actions"][1:]) for event in firing
    ]


@pytest.mark.ci
def test_a_life_without_a_death_reaches_every_point(place: Place) -> None:
    mortal, _ = lived(place, "", deaths=0)
    assert set(mortal.reached) == set(DIED_AT)


def test_a_point_is_nothing_where_nobody_listens() -> None:
    failpoint("evaluate.claimed")


@pytest.mark.parametrize("point", ["evaluate.claimed", "evaluate.read", "evaluate.judged"])
def test_whoever_is_paused_past_its_lease_commits_nothing(place: Place, point: str) -> None:
    run = f"paused-at-{point}"
    driven = Driven(make_service(place.database, place.store))
    recording = Recording(place.store, run).begin()
    run_id = driven.register(run)
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))
    left: list[dict[str, Any]] = []

    def pause(name: str, _subject: object) -> None:
        if name != point or left:
            return
        left.append({})  # the other's own points are no pause
        with place.database.write() as session:
            session.get_one(RunRow, run_id).lease_until_ns = 0
        assert driven.restarted().evaluate(run_id).outcome == "committed"
        left[0] = told(driven, run_id)

    with listening(pause):
        assert driven.evaluate(run_id).outcome in {"fenced", "idle"}
    assert told(driven, run_id) == left[0]


@pytest.mark.parametrize("point", ["evaluate.claimed", "discover.listed", "evaluate.read", "evaluate.judged"])
def test_nor_does_it_write_down_what_it_sees_on_the_store(place: Place, point: str) -> None:
    run = f"looked-at-{point}"
    driven = Driven(make_service(place.database, place.store))
    recording = Recording(place.store, run).begin()
    run_id = driven.register(run)
    recording.write(0, 0, 7, nan_from(5))
    driven.announce(run_id, recording.write(1, 8, 15, nan_from(5)))  # before it a gap: the store is listed
    left: list[dict[str, Any]] = []

    def pause(name: str, _subject: object) -> None:
        if name != point or left:
            return
        left.append({})  # the other's own points are no pause
        with place.database.write() as session:
            session.get_one(RunRow, run_id).lease_until_ns = 0
        assert claim(place.database, run_id, 10**12) is not None
        left[0] = told(driven, run_id)

    with listening(pause):
        assert driven.evaluate(run_id).outcome == "fenced"
    assert told(driven, run_id) == left[0]


def told(driven: Driven, run_id: int) -> dict[str, Any]:
    """What an evaluation leaves."""
    run = driven.run(run_id)
    return {
        "run": (run.cursor, run.ticks, run.journal, run.epoch, run.lease_until_ns),
        "events": driven.events(run_id),
        "findings": driven.findings(),
        "memories": driven.memories(),
        "actions": [(action.key, action.state) for action in driven.actions(run_id)],
        "segments": driven.segments(run_id),
        "looked": (run.listed_ns, run.last_seen_ns, run.attempt, run.health),
    }


@pytest.mark.parametrize("point", ["stop.signalling", "stop.signalled"])
@pytest.mark.parametrize("stage", ["asked to end", "killed"])
def test_a_signal_of_a_process_that_died_is_sent_again_or_counts(
    place: Place, point: str, stage: str
) -> None:
    """A program that takes no part: nothing but the signal ends its job, and its exit code says nothing of that."""
    run = f"signalled-{point}-{stage}".replace(" ", "-")
    job = StubbornJob(ends_by="stop" if stage == "asked to end" else "kill")
    service = make_service(place.database, place.store, grace_seconds=0.0)
    driven = Driven(replace(service, backends={"stubborn": job}))
    recording = Recording(place.store, run).begin(on_stop="ignore")
    run_id = driven.register(run)
    driven.bind(run_id, JobHandle("stubborn", run, {}))
    driven.judge(run_id, recording.write(0, 0, 7, nan_from(5)))
    (action,) = driven.actions(run_id, "stop")
    mortal = Mortal(driven, run_id, point, 3)
    with listening(mortal), no_transaction_when_dead(place.database, mortal):
        for _ in range(20):
            with place.database.write() as session:
                session.get_one(ActionRow, action.id).next_ns = 0
            mortal.do(lambda: dispatch(mortal.driven.service, action.id))
            if not mortal._pending():
                break
    assert mortal.died >= 1
    (done,) = driven.events(run_id, "stop.done")
    assert done["data"]["how"] == ("terminated" if stage == "asked to end" else "killed")
    assert job.gone
    assert [row.state for row in driven.actions(run_id, "stop")] == ["done"]
    assert advance_run(driven.service, run_id) == "stopped"


@dataclass
class StubbornJob(Stoppable):
    """A job that one of the two signals ends, with an exit code that any program may have."""

    ends_by: str = "stop"
    gone: bool = False

    def status(self, job: JobHandle) -> JobStatus:
        del job
        return JobStatus("ended", 1) if self.gone else JobStatus("running")

    def stop(self, job: JobHandle) -> JobStatus:
        self.gone |= self.ends_by == "stop"
        return self.status(job)

    def kill(self, job: JobHandle) -> JobStatus:
        self.gone = True
        return self.status(job)
