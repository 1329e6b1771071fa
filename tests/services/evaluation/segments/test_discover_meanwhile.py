"""A slow listing of a run by the sweep, while another worker evaluates it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from sqlalchemy import update

from tests.services.driving import Driven
from tests.services.recording import Recording, nan_from
from watchstep.store.store import Store
from watchstep_services.core.failpoints import listening
from watchstep_services.db.models import RunRow
from watchstep_services.runs.discovery import discover

WAIT = 60.0


def evaluate_during_listing(
    driven: Driven, run_id: int, listed: Callable[[], None], judged: Callable[[], None]
) -> str:
    """Evaluate between the listing of a sweep and what it records, and let that record before the commit.

    Args:
        driven: the service.
        run_id: of the run.
        listed: done once the store is listed.
        judged: done before the sweep records what it saw.

    Returns:
        The evaluation's outcome.
    """
    sweep: list[threading.Thread] = []
    is_listed, may_record = threading.Event(), threading.Event()

    def listen(point: str, _subject: object) -> None:
        if point == "discover.listed" and threading.current_thread() in sweep:
            is_listed.set()
            assert may_record.wait(WAIT)
        if point == "evaluate.judged" and not may_record.is_set():
            judged()
            may_record.set()
            sweep[0].join(WAIT)

    sweep.append(threading.Thread(target=discover, args=(driven.service, run_id)))
    with listening(listen):
        sweep[0].start()
        assert is_listed.wait(WAIT)
        listed()
        outcome = driven.evaluate(run_id).outcome
        may_record.set()
        sweep[0].join(WAIT)
    return outcome


def nothing() -> None:
    """Nothing happens meanwhile."""


@pytest.mark.parametrize("announced", ["before the listing", "after it"])
@pytest.mark.parametrize("lease", ["holds", "is over"])
def test_a_slow_listing_forgets_no_segment_that_is_being_evaluated(
    driven: Driven, folder_store: Store, announced: str, lease: str
) -> None:
    driven = driven.with_settings(gap_seconds=0.0)  # as if the listing took longer than the gap time
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    discover(driven.service, run_id)
    key = recording.key(0, 0, 7)
    if announced == "before the listing":
        driven.announce(run_id, key)

    def write() -> None:
        recording.write(0, 0, 7, nan_from(5))
        if announced == "after it":
            driven.announce(run_id, key)

    def end_lease() -> None:
        with driven.service.database.write() as session:
            session.execute(update(RunRow).filter_by(id=run_id).values(lease_until_ns=1))

    outcome = evaluate_during_listing(driven, run_id, write, end_lease if lease == "is over" else nothing)
    assert outcome == ("fenced" if (announced, lease) == ("before the listing", "is over") else "committed")
    for _ in range(2):
        discover(driven.service, run_id)
        driven.settle(run_id)
    assert driven.segments(run_id) == {("w0", 0): "read"}
    assert [finding["step"] for _, _, finding in driven.findings()] == [5, 6, 7]
    assert driven.run(run_id).ticks == 1
