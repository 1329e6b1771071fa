"""Announcements of recorders, and their rules."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import insert, select, text, update
from starlette.testclient import TestClient

from tests.services.announcing import announcing
from tests.services.driving import Driven, statements
from tests.services.recording import PROJECT, Recording
from watchstep.capture.service.client import MOST_SEGMENTS
from watchstep.errors import RuleError
from watchstep.format.capture_needs import CaptureNeed
from watchstep.format.control import ControlDocument, StopRequest
from watchstep.format.layout import SegmentKey, WriterId
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.api.app import create_app
from watchstep_services.api.schemas import models
from watchstep_services.auth import create_token
from watchstep_services.core.settings import NANOSECONDS
from watchstep_services.db.clock import read_clock
from watchstep_services.db.models import Project, RunRow, Segment
from watchstep_services.db.records import MOST_WAITING
from watchstep_services.runs.announcements import FOLLOWING, Announcement, accept_announcement
from watchstep_services.runs.control import change, set_needs
from watchstep_services.runs.registration import discover_runs, register
from watchstep_services.scheduler.sweep import sweep
from watchstep_services.service.waiting_segments import WaitingRoom

WAIT = 60.0
QUERY = "SELECT tensor FROM statistics WHERE nan > 0"


class Notified:
    """A notifier that only collects."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, str]] = []

    def run_changed(self, run_id: int, worker: str = "") -> None:
        self.runs.append((run_id, worker))

    def action_due(self, *_arguments: object) -> None:
        pass

    def backtest_due(self, _number: int) -> None:
        pass


class Announcing:
    """A registered run that is not due, and its recorder."""

    def __init__(self, driven: Driven) -> None:
        self.notified = Notified()
        self.driven = Driven(replace(driven.service, notifier=self.notified))
        self.run_id = driven.register()
        token = create_token(driven.service.database, "recorder")
        self.client = TestClient(
            create_app(self.driven.service),
            headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
        )
        self.evaluated()

    def evaluated(self) -> None:
        """Leave the run as an evaluation that found nothing to do."""
        self.driven.change(RunRow, due_ns=None)

    def answer(self, *keys: SegmentKey, run: str = "run-1", **changes: Any) -> Any:
        path = f"/v1/projects/{PROJECT}/runs/{run}/announcements"
        return self.client.post(path, content=json.dumps(announcing(*keys, **changes)))

    def control(self, *keys: SegmentKey, **changes: Any) -> ControlDocument:
        answer = self.answer(*keys, **changes)
        assert answer.status_code == 200, answer.text
        return ControlDocument.from_data(answer.json()["control"])

    @property
    def row(self) -> RunRow:
        return self.driven.run(self.run_id)


@pytest.fixture
def announced(driven: Driven) -> Announcing:
    return Announcing(driven)


def keys(*seqs: int, writer: str = "w0", attempt: str = "a1") -> list[SegmentKey]:
    return [SegmentKey(WriterId(attempt, "n", writer), seq, 4 * seq, 4 * seq + 3) for seq in seqs]


def test_segments_of_an_interval_are_announced_together(announced: Announcing) -> None:
    announced.control(*keys(0, 1, 2), *keys(0, 1, writer="w1"), *keys(0, 1))
    assert announced.driven.segments(announced.run_id) == {
        ("w0", 0): "announced", ("w0", 1): "announced", ("w0", 2): "announced", ("w1", 0): "announced", ("w1", 1): "announced",
    }  # fmt: skip
    assert announced.row.hints == 1
    assert announced.notified.runs == [(announced.run_id, "")]


def test_the_service_accepts_as_many_segments_as_recorders_send(announced: Announcing) -> None:
    assert models.MOST_SEGMENTS == MOST_SEGMENTS
    announced.control(*keys(*range(MOST_SEGMENTS)))
    assert len(announced.driven.segments(announced.run_id)) == MOST_SEGMENTS
    assert announced.answer(*keys(*range(MOST_SEGMENTS + 1))).status_code == 422


