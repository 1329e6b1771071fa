"""A segment that ends the process that reads it is marked as bad; healthy ones are judged, however often processes die."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import event, update

from tests.services.driving import Driven
from tests.services.recording import Recording, exploding_from, nan_from
from watchstep.format.layout import SegmentKey
from watchstep.store.store import Store
from watchstep_services.core.failpoints import listening
from watchstep_services.db.models import RunRow
from watchstep_services.evaluation import collect, context
from watchstep_services.evaluation.unfinished_reads import CAREFUL, CONDEMNED

MOST_DEATHS = 3 * CONDEMNED


class KilledError(BaseException):
    """The process is gone: nothing that handles errors may catch it."""


@dataclass
class Workers:
    """Processes that evaluate a run one after the other, each until it is killed."""

    driven: Driven
    run_id: int
    dead: bool = False
    deaths: int = 0

    def kill(self) -> None:
        """End the process that is working now."""
        self.dead = True
        raise KilledError

    def settle(self) -> None:
        """Work until there is nothing to do at once; each process that dies leaves its lease, which ends."""
        more = True
        while more and self.deaths < MOST_DEATHS:
            try:
                more = self.driven.evaluate(self.run_id).more
            except KilledError:
                self.dead, self.driven, more = False, self.driven.restarted(), True
                self.deaths += 1
                with self.driven.service.database.write() as session:
                    session.execute(update(RunRow).filter_by(id=self.run_id).values(lease_until_ns=1))


@pytest.fixture
def workers(driven: Driven, folder_store: Store) -> Any:
    """Workers on a run; a dead one reaches the database no more."""
    Recording(folder_store).begin()
    found = Workers(driven, driven.register())

    def refuse(_connection: object) -> None:
        if found.dead:
            raise KilledError

    event.listen(driven.service.database.engine, "begin", refuse)
    yield found
    event.remove(driven.service.database.engine, "begin", refuse)


def killing(workers: Workers, monkeypatch: pytest.MonkeyPatch, *bad: SegmentKey) -> None:
    """Have every process killed that decodes one of some segments, new or as context."""
    decode = collect.decode

    def deadly(data: bytes, key: SegmentKey, *, histograms: bool) -> Any:
        if key in bad:
            workers.kill()
        return decode(data, key, histograms=histograms)

    monkeypatch.setattr(collect, "decode", deadly)
    monkeypatch.setattr(context, "decode", deadly)


def write(recording: Recording, count: int, value: Callable[[int, str], float]) -> list[SegmentKey]:
    return [recording.write(seq, 4 * seq, 4 * seq + 3, value) for seq in range(count)]


def test_a_segment_that_kills_its_readers_is_marked_and_the_others_are_judged(
    workers: Workers, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = write(Recording(folder_store), 6, nan_from(21))
    killing(workers, monkeypatch, keys[3])
    workers.driven.announce(workers.run_id, *keys)
    workers.settle()
    assert workers.deaths == CONDEMNED
    states = workers.driven.segments(workers.run_id)
    assert {seq: state for (_, seq), state in states.items() if state != "read"} == {3: "corrupt"}
    assert workers.driven.alerts(workers.run_id)["non_finite_values"][:2] == ("firing", 21)
    run = workers.driven.run(workers.run_id)
    assert run.health["corrupt_segments"] == 1
    assert keys[3].path in run.health["last_corrupt"]
    assert "killed" in run.health["last_corrupt"]
    assert (run.unfinished_claims, run.reading) == (0, "")


def test_several_of_them_are_all_found(
    workers: Workers, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = write(Recording(folder_store), 6, nan_from(21))
    killing(workers, monkeypatch, keys[1], keys[4])
    workers.driven.announce(workers.run_id, *keys)
    workers.settle()
    states = workers.driven.segments(workers.run_id)
    assert {seq for (_, seq), state in states.items() if state == "corrupt"} == {1, 4}
    assert workers.deaths == CONDEMNED + (
        CONDEMNED - CAREFUL
    )  # of the second only while segments are read one by one


def test_context_that_kills_its_readers_is_left_out_and_no_new_segment_is_blamed(
    workers: Workers, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(folder_store)
    keys = [recording.write(seq, 4 * seq, 4 * seq + 3, exploding_from(33)) for seq in range(6)]
    workers.driven.announce(workers.run_id, *keys)
    workers.settle()
    killing(workers, monkeypatch, keys[5])
    workers.driven = workers.driven.restarted()
    workers.driven.announce(workers.run_id, *(recording.write(seq, 4 * seq, 4 * seq + 3) for seq in (6, 7)))
    workers.settle()
    assert workers.deaths == CONDEMNED
    assert set(workers.driven.segments(workers.run_id).values()) == {"read"}
    health = workers.driven.run(workers.run_id).health
    assert health["lost_context"] == 1
    assert keys[5].path in health["last_lost_context"]


@pytest.mark.parametrize("deaths", [CAREFUL - 1, CAREFUL, CONDEMNED, MOST_DEATHS - 1])
def test_processes_that_die_at_other_work_condemn_nothing(
    workers: Workers, folder_store: Store, deaths: int
) -> None:
    keys = write(Recording(folder_store), 3, nan_from(9))

    def kill(point: str, _subject: object) -> None:
        if point == "evaluate.claimed" and workers.deaths < deaths:
            workers.kill()

    workers.driven.announce(workers.run_id, *keys)
    with listening(kill):
        workers.settle()
    assert workers.deaths == deaths
    assert set(workers.driven.segments(workers.run_id).values()) == {"read"}
    assert workers.driven.alerts(workers.run_id)["non_finite_values"][:2] == ("firing", 9)


def test_a_segment_is_blamed_for_deaths_in_a_row_alone(
    workers: Workers, folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process dies at a segment by chance, and another at something else: nothing is marked."""
    keys = write(Recording(folder_store), 3, nan_from(9))
    decode = collect.decode

    def kill(point: str, _subject: object) -> None:
        if point == "evaluate.claimed" and workers.deaths % 2 and workers.deaths < MOST_DEATHS - 1:
            workers.kill()

    def decoded(*args: Any, **options: Any) -> Any:
        if workers.deaths < MOST_DEATHS - 2:
            workers.kill()
        return decode(*args, **options)

    monkeypatch.setattr(collect, "decode", decoded)
    workers.driven.announce(workers.run_id, *keys)
    with listening(kill):
        workers.settle()
    assert set(workers.driven.segments(workers.run_id).values()) == {"read"}


def test_an_ordinary_evaluation_notes_nothing(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    driven.announce(run_id, *write(recording, 3, nan_from(9)))
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        statements.append(statement)

    event.listen(driven.service.database.engine, "before_cursor_execute", note)
    driven.settle(run_id)
    event.remove(driven.service.database.engine, "before_cursor_execute", note)
    assert statements
    assert not [
        statement for statement in statements if "reading=" in statement and "lease_until_ns" not in statement
    ]
