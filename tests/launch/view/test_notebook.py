"""What a real notebook's cell shows of a run, and how it reads one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import Notebook, stream
from tests.services.driving import Driven
from tests.services.recording import PROJECT, Recording
from watchstep.client import Client


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    said = {"CI": "", "WATCHSTEP_QUIET": ""}
    with Notebook(tmp_path_factory.mktemp("notebook"), said).running() as held:
        yield held


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