def test_the_number_of_statements_does_not_depend_on_the_number_of_segments(announced: Announcing) -> None:
    if announced.driven.service.database.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has no statement that changes two tables")
    announced.control(*keys(0))
    with statements(announced.driven.service.database) as executed:
        announced.control(*keys(*range(1, 200)), health={"rows": 3})
    assert len(executed) == 1
    assert len(announced.driven.segments(announced.run_id)) == 200


def test_a_repeated_announcement_changes_no_segment(announced: Announcing) -> None:
    announced.control(*keys(0, 1))
    with announced.driven.service.database.write() as session:
        session.execute(update(Segment).where(Segment.seq == 0).values(state="read", position=0))
    announced.evaluated()
    announced.control(*keys(0, 1))
    assert announced.row.due_ns is None, "there is nothing to read"
    assert announced.row.hints == 1
    announced.control(*keys(0, 1, 2))
    assert announced.driven.segments(announced.run_id) == {
        ("w0", 0): "read", ("w0", 1): "announced", ("w0", 2): "announced",
    }  # fmt: skip
    assert announced.row.due_ns is not None
    assert announced.row.hints == 2


def test_a_segment_that_was_given_up_is_read_if_it_is_announced_late(announced: Announcing) -> None:
    announced.control(*keys(0, 1))
    with announced.driven.service.database.write() as session:
        session.execute(update(Segment).values(state="read"))
        session.execute(update(Segment).where(Segment.seq == 0).values(state="missing"))
    announced.evaluated()
    announced.control(*keys(0, 1))
    assert announced.driven.segments(announced.run_id) == {("w0", 0): "announced", ("w0", 1): "read"}
    assert announced.row.due_ns is not None
    assert len(announced.notified.runs) == 2


def test_a_segment_that_is_given_up_while_its_announcement_waits_is_read(announced: Announcing) -> None:
    database = announced.driven.service.database
    if database.engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    (key,) = keys(0)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(announced.answer(key)))
    with database.write() as session:
        session.get_one(RunRow, announced.run_id, with_for_update=True)
        row = Segment(
            run_id=announced.run_id, attempt="a1", node="n", writer="w0", seq=0, first=0, last=3, state="missing",
            found_ns=read_clock(session),
        )  # fmt: skip
        session.add(row)
        session.flush()
        thread.start()
        _wait_for_lock(announced)
    thread.join(WAIT)
    assert [answer.status_code for answer in answers] == [200]
    assert announced.driven.segments(announced.run_id) == {("w0", 0): "announced"}


def _wait_for_lock(announced: Announcing) -> None:
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    deadline = time.monotonic() + WAIT
    while True:
        with announced.driven.service.database.read() as session:
            if session.execute(waiting).scalar_one():
                return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_that_is_due_keeps_its_place_and_slows_its_recorder(announced: Announcing) -> None:
    announced.control(*keys(0))
    with announced.driven.service.database.write() as session:
        run = session.get_one(RunRow, announced.run_id)
        assert run.due_ns is not None
        run.due_ns -= 3 * NANOSECONDS
        due, requested = run.due_ns, run.requested_ns
    answer = announced.answer(*keys(1, 2))
    assert 6.0 <= answer.json()["pause_seconds"] <= 10.0
    assert (announced.row.due_ns, announced.row.requested_ns, announced.row.hints) == (due, requested, 2)
    assert len(announced.notified.runs) == 1, "it was queued by the first announcement"


def test_an_announcement_postpones_the_poll_of_its_run(announced: Announcing) -> None:
    announced.control(*keys(0))
    assert announced.row.poll_ns == 0, "it was never polled"
    announced.driven.change(RunRow, poll_interval_ns=7 * NANOSECONDS, cached_by="w9")
    announced.evaluated()
    announced.control(*keys(1))
    assert announced.row.poll_ns == announced.row.last_seen_ns + 7 * NANOSECONDS
    assert announced.notified.runs[-1] == (announced.run_id, "w9")


