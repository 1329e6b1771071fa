"""The protocol alone: ranks join, leave and die between any two messages; every block is on the store at most once,
and in the end all blocks of those that live are.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.laws import examples
from watchstep.capture.node import protocol
from watchstep.capture.node.leader import Leading
from watchstep.capture.node.protocol import Handing, Message
from watchstep.capture.upload.outgoing import Blocks, Doubt, Outgoing, SegmentPlace
from watchstep.format.layout import SegmentKey, WriterId

RANKS = st.integers(0, 2)


@dataclass
class Rank:
    """A process, and what is on the line to it."""

    name: str
    handing: Handing
    created: int = 0
    unsure: list[int] = field(default_factory=list)  # blocks that it keeps
    line: deque[Message] = field(default_factory=deque)
    follows: object = None  # the leader's state, as long as the line stands
    apart: bool = False
    alive: bool = True

    def acknowledge(self, numbers: tuple[int, ...]) -> None:
        self.unsure = [number for number in self.unsure if number not in numbers]


class Node(RuleBasedStateMachine):
    """Three ranks, one store, any order of events. A rank that is killed or leaves is replaced by a new process."""

    @initialize()
    def begin(self) -> None:
        self.objects: dict[SegmentKey, Blocks] = {}
        self.own: Counter[tuple[str, int]] = Counter()  # written by ranks themselves
        self.born = 0
        self.ranks = [self.new() for _ in range(3)]
        self.gone: list[Rank] = []
        self.leader: Rank | None = None
        self.leading: Leading | None = None
        self.notified: set[str] = set()  # tokens that the leader has a line to
        self.file = ""
        self.terms = self.writers = 0
        self.late: list[tuple[SegmentKey, Blocks]] = []

    def new(self) -> Rank:
        self.born += 1
        return Rank(f"p{self.born}", Handing(f"p{self.born}"))

    def replace(self, rank: Rank) -> None:
        """Another process takes a rank's place."""
        self.gone.append(rank)
        self.ranks[self.ranks.index(rank)] = self.new()

    # -- the store

    def create(self, key: SegmentKey, blocks: Blocks) -> Blocks:
        return self.objects.setdefault(key, blocks)

    def settle(self, rank: Rank, *, whole: bool) -> None:
        notice, doubt = rank.handing.notice, rank.handing.doubt
        if notice is None or (doubt is None and not whole):
            return
        mine = {rank.name: doubt.numbers} if doubt else {}
        rank.acknowledge(rank.handing.accept_stored(notice.key, self.create(notice.key, mine)))

    # -- the leader

    def new_term(self) -> str:
        self.terms += 1
        self.file = f"term {self.terms}"
        return self.file

    def tell(self, message: Message) -> None:
        for rank in self.followers():
            rank.line.append(message)

    def followers(self) -> list[Rank]:
        return [rank for rank in [*self.ranks, *self.gone] if rank.name in self.notified]

    def lose(self, rank: Rank) -> None:
        assert self.leading is not None
        assert self.leader is not None
        self.notified.discard(rank.name)
        self.leading.lose(rank.name)
        term = self.new_term()
        self.leader.handing.accept_term(term)
        self.tell(protocol.Term(term))

    @rule(place=RANKS)
    def record(self, place: int) -> None:
        rank = self.ranks[place]
        if rank.alive and not rank.apart:
            rank.unsure.append(rank.created)
            rank.created += 1

    @rule(place=RANKS)
    def meet(self, place: int) -> None:
        """Lead if no rank leads, else follow."""
        rank = self.ranks[place]
        if not rank.alive or rank.apart or rank.follows is not None or rank is self.leader:
            return
        handing = rank.handing
        if self.leader is None:
            inherits = handing.may_inherit(self.file)
            self.settle(rank, whole=inherits)
            if inherits and handing.writer is not None:
                self.leading = Leading(handing.writer, handing.seq)
            else:
                self.writers += 1
                self.leading = Leading(WriterId("a", "n", f"node-{self.writers}"), 0)
            handing.join(self.leading.writer, self.leading.seq, self.new_term(), None)
            handing.sent = rank.unsure[0] if rank.unsure else rank.created
            self.leading.join(rank.name)
            self.leader, self.notified = rank, set()
            return
        assert self.leading is not None
        if rank.name in self.notified:
            self.lose(rank)
        self.settle(rank, whole=False)
        self.leading.join(rank.name)
        self.notified.add(rank.name)
        rank.follows = self.leading
        flight = self.leading.flight
        notice = flight.notice if flight else None
        rank.line.append(protocol.Welcome(self.leading.writer, self.leading.seq, self.file, notice))

    @rule(place=RANKS)
    def receive(self, place: int) -> None:
        rank = self.ranks[place]
        if rank.alive and rank.line:
            self.take_in(rank, rank.line.popleft())
        elif rank.alive and rank.follows is not None and not self.connected(rank):
            rank.follows = None  # the end of the line

    def connected(self, rank: Rank) -> bool:
        return rank.follows is self.leading and rank.name in self.notified

    def take_in(self, rank: Rank, message: Message) -> None:
        handing = rank.handing
        if isinstance(message, protocol.Welcome):
            handing.join(message.writer, message.seq, message.term, message.notice)
            handing.sent = rank.unsure[0] if rank.unsure else rank.created
        elif isinstance(message, protocol.ObjectStarted):
            handing.accept_notice(message.notice)
        elif isinstance(message, protocol.ObjectStored):
            rank.acknowledge(handing.accept_stored(message.key, message.blocks))
        elif isinstance(message, protocol.Term):
            handing.accept_term(message.term)

    @rule(place=RANKS)
    def hand_over(self, place: int) -> None:
        rank = self.ranks[place]
        leads = rank is self.leader
        welcomed = rank.handing.writer is not None and not any(
            isinstance(message, protocol.Welcome) for message in rank.line
        )
        if not rank.alive or self.leading is None or not (leads or (self.connected(rank) and welcomed)):
            return
        for number in [number for number in rank.unsure if number >= rank.handing.sent]:
            step = 1000 * int(rank.name[1:]) + number  # so that two objects of one number have two names
            self.leading.take(rank.name, Outgoing(SegmentPlace(number, step, step, 1), b"x"))
            rank.handing.sent = number + 1

    @rule()
    def announce(self) -> None:
        if self.leading is None or self.leader is None:
            return
        batch = self.leading.propose()
        if batch is None:
            return
        batch = batch.under(self.new_term())
        while gone := [
            rank for rank in self.followers() if not rank.alive or rank.follows is not self.leading
        ]:
            for rank in self.followers():
                if rank not in gone:
                    rank.line.append(protocol.ObjectStarted(batch.notice))
            for rank in gone:
                self.lose(rank)  # sending failed
            batch = batch.under(self.new_term(), {rank.name for rank in gone})
        self.tell(protocol.ObjectStarted(batch.notice))
        self.leading.begin(batch)
        self.leader.handing.accept_notice(batch.notice)

    @rule()
    def announce_to_some_and_die(self) -> None:
        """The leader dies after it has announced an object to only some followers; the object is not written."""
        if self.leading is None or self.leader is None:
            return
        batch = self.leading.propose()
        if batch is not None:
            batch = batch.under(self.new_term())
            for rank in self.followers()[:1]:
                rank.line.append(protocol.ObjectStarted(batch.notice))
            self.kill(self.ranks.index(self.leader))

    @rule(answered=st.booleans())
    def make(self, answered: bool) -> None:
        """The leader creates the object; the answer of the store may be lost."""
        if self.leading is None or self.leader is None or self.leading.flight is None:
            return
        notice = self.leading.flight.notice
        contained = self.create(notice.key, notice.blocks)
        if answered:
            self.leading.land(contained)
            self.leader.acknowledge(self.leader.handing.accept_stored(notice.key, contained))
            self.tell(protocol.ObjectStored(notice.key, contained))

    @precondition(lambda self: self.late)
    @rule()
    def arrive_late(self) -> None:
        """A dead leader's request reaches the store."""
        self.create(*self.late.pop())

    @rule(place=RANKS)
    def kill(self, place: int) -> None:
        rank = self.ranks[place]
        rank.alive = False
        self.end_lead(rank)
        self.replace(rank)

    def end_lead(self, rank: Rank) -> None:
        if rank is self.leader and self.leading is not None:
            if self.leading.flight is not None:
                notice = self.leading.flight.notice
                self.late.append((notice.key, notice.blocks))
            self.leader, self.leading, self.notified = None, None, set()

    @rule(place=RANKS)
    def lose_line(self, place: int) -> None:
        """The leader drops a rank; the rank receives the messages sent before, and the end."""
        rank = self.ranks[place]
        if rank.name in self.notified and self.leading is not None:
            self.lose(rank)

    @rule(place=RANKS)
    def part(self, place: int) -> None:
        """A rank writes for itself; it still processes messages received before it closed the connection."""
        rank = self.ranks[place]
        if not rank.alive or rank.apart:
            return
        while rank.line:
            self.take_in(rank, rank.line.popleft())
        rank.follows = None
        self.end_lead(rank)
        doubt = rank.handing.separate()
        if doubt is not None:
            self.settle_apart(rank, doubt)
        rank.apart = True
        self.own.update((rank.name, number) for number in rank.unsure)
        rank.unsure = []
        self.replace(rank)

    def settle_apart(self, rank: Rank, doubt: Doubt) -> None:
        contained = self.create(doubt.key, {doubt.token: doubt.numbers})
        rank.acknowledge(tuple(contained.get(rank.name, ())))

    # -- the same, done through: so that examples get somewhere

    @rule(place=RANKS)
    def catch_up(self, place: int) -> None:
        """Receive all messages, including the end."""
        rank = self.ranks[place]
        while rank.line:
            self.receive(place)
        self.receive(place)

    @rule(reached=st.booleans())
    def all_meet(self, reached: bool) -> None:
        for place in range(3):
            self.meet(place)
            if reached:
                self.catch_up(place)

    @rule(answered=st.booleans())
    def all_write(self, answered: bool) -> None:
        for place in range(3):
            self.record(place)
            self.hand_over(place)
        self.announce()
        self.make(answered)

    @rule(place=RANKS)
    def leader_dies_and_is_followed(self, place: int) -> None:
        if self.leader is not None:
            self.kill(self.ranks.index(self.leader))
        self.catch_up(place)
        self.meet(place)

    # -- what must hold

    def stored(self) -> Counter[tuple[str, int]]:
        found = Counter(self.own)
        for blocks in self.objects.values():
            found.update((token, number) for token, numbers in blocks.items() for number in numbers)
        return found

    @invariant()
    def nothing_is_twice(self) -> None:
        if hasattr(self, "own"):
            assert set(self.stored().values()) <= {1}
            numbers = Counter((key.writer, key.seq) for key in self.objects)
            assert set(numbers.values()) <= {1}
            for writer in {key.writer for key in self.objects}:
                seqs = sorted(key.seq for key in self.objects if key.writer == writer)
                assert seqs == list(range(len(seqs)))

    def teardown(self) -> None:
        """Process all messages and finish."""
        if not hasattr(self, "own"):
            return
        for _ in range(4):
            for place in range(3):
                self.catch_up(place)
                self.meet(place)
            for place in range(3):
                self.catch_up(place)
                self.hand_over(place)
            for _ in range(6):
                self.make(True)
                self.announce()
            self.make(True)
        while self.late:
            self.arrive_late()
        for place in range(3):
            self.catch_up(place)
        self.nothing_is_twice()
        stored = self.stored()
        for rank in [*self.ranks, *self.gone]:
            if rank.alive:
                assert rank.unsure == [], rank
                assert all(stored[rank.name, number] == 1 for number in range(rank.created))


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=examples(600), stateful_step_count=40, deadline=None)
