"""A run that has much waiting does not starve others: after each slice it goes to the back of the line."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from tests.services.driving import Driven
from tests.services.recording import Recording
from watchstep.store.store import Store
from watchstep_services.db.models import RunRow
from watchstep_services.db.records import hint, put_segment
from watchstep_services.scheduler.work import evaluate_longest_due
from watchstep_services.service.context import NullNotifier

SEGMENTS, SLICE = 60, 6


@dataclass
class Line(NullNotifier):
    """Messages as the broker keeps them: first come, first served."""

    waiting: deque[int] = field(default_factory=deque)

    def run_changed(self, run_id: int, cached_by: str = "") -> None:
        self.waiting.append(run_id)


def small(store: Store, driven: Driven, number: int) -> int:
    recording = Recording(store, run=f"small-{number}").begin()
    run_id = driven.register(recording.run)
    driven.announce(run_id, recording.write(0, 0, 0))
    return run_id


def huge(store: Store, driven: Driven) -> int:
    recording = Recording(store, run="huge").begin()
    recording.write_all(range(SEGMENTS))
    run_id = driven.register("huge")
    driven.announce(run_id, *recording.written["w0"])
    return run_id


def test_a_huge_run_delays_others_by_one_slice(driven_sqlite: Driven, folder_store: Store) -> None:
    line = Line()
    driven = Driven(
        replace(driven_sqlite.with_settings(max_segments=SLICE).service, notifier=line),
    )
    much = huge(folder_store, driven)
    line.run_changed(much)
    turns: list[int] = []
    came: dict[int, int] = {}
    for number in range(4 * SEGMENTS // SLICE):
        if number % 3 == 0 and number < SEGMENTS // SLICE:  # others come at any time
            run_id = small(folder_store, driven, number)
            line.run_changed(run_id)
            came[run_id] = len(turns)
        if not line.waiting:
            break
        turns.append(line.waiting.popleft())
        evaluate_longest_due(driven.service, turns[-1])
    assert driven.run(much).last_step == SEGMENTS - 1
    assert turns.count(much) == SEGMENTS // SLICE
    for run_id, before in came.items():
        assert turns[before : turns.index(run_id)].count(much) <= 1


def test_a_hint_while_a_run_is_held_is_told_to_its_holder(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    driven.announce(run_id, recording.write(0, 0, 3))
    later = recording.write(1, 4, 7)

    class Announces(NullNotifier):
        """Somebody announces while the rules are judging, and the message finds the run held."""

    judged = driven.service.histories

    class Late(type(judged)):  # type: ignore[misc]
        def get(self, *asked: object) -> object:
            with driven.service.database.write() as session:
                put_segment(session, run_id, later, 1)
                hint(session, run_id, requested=True)
            return super().get(*asked)

    meanwhile = Driven(replace(driven.service, histories=Late(), notifier=Announces()))
    assert meanwhile.evaluate(run_id).more
    assert not driven.evaluate(run_id).more
    assert driven.run(run_id).last_step == 7


def test_a_run_that_is_due_keeps_its_place(driven: Driven) -> None:
    run_id = driven.register()
    with driven.service.database.write() as session:
        session.get_one(RunRow, run_id).due_ns = 5
    with driven.service.database.write() as session:
        hint(session, run_id, requested=True)
    assert (driven.run(run_id).due_ns, driven.run(run_id).requested_ns) == (5, 0)
