"""A stop names the job, the cause and the last good checkpoint."""

from __future__ import annotations

from pathlib import Path

from tests.services.dispatch.test_stop import backend_of, done_event, fired
from tests.services.driving import Driven
from tests.services.jobs import WILLING, launch
from tests.services.recording import Recording
from watchstep.format.documents import Checkpoint
from watchstep.store.store import Store


def test_a_stop_names_step_tensor_job_and_the_last_good_checkpoint(
    driven: Driven, folder_store: Store, tmp_path: Path
) -> None:
    recording = Recording(folder_store).begin(on_stop="ignore")
    saved = [Checkpoint(f"/c/{step}.pt", step, recording.attempt, 0, 1000 + step) for step in (1, 3, 6)]
    for checkpoint in saved:
        recording.store.put(checkpoint.key, checkpoint.encode())
    job = launch(backend_of(driven), tmp_path, WILLING)
    run_id, action = fired(driven, recording, job)
    driven.finish(action.id)
    done = done_event(driven, run_id)
    assert (done["step"], done["tensor"], done["job"]) == (5, "loss", f"local:{job.id}")
    assert done["last_good_checkpoint"] == saved[1].as_data()


def test_where_no_checkpoint_is_good_none_is_named(
    driven: Driven, folder_store: Store, tmp_path: Path
) -> None:
    recording = Recording(folder_store).begin(on_stop="ignore")
    late = Checkpoint("/c/5.pt", 5, recording.attempt, 0, 1)
    recording.store.put(late.key, late.encode())
    run_id, action = fired(driven, recording, launch(backend_of(driven), tmp_path, WILLING))
    driven.finish(action.id)
    assert done_event(driven, run_id)["last_good_checkpoint"] is None
