"""Jobs that are launched, watched and read in the cells of a real notebook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import Message, Notebook, stream
from watchstep_launch import Local

pytestmark = pytest.mark.ci

PROGRAM = """
import math, sys, time
import watchstep
bad, last, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
with watchstep.Hook() as hook:
    for step in range(last):
        hook.log(loss=math.nan if step >= bad else 1 / (1 + step))
        hook.step()
        time.sleep(pause)
"""
BEGIN = """
from watchstep_rules import non_finite_values
from watchstep_launch import Estimator, Local

def launch(run, *words):
    estimator = Estimator("quick.py", backend=Local(), store="store", rules=[non_finite_values().stop()], arguments=words)
    return estimator.fit(run=run, wait=False)
"""


@pytest.fixture(scope="module")
def notebook(beside: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    (beside / "quick.py").write_text(PROGRAM)
    # The service beside the store may have been started by another module's tests: it reads the job records of one folder.
    jobs = Local(folder=tmp_path_factory.getbasetemp() / "jobs")
    said = {"WATCHSTEP_JOBS": str(jobs.folder), "WATCHSTEP_IDLE_SECONDS": "300"}
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "CI",
            "WATCHSTEP_QUIET",
            "WATCHSTEP_SERVICE",
            "WATCHSTEP_TOKEN",
            "WATCHSTEP_HOME",
            "WATCHSTEP_STORE",
        ):
            patch.delenv(name, raising=False)
        with Notebook(beside, said).running() as held:
            held.text(BEGIN)
            yield held
        for left in jobs.jobs():
            jobs.kill(left)


def shown(notebook: Notebook) -> list[Message]:
    """What a cell's pictures were made by."""
    kinds = ("display_data", "update_display_data")
    return [message for message in notebook.messages if message["msg_type"] in kinds]


def test_a_cell_is_changed_in_place_until_its_rule_has_stopped_the_job(notebook: Notebook) -> None:
    outputs = notebook.run('job = launch("night", "60", "100000", "0.02")\nstatus = job.wait()')
    made = shown(notebook)
    assert [message["msg_type"] for message in made[:2]] == ["display_data", "update_display_data"]
    assert len({message["content"]["transient"]["display_id"] for message in made}) == 1
    (output,) = outputs  # one picture, and nothing on standard error
    text = output.data["text/plain"]
    head, *_ = lines = text.splitlines()
    assert head.startswith("default/night  stopped after ")
    assert head.endswith(" ended with exit code 86")
    fired = "non_finite_values (warning) firing at step 60: 1 NaN among 1 elements of loss, 0 tolerated"
    assert any(line.endswith(fired) for line in lines)
    assert "\N{MULTIPLICATION SIGN}" in text
    html = output.data["text/html"]
    assert html.startswith("<pre style='font-family")
    assert all(word in html for word in ("default/night", "stopped", fired))
    assert notebook.text("print(status)") == "JobStatus(state='ended', exit_code=86, detail='')\n"


def test_all_of_a_job_is_read_where_an_event_loop_runs(notebook: Notebook) -> None:
    told = notebook.text("""
import asyncio, threading
assert asyncio.get_running_loop().is_running()
job = launch("read", "1000", "3", "0")
print(*(event.type for event in job.events()))
job.wait(show=False)
print(job.run().tensor("loss").steps(), job.run_state().info.state, list(job.logs()))
await asyncio.to_thread(job.wait, show=False)
""")
    assert told == "io.watchstep.run.started io.watchstep.run.ended\n[0, 1, 2] completed []\n"


def test_an_interrupt_ends_the_waiting_and_not_the_job(notebook: Notebook) -> None:
    outputs = notebook.run(
        'job = launch("long", "100000", "100000", "0.02")\njob.wait()',
        interrupt_at=lambda message: "started, attempt" in str(message["content"].get("data", "")),
    )
    picture, said, error = outputs
    assert "default/long  running for" in picture.data["text/plain"]
    assert error.ename == "KeyboardInterrupt"
    assert said.name == "stderr"
    assert said.text.startswith(
        "watchstep: no longer waiting for run default/long; nothing was stopped. Find job local:"
    )
    assert said.text.endswith(' again with Estimator.reattach("long")\n')
    assert notebook.text('job = Estimator.reattach("long")\nprint(job.status().state)') == "running\n"
    assert notebook.text("job.backend.kill(job.handle)\nprint(job.wait(show=False).exit_code)") == "-9\n"


def test_a_line_for_each_event_where_nobody_watches(notebook: Notebook) -> None:
    notebook.text("import os\nos.environ['WATCHSTEP_QUIET'] = '1'")
    outputs = notebook.run('status = launch("quiet", "1", "100000", "0.02").wait()')
    notebook.text("del os.environ['WATCHSTEP_QUIET']")
    assert not shown(notebook)
    lines = stream(outputs, "stderr").splitlines()
    assert [" ".join(line.split()[1:4]) for line in lines[:2]] == [
        "default/quiet: started, attempt",
        "default/quiet: non_finite_values (warning)",
    ]
    assert len(lines) < 10
