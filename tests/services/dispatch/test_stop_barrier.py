"""The stop barrier with ranks of different and changing pace that receive requests late: all stop after the same step, or none does."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import examples
from tests.services.driving import Driven
from watchstep.capture.stop import BarrierStop
from watchstep.format.control import ControlDocument, StopAnswer, StopRequest
from watchstep_services.dispatch.barrier import AttemptPace, SegmentArrival, following
from watchstep_services.runs.stops import request_stop

SECOND = 1_000_000_000


@dataclass
class Rank:
    """A worker: it finishes step after step, and receives and answers requests with delays that the test chooses."""

    number: int
    takes_part: bool = True
    finished: int = -1
    checked: bool = True  # whether its last step was checked already
    stopped_at: int | None = None
    outbox: list[StopAnswer] = field(default_factory=list)
    acknowledged: int = 0  # how many of the documents

    def __post_init__(self) -> None:
        self.stops = BarrierStop(self.number, lambda: self.finished, takes_part=self.takes_part)
        self.stops.on_left = self.outbox.append

    def finish_step(self) -> None:
        """The end of a step, as far as it can go now."""
        found = self.stops.check(self.finished)
        if found == "wait":
            return
        self.checked = True
        if found is not None:
            self.stopped_at = self.finished

    def receive(self, document: StopRequest) -> None:
        answer = self.stops.receive(document)
        if answer is not None:
            self.outbox.append(answer)


@dataclass
class World:
    """Ranks in collectives, and a service that names steps. Messages arrive later, in any order."""

    ranks: list[Rank]
    documents: list[StopRequest]
    answers: list[StopAnswer] = field(default_factory=list)
    refused: bool = False

    def train(self, rank: Rank, *, together: bool) -> bool:
        """One step of a rank, unless it is blocked by itself or, in a collective, by the others; returns whether it moved."""
        if rank.stopped_at is not None:
            return False
        if not rank.checked:
            rank.finish_step()
            return rank.checked
        if together and any(
            other.finished < rank.finished or not other.checked for other in self.others(rank)
        ):
            return False
        if together and any(other.stopped_at is not None for other in self.others(rank)):
            return False
        rank.finished += 1
        rank.checked = False
        return True

    def others(self, rank: Rank) -> list[Rank]:
        """A rank takes part in step n + 1 with those that have finished n; one that is at n + 1 already has taken part."""
        return [other for other in self.ranks if other is not rank and other.finished <= rank.finished]

    def deliver(self, rank: Rank, skip: int = 0) -> bool:
        """A rank receives the newest document, or one before it."""
        newest = len(self.documents) - skip
        if newest <= rank.acknowledged:
            return False
        rank.acknowledged = newest
        rank.receive(self.documents[newest - 1])
        return True

    def carry(self, rank: Rank) -> bool:
        """A rank's answers arrive at the service."""
        sent, rank.outbox = rank.outbox, []
        self.answers += sent
        return bool(sent)

    def decide(self, margin: int) -> bool:
        """The service evaluates the answers."""
        stop = self.documents[-1]
        if stop.agreed or self.refused:
            return False
        found = following(stop, self.answers, len(self.ranks), stop.step + margin)
        self.refused = found == "refused"
        if found is None or found == "refused":
            return False
        self.documents.append(found)
        return True

    def settle(self, margin: int, *, together: bool) -> None:
        """All messages are delivered and all ranks continue."""
        for _ in range(10_000):
            moved = False
            for rank in self.ranks:
                moved |= self.deliver(rank) | self.carry(rank)
            moved |= self.decide(margin)
            if not moved and all(rank.stopped_at is not None for rank in self.ranks):
                return
            for rank in self.ranks:
                self.train(rank, together=together)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, bool, int]:
    ranks = draw(st.integers(2, 4))
    stop = StopRequest("a1", draw(st.integers(0, 12)), "it is over", agreed=False)
    return World([Rank(n) for n in range(ranks)], [stop]), draw(st.booleans()), draw(st.integers(1, 6))


moves = st.lists(
    st.tuples(
        st.sampled_from(["train"] * 4 + ["receive", "old", "carry", "decide"]),
        st.integers(0, 3),
        st.integers(1, 5),
    ),
    max_size=120,
)


def play(world: World, moves: list[tuple[str, int, int]], *, together: bool, margin: int) -> None:
    for move, number, times in moves:
        rank = world.ranks[number % len(world.ranks)]
        for _ in range(times):  # a rank that has become fast
            if move == "train":
                world.train(rank, together=together)
            elif move == "receive":
                world.deliver(rank)
            elif move == "old":
                world.deliver(rank, skip=1)
            elif move == "carry":
                world.carry(rank)
            else:
                world.decide(margin)
        agreed = [item.step for item in world.documents if item.agreed]
        stopped = {item.stopped_at for item in world.ranks if item.stopped_at is not None}
        assert stopped <= set(agreed)  # none stops by itself, nor at a step of its own


@given(worlds(), moves)
@settings(max_examples=examples(400), deadline=None)
def test_all_stop_after_the_same_step(
    generated: tuple[World, bool, int], moves: list[tuple[str, int, int]]
) -> None:
    world, together, margin = generated
    play(world, moves, together=together, margin=margin)
    world.settle(margin, together=together)
    assert len({rank.stopped_at for rank in world.ranks}) == 1
    assert world.ranks[0].stopped_at == world.documents[-1].step


