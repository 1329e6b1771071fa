"""Workers that flush the same group while its alerts change: everything is told once, and in order."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

from sqlalchemy import select

from tests.services.driving import Driven
from tests.services.recording import Recording, healthy, nan_from
from watchstep.store.store import Store
from watchstep_rules.config.rule_config import RuleConfig
from watchstep_services.channels.receiver_file import ReceiverFile
from watchstep_services.db.models import AlertGroup, AlertInstanceRow
from watchstep_services.notify.flush import due_groups, flush, flush_due

EPISODES = 6
WORKERS = 3
RECEIVERS = ReceiverFile.model_validate(
    {
        "receivers": [{"name": "ops", "kind": "webhook", "url": "https://chat.example.com/hook"}],
        "route": {"receiver": "ops", "group_wait": 0, "group_interval": 0, "repeat_interval": 86400},
    }
)


def told_at_once(driven: Driven) -> Driven:
    return Driven(replace(driven.service, receiver_file=RECEIVERS, owner_rules=()))


def told(driven: Driven, run_id: int) -> list[tuple[int, str]]:
    """(number of the notification, what it says) in the order of their numbers."""
    actions = [action for action in driven.actions(run_id) if action.kind == "notify"]
    numbers = [(int(action.key.rpartition(":")[2]), action) for action in actions]
    return [
        (number, action.payload["notification"]["status"])
        for number, action in sorted(numbers, key=lambda one: one[0])
    ]


def test_workers_that_flush_together_tell_everything_once(driven: Driven, folder_store: Store) -> None:
    driven = told_at_once(driven)
    recording = Recording(folder_store).begin()
    run_id = driven.register(rules=[RuleConfig(rule="non_finite_values", name="mine")])
    written = threading.Event()

    def record() -> None:
        for seq in range(2 * EPISODES):
            value = nan_from(seq) if seq % 2 == 0 else healthy
            driven.announce(run_id, recording.write(seq, seq, seq, value))
            driven.settle(run_id)

    def work() -> list[int]:
        mine: list[int] = []
        while True:
            last = written.is_set()
            mine += flush_due(driven.service)
            if last and not due_groups(driven.service):
                return mine
            written.wait(0.01)  # lets those who judge have the processor

    with ThreadPoolExecutor(WORKERS + 1) as pool:
        workers = [pool.submit(work) for _ in range(WORKERS)]
        try:
            pool.submit(record).result()
        finally:
            written.set()
        caused = [action for worker in workers for action in worker.result()]

    said = told(driven, run_id)
    assert [number for number, _ in said] == list(range(1, len(said) + 1))
    assert len(caused) == len(set(caused)) == len(said)
    # Never an end without its beginning, nor the same end twice; what came and went unseen is told as one beginning.
    statuses = [status for _, status in said]
    assert all(before == "firing" for before, now in pairwise(statuses) if now == "resolved")
    assert statuses[0] == "firing"
    assert statuses[-1] == "resolved"
    assert statuses.count("firing") <= EPISODES
    with driven.service.database.read() as session:
        standing = session.execute(select(AlertInstanceRow)).scalar_one()
        assert (standing.phase, standing.episode) == ("resolved", EPISODES)


def test_one_of_many_workers_tells_what_is_due(driven: Driven, folder_store: Store) -> None:
    driven = told_at_once(driven)
    recording = Recording(folder_store).begin()
    run_id = driven.register(rules=[RuleConfig(rule="non_finite_values", name="mine")])
    driven.announce(run_id, recording.write(0, 0, 0, nan_from(0)))
    driven.settle(run_id)
    (group_id,) = due_groups(driven.service)
    together = threading.Barrier(WORKERS)

    def work() -> int | None:
        together.wait(60)
        return flush(driven.service, group_id)

    with ThreadPoolExecutor(WORKERS) as pool:
        told_by = [worker.result() for worker in [pool.submit(work) for _ in range(WORKERS)]]
    assert sum(action is not None for action in told_by) == 1
    assert told(driven, run_id) == [(1, "firing")]
    with driven.service.database.read() as session:
        assert session.execute(select(AlertGroup)).scalar_one().generation == 1