def test_every_change_of_the_control_document_is_in_the_next_answer(announced: Announcing) -> None:
    database = announced.driven.service.database
    assert announced.control(*keys(0)) == ControlDocument()
    need = CaptureNeed(rule="dead", collections=("activations",))
    for seq, changed in enumerate(
        (
            lambda document: document.with_stop(StopRequest("a1", 12, "diverged")),
            lambda document: document.with_cadence({"weights": 5}),
        ),
        1,
    ):
        with database.write() as session:
            expected = change(session, announced.run_id, changed)
        assert announced.control(*keys(seq)) == expected
        assert announced.control(*keys(seq)) == expected, "also in the answer to a repeated one"
    with database.write() as session:
        set_needs(session, announced.run_id, [need])
    answered = announced.control(*keys(3))
    assert answered.needs == (need,)
    assert answered.stop is not None
    assert answered.stop.step == 12


def test_the_tombstone_of_a_run_is_in_the_answer(announced: Announcing) -> None:
    with announced.driven.service.database.write() as session:
        change(session, announced.run_id, lambda document: replace(document, version=1, tombstone="diverged"))
    assert announced.control(*keys(0, attempt="a2")).tombstone == "diverged"


def test_each_recorders_health_replaces_its_earlier_one(announced: Announcing) -> None:
    announced.driven.change(RunRow, health={"store": "slow"})
    numbers = {"tiny": 1e-7, "large": 1e22, "tenth": 0.1, "whole": 7, "negative": -0.0}
    announced.control(*keys(0), health={"rows": 1})
    announced.control(*keys(0, writer="w1"), health={"rows": 2})
    announced.control(*keys(1), *keys(1, writer="w1"), health=numbers)
    announced.control(*keys(2))
    assert announced.row.health == {
        "store": "slow",
        "recorders": {"n/w0": {"rows": 1}, "n/w1": numbers},
    }
    assert [type(value) for value in announced.row.health["recorders"]["n/w1"].values()] == [
        type(value) for value in numbers.values()
    ]


def test_health_with_text_that_a_database_refuses_does_not_break_the_run(announced: Announcing) -> None:
    health = {"fault": "a\x00b\ud800", "literal": "\\u0000", "\x00": ["\x00\x00"]}
    announced.control(*keys(0), health=health)
    announced.control(*keys(1), health={"rows": 1})
    announced.control(*keys(1, writer="w1"), health=health)
    assert announced.row.health["recorders"] == {
        "n/w0": {"rows": 1},
        "n/w1": {"fault": "a?b?", "literal": "\\u0000", "?": ["??"]},
    }
    announced.driven.settle(announced.run_id)


def test_health_of_too_many_recorders_is_not_added(announced: Announcing) -> None:
    for number in range(20):
        announced.control(*keys(0, writer=f"w{number}"), health={"said": "x" * 60_000})
    reported = announced.row.health["recorders"]
    assert 10 < len(reported) < 20
    announced.control(*keys(1, writer="w0"), health={"said": "less"})
    assert announced.row.health["recorders"]["n/w0"] == {"said": "less"}
    assert len(announced.driven.segments(announced.run_id)) == 21


def put(announced: Announcing, count: int, state: str = "announced") -> None:
    """Put segments into the inbox, which no recorder has written."""
    of_each = {
        "run_id": announced.run_id,
        "attempt": "a1",
        "node": "n",
        "seq": 0,
        "first": 0,
        "last": 3,
        "state": state,
    }
    rows = [{**of_each, "writer": f"made{number}", "found_ns": 0} for number in range(count)]
    with announced.driven.service.database.write() as session:
        session.execute(insert(Segment), rows)