@given(worlds(), moves, st.data())
@settings(max_examples=examples(200), deadline=None)
def test_if_one_rank_receives_no_documents_none_stops(
    generated: tuple[World, bool, int], moves: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    world, together, margin = generated
    deaf = world.ranks[data.draw(st.integers(0, len(world.ranks) - 1))]
    deaf.acknowledged = 10**9
    play(world, moves, together=together, margin=margin)
    assert all(rank.stopped_at is None for rank in world.ranks)
    for rank in world.ranks:  # their patience ends
        rank.stops.stop_waiting()
        if not rank.checked:
            rank.finish_step()
        world.carry(rank)
        assert rank.checked
    world.decide(margin)
    assert not any(document.agreed for document in world.documents)


def test_a_rank_that_does_not_participate_leaves_the_stop_to_the_backend() -> None:
    stop = StopRequest("a1", 4, "it is over", agreed=False)
    world = World([Rank(0), Rank(1, takes_part=False)], [stop])
    for rank in world.ranks:
        world.deliver(rank)
        world.carry(rank)
    world.decide(3)
    assert world.refused
    assert [answer.state for answer in world.answers] == ["ready", "refuses"]


def test_a_rank_that_waits_continues_when_another_step_is_named_or_its_patience_ends() -> None:
    answers: list[StopAnswer] = []
    finished = [0]
    stops = BarrierStop(0, lambda: finished[0], takes_part=True, wait_seconds=60.0)
    stops.on_left = answers.append
    request = StopRequest("a1", 1, "it is over", agreed=False)
    stops.receive(request)
    finished[0] = 1
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(stops.due(1)))
    waiting.start()
    stops.receive(StopRequest("a1", 9, "it is over", agreed=False))
    waiting.join(60)
    assert found == [None]
    finished[0] = 9
    impatient = BarrierStop(1, lambda: finished[0] - 1, takes_part=True, wait_seconds=0.0)
    impatient.on_left = answers.append
    impatient.receive(StopRequest("a1", 9, "it is over", agreed=False))
    assert impatient.due(9) is None
    assert [(item.worker, item.state) for item in answers] == [(1, "left")]


def test_a_world_size_that_cannot_be_is_waited_for_without_a_set_of_all_its_ranks() -> None:
    stop = StopRequest("a", 5, "r", agreed=False)
    answers = [StopAnswer(rank, 5, "ready", 4) for rank in range(2)]
    assert following(stop, answers, 10**18, 6) is None
    assert following(stop, answers, 2, 6) == StopRequest("a", 5, "r", agreed=True)


def announced(*segments: tuple[int, int, float], writer: str = "n/w0") -> list[SegmentArrival]:
    return [SegmentArrival(writer, first, last, round(at * SECOND)) for first, last, at in segments]


def test_the_margin_covers_the_steps_until_ranks_read_the_request() -> None:
    steady = AttemptPace.of(announced((0, 9, 0.0), (10, 19, 1.0), (20, 29, 2.0)), -1, 2 * SECOND)
    assert (steady.largest, steady.steps_per_second, steady.response_seconds) == (29, 10.0, 2.0)
    assert steady.margin(2 * SECOND) == 30  # one and a half times two seconds
    assert steady.margin(3 * SECOND) == 45  # seen a second ago
    assert steady.seconds_to(49) == 2.0


def test_a_training_that_has_become_faster_counts_as_fast() -> None:
    faster = AttemptPace.of(
        announced((0, 9, 0.0), (10, 19, 10.0), (20, 29, 20.0), (30, 229, 21.0)), -1, 21 * SECOND
    )
    assert faster.steps_per_second == 200.0
    assert faster.margin(21 * SECOND) == 3300


def test_long_steps_are_not_stopped_ten_later() -> None:
    slow = AttemptPace.of(announced((0, 0, 0.0), (1, 1, 20.0), (2, 2, 40.0)), -1, 40 * SECOND)
    assert slow.margin(40 * SECOND) == 2
    assert slow.seconds_to(4) == 40.0


def test_without_a_pace_the_margin_is_in_steps() -> None:
    assert AttemptPace.of((), 5, 0).margin(0) == 10
    together = announced((0, 7, 1.0)) + announced((0, 7, 1.0), writer="n/w1")
    assert AttemptPace.of(together, -1, SECOND).margin(SECOND) == 16


def test_steps_that_are_only_announced_do_not_postpone_a_stop(driven_sqlite: Driven) -> None:
    recording, run_id = driven_sqlite.begin(world_size=2)
    driven_sqlite.judge(run_id, recording.write(0, 0, 7), recording.write(0, 0, 7, worker=1))
    driven_sqlite.announce(
        run_id, recording.key(900, 10**15, 10**15)
    )  # by anyone who may record in the project
    with driven_sqlite.service.database.write() as session:
        stop = request_stop(
            session, driven_sqlite.service.base_url, run_id, recording.attempt, ("", "enough")
        )
    assert stop is not None
    driven_sqlite.dispatched(stop)
    requested = ControlDocument.from_data(driven_sqlite.run(run_id).control).stop
    assert requested is not None
    assert 8 <= requested.step < 100, requested
