from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import select

from tests.services.driving import Driven
from tests.services.recording import Recording, nan_from
from watchstep.store.store import Store
from watchstep_services.db.models import Segment
from watchstep_services.runs.discovery import discover

STEPS = 40


def test_many_workers_judge_every_segment_once(driven: Driven, folder_store: Store) -> None:
    recording = Recording(folder_store).begin()
    run_id = driven.register()
    written = threading.Event()

    def record() -> None:
        for step in range(STEPS):
            driven.announce(run_id, recording.write(step, step, step, nan_from(0)))
        written.set()

    def work(worker: Driven) -> int:
        committed = 0
        while True:
            last = written.is_set()
            discover(worker.service, run_id)
            result = worker.evaluate(run_id)
            committed += result.outcome == "committed"
            if last and result.outcome == "idle" and not result.more:
                return committed

    with ThreadPoolExecutor(4) as pool:
        recorder = pool.submit(record)
        workers = [pool.submit(work, driven.restarted()) for _ in range(3)]
        recorder.result()
        committed = sum(worker.result() for worker in workers)

    with driven.service.database.read() as session:
        rows = list(session.execute(select(Segment).order_by(Segment.position)).scalars())
    assert [(row.position, row.seq, row.state) for row in rows] == [(i, i, "read") for i in range(STEPS)]
    assert driven.run(run_id).ticks == committed
    assert driven.memories()[0][3] == STEPS
    assert driven.event_types(run_id).count("alert.firing") == 1
    assert len(driven.actions(run_id)) == 1