def test_announcements_beyond_what_may_wait_are_ignored_and_slow_the_recorder(announced: Announcing) -> None:
    stop = StopRequest("a1", 12, "diverged")
    with announced.driven.service.database.write() as session:
        change(session, announced.run_id, lambda document: document.with_stop(stop))
    put(announced, MOST_WAITING - 2)
    answer = announced.answer(*keys(0, 1, 2, 3), health={"rows": 3})
    assert (answer.status_code, answer.json()["ignored"], answer.json()["pause_seconds"]) == (202, 2, 10.0)
    assert ControlDocument.from_data(answer.json()["control"]).stop == stop
    assert announced.row.health["recorders"] == {"n/w0": {"rows": 3}}
    with statements(announced.driven.service.database) as executed:
        assert announced.answer(*keys(*range(2, 200))).json()["ignored"] == 198
    assert len(executed) < 10, "what is ignored costs no statements"
    many = [key for number in range(200) for key in keys(1, writer=f"made{number}")]
    with statements(announced.driven.service.database) as executed:
        assert announced.answer(*many).json()["ignored"] == 200
    assert len(executed) < 25, "nor do many writers"
    segments = announced.driven.segments(announced.run_id)
    assert len(segments) == MOST_WAITING
    assert ("w0", 1) in segments


@pytest.mark.ci
def test_segments_after_one_that_was_read_are_accepted_beside_any_number_of_made_up_ones(
    announced: Announcing,
) -> None:
    announced.control(*keys(0))
    announced.driven.change(Segment, state="read")
    put(announced, MOST_WAITING)
    mine = [*keys(1, 2, FOLLOWING, FOLLOWING + 1), *keys(1, writer="w1")]
    assert announced.answer(*mine).json()["ignored"] == 2
    assert announced.driven.segments(announced.run_id).keys() >= {("w0", 1), ("w0", 2), ("w0", FOLLOWING)}


def test_the_runs_of_a_project_share_a_limit_and_other_projects_do_not_notice(announced: Announcing) -> None:
    room = WaitingRoom(most=3, clock=lambda: 0.0)
    service = replace(announced.driven.service, waiting_room=room)
    put(announced, 1)
    Driven(service).register("run-2")
    other = register(service, "other", "run-1", (), "recorder")

    def ignored(project: str, run: str, *segments: SegmentKey) -> int:
        accepted = accept_announcement(
            service.database, room, project, run, Announcement(segments, {}, urgent=False)
        )
        assert accepted is not None
        return accepted.ignored

    assert ignored(PROJECT, "run-2", *keys(0, 1)) == 0
    assert ignored(PROJECT, "run-2", *keys(2)) == 1
    assert ignored("other", "run-1", *keys(0, 1, 2)) == 0
    assert len(announced.driven.segments(other)) == 3


def test_a_run_with_ignored_announcements_is_listed_though_it_announces(
    announced: Announcing, folder_store: Store
) -> None:
    driven = announced.driven.with_settings(listing_seconds=20.0)
    full = Driven(replace(driven.service, waiting_room=WaitingRoom(most=0)))
    recording = Recording(folder_store).begin()
    sweep(full.service)
    for seq in range(2):  # also after an evaluation has read some
        segment = recording.write(seq * (FOLLOWING + 2), 4 * seq, 4 * seq + 3)
        with full.service.database.write() as session:
            past = read_clock(session) - 60 * NANOSECONDS
            session.execute(update(RunRow).values(poll_ns=past, listed_ns=past, due_ns=None))
        ignored = accept_announcement(
            full.service.database,
            full.service.waiting_room,
            PROJECT,
            "run-1",
            Announcement([segment], {}, urgent=False),
        )
        assert ignored is not None
        assert (ignored.fresh, ignored.ignored) == (0, 1)
        assert full.run(announced.run_id).poll_ns == past
        assert sweep(full.service).runs == (announced.run_id,)
        assert full.segments(announced.run_id)["w0", segment.seq] == "announced"
        full.settle(announced.run_id)
        assert full.run(announced.run_id).ignored_ns == 0


