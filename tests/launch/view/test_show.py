"""What is shown where: looks at a run of a real service, in a terminal or where nobody watches."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.launch.view.conftest import judge
from tests.services.driving import Driven
from tests.services.recording import PROJECT, Recording
from watchstep.client import Client
from watchstep.errors import ServiceError
from watchstep_launch.view.run_status import RunWatcher, words_of
from watchstep_launch.view.show import QUIET, Showing, kind_of
from watchstep_services.cli.jobs import app
from watchstep_services.db.models import RunRow


@pytest.fixture(autouse=True)
def _nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", QUIET):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard error is a terminal meanwhile; gives the other end of it. Not a fixture: pytest sets its own for each phase."""
    other, own = os.openpty()
    with os.fdopen(own, "w", encoding="utf-8") as written, monkeypatch.context() as changed:
        changed.setattr(sys, "stderr", written)
        changed.setenv("TERM", "xterm")
        yield other
    os.close(other)


def test_lines_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert kind_of(None) == "lines"
    assert kind_of(True) == "terminal"


def test_a_picture_where_somebody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch):
        assert (kind_of(None), kind_of(False)) == ("terminal", "lines")
        for name, value, kind in (
            ("CI", "true", "lines"),
            (QUIET, "1", "lines"),
            ("TERM", "dumb", "lines"),
            ("CI", "false", "terminal"),
        ):
            with monkeypatch.context() as said:
                said.setenv(name, value)
                assert kind_of(None) == kind


def test_a_line_for_each_event_and_each_once(
    ended: tuple[Driven, Recording, Client], capsys: pytest.CaptureFixture[str]
) -> None:
    driven, recording, client = ended
    watcher = RunWatcher(lambda: client, PROJECT, "run-1")
    with Showing(watcher, "lines") as showing:
        showing.turn()
        showing.turn()  # too soon to look again
        seen = capsys.readouterr().err
        recording.write(2, 20, 29)
        recording.write(3, 30, 39)
        judge(driven, 1)
        showing.turn(last=True)
    lines = [line.partition(" ")[2] for line in (seen + capsys.readouterr().err).splitlines()]
    assert lines == [f"vision/run-1: {words_of(event)}" for event in client.events("run-1")]
    assert any(
        line.startswith("vision/run-1: non_finite_values (critical) firing at step 15: ") for line in lines
    )
    assert seen


def test_what_is_seen_of_a_run(ended: tuple[Driven, Recording, Client]) -> None:
    driven, _, client = ended
    now = [1000.0]
    watcher = RunWatcher(lambda: client, PROJECT, "run-1", clock=lambda: now[0])
    watcher.poll()
    status = watcher.status
    assert (status.name, status.state, status.step) == ("vision/run-1", "running", 19)
    assert [(loss.name, loss.points[0], loss.points[-1]) for loss in status.losses] == [("loss", 1.0, None)]
    assert status.rules == {"non_finite_values": "firing", "exploding_gradient": "inactive"}
    assert status.steps_per_second is None
    now[0] += 10
    with driven.service.database.write() as session:
        session.get_one(RunRow, 1).last_step = 119
    watcher.poll()
    assert watcher.status.steps_per_second == 10.0


def test_a_service_that_is_away_takes_nothing_from_what_was_seen(
    ended: tuple[Driven, Recording, Client],
) -> None:
    _, _, client = ended
    away = Client("http://127.0.0.1:9", "", PROJECT)
    clients = [client, away]
    watcher = RunWatcher(lambda: clients.pop(0), PROJECT, "run-1")
    watcher.poll()
    watcher._connected = away
    assert watcher.poll() == []
    assert (watcher.status.step, "does not respond" in watcher.status.trouble) == (19, True)
    assert RunWatcher(lambda: client, PROJECT, "never").poll() == []


def test_a_terminal_is_drawn_anew(
    ended: tuple[Driven, Recording, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, client = ended
    with terminal(monkeypatch) as other:
        with Showing(RunWatcher(lambda: client, PROJECT, "run-1"), "terminal") as showing:
            showing.turn("job local:7 running")
            showing.turn("job local:7 ended", last=True)
        sys.stderr.flush()
        shown = ""
        while "job local:7 ended" not in shown:  # a terminal hands on what it has, piece by piece
            shown += os.read(other, 65_536).decode(errors="replace")
    assert "job local:7 running" in shown
    assert "\x1b[1A" in shown  # one picture over the other
    assert shown.rstrip().rpartition("job local:7")[2].startswith(" ended")


def test_the_command_shows_it_to_its_end(
    ended: tuple[Driven, Recording, Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven, _, client = ended
    with driven.service.database.write() as session:
        session.get_one(RunRow, 1).state = "failed"
    monkeypatch.setenv("WATCHSTEP_TOKEN", client._transport.address.token)
    words = ["watch", "vision/run-1", "--service", client._transport.address.url, "--lines"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "vision/run-1: non_finite_values (critical) firing at step 15" in done.stderr
    done = CliRunner().invoke(app, [*words[:-1], "--json"], catch_exceptions=False)
    assert (done.exit_code, done.stderr) == (0, "")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        event.raw for event in client.events("run-1")
    ]
    with pytest.raises(ServiceError, match="no service runs"):
        CliRunner().invoke(app, ["watch", "x", "--store", str(tmp_path)], catch_exceptions=False)
