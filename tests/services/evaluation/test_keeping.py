from __future__ import annotations

from tests.services.driving import Driven
from tests.services.jobs import eventually
from tests.services.recording import Recording, nan_from
from watchstep.store.store import Store
from watchstep_services.core.failpoints import listening
from watchstep_services.core.settings import nanoseconds
from watchstep_services.db.models import RunRow
from watchstep_services.evaluation.keeping import keep_lease
from watchstep_services.runs.claim import Claim, claim

LEASE = 0.3


def lease_of(driven: Driven, run_id: int) -> int:
    return driven.run(run_id).lease_until_ns


def test_what_takes_longer_than_a_lease_keeps_it(driven: Driven, folder_store: Store) -> None:
    driven = driven.with_settings(lease_seconds=LEASE)
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    driven.announce(run_id, recording.write(0, 0, 7, nan_from(5)))

    def takes_long(point: str, subject: object) -> None:
        if point == "evaluate.read":
            assert isinstance(subject, Claim)
            taken = lease_of(driven, run_id)
            eventually(lambda: lease_of(driven, run_id) > taken + 2 * nanoseconds(LEASE), 60)

    with listening(takes_long):
        assert driven.evaluate(run_id).outcome == "committed"
    assert lease_of(driven, run_id) == 0
    assert driven.run(run_id).epoch == 1


def test_a_claim_that_another_has_taken_is_not_renewed(driven: Driven, folder_store: Store) -> None:
    driven = driven.with_settings(lease_seconds=LEASE)
    Recording(folder_store).begin()
    run_id = driven.register()
    first = claim(driven.service.database, run_id, 0)
    assert first is not None
    second = claim(driven.service.database, run_id, nanoseconds(3600.0))
    assert second is not None
    taken = lease_of(driven, run_id)
    with keep_lease(driven.service, first):
        pass
    assert lease_of(driven, run_id) == taken


def test_a_lease_ends_when_nobody_keeps_it(driven: Driven, folder_store: Store) -> None:
    Recording(folder_store).begin()
    run_id = driven.register()
    held = claim(driven.service.database, run_id, nanoseconds(3600.0))
    assert held is not None
    with driven.service.database.write() as session:
        session.get_one(RunRow, run_id).lease_until_ns = 0
    again = claim(driven.service.database, run_id, nanoseconds(3600.0))
    assert again is not None
    assert again.epoch == held.epoch + 1