def test_the_room_of_a_project_is_counted_again_while_little_is_left() -> None:
    seconds, waiting = [0.0], [4_500]
    room = WaitingRoom(most=5_000, clock=lambda: seconds[0])
    assert room.of("p", lambda: waiting[0]) == 500
    room.take("p", 600)
    waiting[0] = 0
    assert room.of("p", lambda: waiting[0]) == 0, "not again within a second"
    seconds[0] = 1.0
    assert room.of("p", lambda: waiting[0]) == 5_000
    seconds[0] = 2.0
    waiting[0] = 5_000
    assert room.of("p", lambda: waiting[0]) == 5_000, "half a minute if there is much"
    seconds[0] = 31.0
    assert room.of("p", lambda: waiting[0]) == 0


def test_an_archived_project_accepts_no_segments(announced: Announcing) -> None:
    with announced.driven.service.database.write() as session:
        before = session.execute(select(RunRow.last_seen_ns)).scalar_one()
        session.execute(update(Project).values(archived_ns=read_clock(session)))
    refused = announced.answer(*keys(0), health={"rows": 1})
    assert (refused.status_code, "archived" in refused.json()["detail"]) == (409, True)
    assert announced.driven.segments(announced.run_id) == {}
    assert (announced.row.last_seen_ns, announced.row.health) == (before, {})
    assert announced.answer(*keys(0), run="run-2").status_code == 404


def sql(name: str, **params: Any) -> RuleConfig:
    return RuleConfig(rule="sql", name=name, params={"query": QUERY, **params})


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([sql("slow", seconds=60)], "seconds = 60"),
        ([sql("large", memory_mb=4096)], "memory_mb = 4096"),
        ([sql(f"q{number}") for number in range(4)], "4 SQL rules; a recorder may request 3"),
        (
            [RuleConfig(rule="overfit", name=f"r{n}") for n in range(101)],
            "101 rules; a recorder may request 100",
        ),
        (
            [RuleConfig(rule="overfit", name=f"r{n}", params={"patience": n + 1}) for n in range(6)],
            "6 rule configs of 'overfit'; a recorder may request 5",
        ),
        (
            [RuleConfig(rule="overfit", name=name) for name in ("first", "second")],
            "'second': equals 'first' except for its name",
        ),
    ],
)
def test_a_recorder_may_not_ask_for_what_occupies_the_workers(
    driven_sqlite: Driven, asked: list[RuleConfig], says: str
) -> None:
    with pytest.raises(RuleError, match=says):
        register(driven_sqlite.service, PROJECT, "run-1", tuple(asked), "recorder")
    assert register(driven_sqlite.service, PROJECT, "run-1", tuple(asked), "operator") == 1


def test_the_rules_of_all_requests_of_a_recorder_count(driven_sqlite: Driven) -> None:
    def request(first: int, count: int) -> None:
        rules = tuple(
            RuleConfig(rule=rule, name=f"{rule} {n}", **{"for": {"steps": 1 + n}})
            for n in range(first, first + count)
            for rule in ("overfit", "overtraining")
        )
        register(driven_sqlite.service, PROJECT, "run-1", rules, "recorder")

    for first in range(0, 50, 5):
        request(first, 5)
    request(0, 5)  # again
    with pytest.raises(RuleError, match="102 rules with those requested before; a recorder may request 100"):
        request(50, 1)


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ([sql("slow", seconds=60)], "seconds = 60"),
        ([RuleConfig(rule="overfit", name=name) for name in ("first", "second")], "equals 'first'"),
    ],
)
def test_a_run_found_with_such_rules_is_judged_without_them(
    driven_sqlite: Driven, rules: list[RuleConfig], problem: str
) -> None:
    driven_sqlite.recording().begin(rules=[config.as_data() for config in rules])
    [run_id] = discover_runs(driven_sqlite.service)
    assert problem in driven_sqlite.run(run_id).health["run_document"]
    driven_sqlite.register()
    assert register(driven_sqlite.service, PROJECT, "run-1", (sql("quick"),), "recorder") == run_id
