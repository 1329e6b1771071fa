"""Runs and jobs in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import Message, Notebook, stream
from tests.services.driving import Driven
from tests.services.recording import PROJECT, Recording
from watchstep.client import Client
from watchstep_launch import Local

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
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    said = {"CI": "", "WATCHSTEP_QUIET": ""}
    with Notebook(tmp_path_factory.mktemp("notebook"), said).running() as held:
        yield held


@pytest.mark.ci
def test_a_cell_is_changed_in_place_or_has_a_line_for_each_event(
    ended: tuple[Driven, Recording, Client], notebook: Notebook
) -> None:
    _, _, client = ended
    address = client._transport.address
    notebook.text(f"""
from watchstep.client import Client
from watchstep_launch.view.show import Showing, kind_of
from watchstep_launch.view.run_status import RunWatcher

def show():
    client = Client("{address.url}", "{address.token}", "{PROJECT}")
    with Showing(RunWatcher(lambda: client, "{PROJECT}", "run-1"), kind_of(None)) as showing:
        showing.turn("job local:7 running")
        showing.turn("job local:7 ended", last=True)
    return client
""")
    outputs = notebook.run("client = show()")
    drawn = [message["msg_type"] for message in notebook.messages if "display_data" in message["msg_type"]]
    assert drawn == ["display_data", "update_display_data"]
    (picture,) = outputs  # the second took the place of the first, and nothing is on standard error
    assert picture.data["text/plain"].startswith("vision/run-1  running for ")
    assert " job local:7 ended\n" in picture.data["text/plain"]
    assert "\n  \N{BLACK CIRCLE} non_finite_values  firing\n" in picture.data["text/plain"]
    assert picture.data["text/html"].startswith("<pre style='font-family")
    (lines,) = notebook.run("import os\nos.environ['CI'] = 'true'\nshow()")[:1]
    assert (lines.output_type, lines.name) == ("stream", "stderr")
    assert len(lines.text.splitlines()) == len(list(client.events("run-1")))


@pytest.mark.ci
def test_a_run_is_read_where_an_event_loop_runs(
    ended: tuple[Driven, Recording, Client], notebook: Notebook, tmp_path: Path
) -> None:
    _, _, client = ended
    address = client._transport.address
    told = notebook.text(f"""
import asyncio, watchstep
from watchstep.client import Client
assert asyncio.get_running_loop().is_running()
client = Client("{address.url}", "{address.token}", "{PROJECT}")
print(next(iter(client.follow("run-1", after=0))).type)
print(next(client.tensors("run-1", "losses"))["name"])
print(watchstep.open_run("{tmp_path}/store/{PROJECT}/run-1").tensor("loss").steps()[-1])
""")
    assert stream(notebook.nb.cells[-1].outputs, "stderr") == ""
    assert told.split() == ["io.watchstep.run.started", "loss", "19"]


@pytest.fixture(scope="module")
def jobs_notebook(beside: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
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


def shown(jobs_notebook: Notebook) -> list[Message]:
    """What a cell's pictures were made by."""
    kinds = ("display_data", "update_display_data")
    return [message for message in jobs_notebook.messages if message["msg_type"] in kinds]


@pytest.mark.release
def test_a_cell_is_changed_in_place_until_its_rule_has_stopped_the_job(jobs_notebook: Notebook) -> None:
    outputs = jobs_notebook.run('job = launch("night", "60", "100000", "0.02")\nstatus = job.wait()')
    made = shown(jobs_notebook)
    assert [message["msg_type"] for message in made[:2]] == ["display_data", "update_display_data"]
    assert len({message["content"]["transient"]["display_id"] for message in made}) == 1
    (output,) = outputs  # one picture, and nothing on standard error
    text = output.data["text/plain"]
    head, *_ = text.splitlines()
    assert head.startswith("default/night  stopped after ")
    assert head.endswith(" ended with exit code 86")
    fired = (
        "non_finite_values (warning) firing: bad from step 60: 1 NaN among 1 elements of loss, 0 tolerated"
    )
    assert fired in " ".join(text.split())  # lines are wrapped
    assert "\N{MULTIPLICATION SIGN}" in text
    html = output.data["text/html"]
    assert html.startswith("<pre style='font-family")
    assert all(
        word in " ".join(html.split()) for word in ("default/night", "stopped", "firing: bad from step 60")
    )
    assert jobs_notebook.text("print(status)") == "JobStatus(state='ended', exit_code=86, detail='')\n"


@pytest.mark.release
def test_all_of_a_job_is_read_where_an_event_loop_runs(jobs_notebook: Notebook) -> None:
    told = jobs_notebook.text("""
import asyncio, threading
assert asyncio.get_running_loop().is_running()
job = launch("read", "1000", "3", "0")
print(*(event.type for event in job.events()))
job.wait(show=False)
print(job.run().tensor("loss").steps(), job.run_state().info.state, list(job.logs()))
await asyncio.to_thread(job.wait, show=False)
""")
    assert told == "io.watchstep.run.started io.watchstep.run.ended\n[0, 1, 2] completed []\n"


@pytest.mark.release
def test_an_interrupt_ends_the_waiting_and_not_the_job(jobs_notebook: Notebook) -> None:
    outputs = jobs_notebook.run(
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
    assert jobs_notebook.text('job = Estimator.reattach("long")\nprint(job.status().state)') == "running\n"
    assert jobs_notebook.text("job.backend.kill(job.handle)\nprint(job.wait(show=False).exit_code)") == "-9\n"


@pytest.mark.release
def test_a_line_for_each_event_where_nobody_watches(jobs_notebook: Notebook) -> None:
    jobs_notebook.text("import os\nos.environ['WATCHSTEP_QUIET'] = '1'")
    outputs = jobs_notebook.run('status = launch("quiet", "1", "100000", "0.02").wait()')
    jobs_notebook.text("del os.environ['WATCHSTEP_QUIET']")
    assert not shown(jobs_notebook)
    lines = stream(outputs, "stderr").splitlines()
    assert [" ".join(line.split()[1:4]) for line in lines[:2]] == [
        "default/quiet: started, attempt",
        "default/quiet: non_finite_values (warning)",
    ]
    assert len(lines) < 10
